import math
from dataclasses import replace

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, OptimizerConfig, ScheduleConfig
from nemo_edo.losses import entropy_bonus, grpo_loss, kl_per_token
from nemo_edo.worker import remote

TEMPERATURE = 0.7  # of conftest.py
ED_GRPO = GRPOConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3), beta=0.1, exploration_coefficient=0.3)


@pytest.fixture
def model(make_model):
    return make_model(ED_GRPO)


@pytest.fixture(scope="module")
def raw_batch(tiny):
    return tiny.random_batch(rows=5)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.2])
def test_the_loss_is_grpo_loss_with_the_entropy_bonus_where_it_has_a_weight(
    make_model, raw_batch, aggregation, entropy_coefficient
):
    settings = replace(ED_GRPO, aggregation=aggregation, entropy_coefficient=entropy_coefficient)
    model = make_model(settings)
    logprobs, entropies = over(model).logprobs(raw_batch)
    terms, metrics = model.loss(logprobs, entropies, raw_batch, model.settings.exploration_weight)
    term = terms["grpo"]
    expected, expected_metrics = grpo_loss(
        logprobs, raw_batch.old_logprobs, raw_batch.ref_logprobs, raw_batch.advantages, raw_batch.mask, settings
    )
    bonus = entropy_bonus(entropies, raw_batch.mask, reduction=aggregation)
    assert float(term.sum) == pytest.approx(float(expected.sum + entropy_coefficient * bonus.sum), rel=1e-6)
    assert float(term.count) == model.loss_counts(raw_batch)["grpo"]
    assert metrics.keys() == expected_metrics.keys() | {"entropy"}
    mean_entropy = float((entropies * raw_batch.mask).sum() / raw_batch.mask.sum())
    assert float(metrics["entropy"].mean()) == pytest.approx(mean_entropy, rel=1e-6)


def test_before_the_first_step_exploration_and_log_ratio_are_exactly_zero_and_not_after_it(
    model, raw_batch, as_collected
):
    batch = as_collected(model, raw_batch)
    model.start_training(2)
    first, second = step(model, batch), step(model, batch)
    assert (first["exploration"], first["log_ratio"], first["kl"], first["clip_fraction"]) == (0.0, 0.0, 0.0, 0.0)
    assert abs(second["exploration"]) > 1e-4 and second["kl"] > 1e-6


def test_a_pass_over_a_collection_is_sent_in_parts_of_tokens_and_mask_alone(model, raw_batch, monkeypatch):
    policy, sent = over(model), []
    whole, call = policy.logprobs(raw_batch), policy.workers.call
    monkeypatch.setattr(remote, "TOKENS_OF_A_CALL", 2 * raw_batch.tokens.shape[1] + 1)
    monkeypatch.setattr(policy.workers, "call",
                        lambda *given, each: sent.append(each[0].rows) or call(*given, each=each))
    for found, expected in zip(policy.logprobs(raw_batch), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [(rows.size, [*rows.tensors()]) for rows in sent] == [(size, ["tokens", "mask"]) for size in (2, 2, 1)]


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
    {"covariance_control": "kl-cov", "sampler_correction": "tis", "sampler_level": "sequence",
     "importance_sampling_level": "sequence"},
    {"covariance_control": "clip-cov", "sampler_correction": "icepop", "exploration_control": "noise",
     "surrogate": "cispo", "kl_importance": "ratio"},
], ids=lambda changes: changes["covariance_control"])
def test_sampler_logprobs_exploration_factors_and_selected_tokens_reach_the_loss(make_model, full_batch, changes):
    model = make_model(replace(ED_GRPO, **changes))
    logprobs, entropies = over(model).logprobs(full_batch)

    def loss(**dropped) -> float:
        given = {name: getattr(full_batch, name) for name in ("sampler_logprobs", "exploration_factors", "selected")}
        term, _ = grpo_loss(logprobs, full_batch.old_logprobs, full_batch.ref_logprobs, full_batch.advantages,
                            full_batch.mask, model.settings, **{**given, **dropped})
        return float(term.mean())

    found = float(model.loss(logprobs, entropies, full_batch, model.settings.exploration_weight)[0]["grpo"].mean())
    assert found == pytest.approx(loss(), rel=1e-6)
    others = [loss(sampler_logprobs=full_batch.old_logprobs), loss(exploration_factors=None)]
    if changes["covariance_control"] == "kl-cov":  # clip-cov changes gradients only
        others.append(loss(selected=torch.zeros_like(full_batch.mask)))
    assert all(other != pytest.approx(found, rel=1e-4) for other in others)


def dense_gradient_norms(tiny, folder, batch, settings: GRPOConfig) -> tuple[float, float]:
    """(exploration at weight 1, the rest of the loss), of means over sequences, through ``transformers``."""
    model = tiny.load_dense(folder)
    logprobs, entropies = tiny.dense_logprobs(model, batch.tokens, TEMPERATURE)
    lengths = batch.mask.sum(dim=1)

    def mean(values):
        per_sequence = (values * batch.mask).sum(dim=1) / lengths.clamp(min=1)
        return per_sequence.sum() / (lengths > 0).sum()

    ratio, advantages = (logprobs - batch.old_logprobs).exp(), batch.advantages[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = kl_per_token(logprobs, batch.ref_logprobs, "k3")
    task = mean(-surrogate + settings.beta * kl - settings.entropy_coefficient * entropies)
    weights = 1.0 if batch.exploration_factors is None else batch.exploration_factors[:, None]
    exploration = mean(weights * (logprobs - batch.old_logprobs))

    def norm(value) -> float:
        gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))

    return norm(exploration), norm(task)


@pytest.mark.parametrize(("changes", "weighted"), [
    ({}, False), ({}, True), ({"exploration_coefficient": 0.0}, True), ({"micro_batch_tokens": 30}, True),
    ({"entropy_coefficient": 0.2}, False), ({"schedule": ScheduleConfig(kind="gradient-share")}, False),
], ids=str)
def test_the_ratio_of_gradients_is_that_of_autograd(make_model, tiny, tiny_qwen2, full_batch, changes, weighted):
    settings = replace(ED_GRPO, **changes)
    batch = full_batch.with_fields(sampler_logprobs=None, selected=None)
    if not weighted:
        batch = batch.with_fields(exploration_factors=None)
    exploration, task = dense_gradient_norms(tiny, tiny_qwen2, batch, settings)
    model = make_model(settings)
    model.start_training(1)
    assert over(model).exploration_gradient_ratio(batch) == pytest.approx(exploration / task, rel=1e-4)


def test_the_ratio_is_infinite_where_no_advantage_and_no_kl_has_a_gradient(make_model, raw_batch):
    model = make_model(replace(ED_GRPO, beta=0.0))
    model.start_training(1)
    without = raw_batch.with_fields(advantages=torch.zeros(5))
    assert over(model).exploration_gradient_ratio(without) == math.inf
    assert over(model).exploration_gradient_ratio(without.with_fields(exploration_factors=torch.zeros(5))) == 0.0


def mean_over(rows, values, mask):
    """Over the sequences of the given rows, of means over their tokens."""
    return ((values * mask).sum(dim=1) / mask.sum(dim=1))[rows].mean()


@pytest.mark.parametrize("cut", [
    {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_size": 8},
    {"micro_batch_tokens": 40, "packing": True, "share_prompts": True},
], ids=str)
@pytest.mark.parametrize("control", ["none", "noise"])
def test_with_older_samples_the_gradient_is_grpos_of_own_rows_plus_explorations_of_the_older_ones(
    make_model, tiny, tiny_qwen2, cut, control
):
    """By autograd through ``transformers``: two means with separate denominators, and a floor against the older policy
    (in nats: log-ratios here are far apart)."""
    older = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    batch = tiny.with_shared_prompts(tiny.random_batch(rows=5, seed=3), {1: 0, 4: 2}).with_fields(older=older)
    settings = replace(ED_GRPO, log_ratio_floor=-2.0, entropy_coefficient=0.2, exploration_control=control, **cut)
    dense = tiny.load_dense(tiny_qwen2)
    logprobs, entropies = tiny.dense_logprobs(dense, batch.tokens, TEMPERATURE)
    log_ratio, advantages = logprobs - batch.old_logprobs, batch.advantages[:, None]
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = kl_per_token(logprobs, batch.ref_logprobs, "k3")
    floored = log_ratio.clamp(min=-2.0) * (ratio.detach() if control == "noise" else 1.0)
    exploration = mean_over(older == 1, floored, batch.mask)
    (mean_over(older == 0, -surrogate + 0.1 * kl - 0.2 * entropies, batch.mask) + 0.3 * exploration).backward()

    model = make_model(settings)
    model.start_training(1)
    model.prepare_for_training_step()
    _, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    found = tiny.exported_gradients(model.policy)
    for name, parameter in dense.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert float((found[name] - parameter.grad).abs().max()) < 1e-5 * scale, name
    assert metrics["exploration"] == pytest.approx(exploration.item(), rel=1e-5)
    below = ((log_ratio < -2) * batch.mask)[older == 1].sum() / batch.mask[older == 1].sum()
    assert metrics["floor_fraction"] == pytest.approx(float(below)) and 0 < below < 1
    alone = model.validation_step(batch.rows(older == 0).with_fields(older=None))
    for name in ("entropy", "kl", "policy_loss", "log_ratio", "ratio_p99"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-5), name
