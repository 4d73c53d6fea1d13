import math
from dataclasses import replace

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, OptimizerConfig
from nemo_edo.losses import entropy_bonus, grpo_loss, kl_per_token

TEMPERATURE = 0.7  # of conftest.py
ED_GRPO = GRPOConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3), beta=0.1, exploration_coefficient=0.3)


@pytest.fixture
def model(make_model):
    return make_model(ED_GRPO)


@pytest.fixture(scope="module")
def raw_batch(tiny):
    return tiny.random_batch(rows=5)


def test_before_the_first_step_exploration_and_log_ratio_are_exactly_zero_and_not_after_it(
    model, raw_batch, as_collected
):
    batch = as_collected(model, raw_batch)
    model.start_training(2)
    first, second = step(model, batch), step(model, batch)
    assert (first["exploration"], first["log_ratio"], first["kl"], first["clip_fraction"]) == (0.0, 0.0, 0.0, 0.0)
    assert abs(second["exploration"]) > 1e-4 and second["kl"] > 1e-6


@pytest.fixture(scope="module")
def full_batch(raw_batch):
    """With everything that a collection or a minibatch may add."""
    generator = torch.Generator().manual_seed(1)
    noise, chance = (torch.rand(raw_batch.mask.shape, generator=generator) for _ in range(2))
    return raw_batch.with_fields(
        sampler_logprobs=(raw_batch.old_logprobs + noise - 0.5) * raw_batch.mask,
        exploration_factors=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25]),
        selected=(chance < 0.3).float() * raw_batch.mask,
    )


@pytest.mark.parametrize("changes", [
    {"aggregation": "token-mean", "entropy_coefficient": 0.2},
    {"covariance_control": "kl-cov", "sampler_correction": "tis", "sampler_level": "sequence",
     "importance_sampling_level": "sequence"},
    {"covariance_control": "clip-cov", "sampler_correction": "icepop", "exploration_control": "noise",
     "surrogate": "cispo", "kl_importance": "ratio"},
], ids=str)
def test_the_loss_is_grpo_loss_of_all_that_the_batch_has_with_the_entropy_bonus(make_model, full_batch, changes):
    controlled = "covariance_control" in changes
    batch = full_batch if controlled else full_batch.with_fields(selected=None, sampler_logprobs=None)
    model = make_model(settings := replace(ED_GRPO, **changes))
    logprobs, entropies = over(model).logprobs(batch)

    def expected(**dropped):
        given = {name: getattr(batch, name) for name in ("sampler_logprobs", "exploration_factors", "selected")}
        return grpo_loss(logprobs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.mask, settings,
                         **{**given, **dropped})

    terms, metrics = model.loss(logprobs, entropies, batch, model.settings.exploration_weight)
    term, expected_metrics = expected()
    bonus = entropy_bonus(entropies, batch.mask, reduction=settings.aggregation)
    found = float(terms["grpo"].sum)
    assert found == pytest.approx(float(term.sum + settings.entropy_coefficient * bonus.sum), rel=1e-6)
    assert float(terms["grpo"].count) == model.loss_counts(batch)["grpo"]
    assert metrics.keys() == expected_metrics.keys() | {"entropy"}
    mean_entropy = float((entropies * batch.mask).sum() / batch.mask.sum())
    assert float(metrics["entropy"].mean()) == pytest.approx(mean_entropy, rel=1e-6)
    others = [expected(exploration_factors=None)]
    if controlled:
        others.append(expected(sampler_logprobs=batch.old_logprobs))
    if settings.covariance_control == "kl-cov":  # clip-cov changes gradients only
        others.append(expected(selected=torch.zeros_like(batch.mask)))
    assert all(float(other.sum) != pytest.approx(float(term.sum), rel=1e-4) for other, _ in others)


def mean_over(rows, values, mask):
    """Over the sequences of the given rows, of means over their tokens."""
    return ((values * mask).sum(dim=1) / mask.sum(dim=1))[rows].mean()


@pytest.mark.parametrize(("cut", "control"), [
    ({"micro_batch_size": 1}, "none"), ({"micro_batch_size": 3}, "noise"), ({"micro_batch_size": 8}, "none"),
    ({"micro_batch_tokens": 40, "packing": True, "share_prompts": True}, "noise"),
], ids=str)
def test_with_older_samples_the_gradient_is_grpos_of_own_rows_plus_explorations_of_the_older_ones(
    make_model, tiny, tiny_qwen2, cut, control
):
    """By autograd through ``transformers``: two means with separate denominators, and a floor against the older policy
    (in nats: log-ratios here are far apart)."""
    older, factors = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.5, 1.0, 1.0, 0.25])
    batch = tiny.with_shared_prompts(tiny.random_batch(rows=5, seed=3), {1: 0, 4: 2})
    batch = batch.with_fields(older=older, exploration_factors=factors)
    settings = replace(ED_GRPO, log_ratio_floor=-2.0, entropy_coefficient=0.2, exploration_control=control, **cut)
    dense = tiny.load_dense(tiny_qwen2)
    logprobs, entropies = tiny.dense_logprobs(dense, batch.tokens, TEMPERATURE)
    log_ratio, advantages = logprobs - batch.old_logprobs, batch.advantages[:, None]
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = kl_per_token(logprobs, batch.ref_logprobs, "k3")
    floored = log_ratio.clamp(min=-2.0) * (ratio.detach() if control == "noise" else 1.0)
    task = mean_over(older == 0, -surrogate + 0.1 * kl - 0.2 * entropies, batch.mask)
    exploration = mean_over(older == 1, factors[:, None] * floored, batch.mask)
    names, parameters = zip(*dense.named_parameters(), strict=True)
    parts = [torch.autograd.grad(value, parameters, retain_graph=True) for value in (task, exploration)]

    model = make_model(settings)
    model.start_training(1)
    model.prepare_for_training_step()
    _, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    found = tiny.exported_gradients(model.policy)
    for name, of_task, of_exploration in zip(names, *parts, strict=True):
        expected = of_task + 0.3 * of_exploration
        assert float((found[name] - expected).abs().max()) < 1e-5 * float(expected.abs().max()), name
    of_task, of_exploration = (math.hypot(*(float(part.norm()) for part in gradients)) for gradients in parts)
    assert over(model).exploration_gradient_ratio(batch) == pytest.approx(of_exploration / of_task, rel=1e-4)
    assert metrics["exploration"] == pytest.approx(exploration.item(), rel=1e-5)
    below = ((log_ratio < -2) * batch.mask)[older == 1].sum() / batch.mask[older == 1].sum()
    assert metrics["floor_fraction"] == pytest.approx(float(below)) and 0 < below < 1
    alone = model.validation_step(batch.rows(older == 0).with_fields(older=None))
    for name in ("entropy", "kl", "policy_loss", "log_ratio", "ratio_p99"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-5), name
