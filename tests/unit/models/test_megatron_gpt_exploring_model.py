"""ED-GRPO, and what it and ED-iDPO share: the exploration weight, the ratio of gradients, the reference."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig
from nemo_edo.losses import entropy_bonus, grpo_loss, kl_per_token, token_spread

TEMPERATURE = 0.7  # of conftest.py
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_eps=1e-3)
ED_GRPO = GRPOConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3), beta=0.1, exploration_coefficient=0.3)
ED_IDPO = IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, beta=0.3, exploration_coefficient=0.2)


OLDER = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
"""Rows of an older policy: with two rows each, some micro-batches have own rows only, older ones only, or both."""


@pytest.fixture(params=["grpo", "grpo with older samples", "idpo"])
def arm(request, make_model, tiny, pairs):
    """Models of one kind, and a batch."""
    if request.param == "idpo":
        settings, batch = ED_IDPO, pairs
    else:
        settings = replace(ED_GRPO, optimizer=OPTIMIZER, entropy_coefficient=0.1)
        batch = tiny.random_batch(rows=5)
        if request.param != "grpo":
            batch = tiny.random_batch(rows=7).with_fields(older=OLDER)
    return SimpleNamespace(make=lambda **changes: make_model(replace(settings, **changes)), batch=batch)


@pytest.fixture
def model(make_model):
    return make_model(ED_GRPO)


@pytest.fixture(scope="module")
def batch(tiny):
    return tiny.random_batch(rows=5)


def train(model, batch, steps: int = 3, before_step=lambda model, batch: None):
    """(metrics of every step, weights after the last)."""
    model.start_training(steps)
    metrics = []
    for _ in range(steps):
        before_step(model, batch)
        metrics.append(step(model, batch))
    return metrics, model.policy.snapshot()


def test_alpha_zero_takes_the_steps_of_exploration_off_to_the_last_bit(arm, as_collected):
    def weights(**changes):
        model = arm.make(**changes)
        return train(model, as_collected(model, arm.batch))[1]

    alpha_zero, off = weights(alpha=0.0, exploration_coefficient=None), weights(exploration_coefficient=0.0)
    assert all(map(torch.equal, alpha_zero, off))
    assert not any(map(torch.equal, alpha_zero, weights()))  # exploration acts from the second step on


def test_a_step_with_another_exploration_weight_is_that_of_a_model_configured_so(arm):
    def two_steps(configured: float, given: float | None):
        model = arm.make(exploration_coefficient=configured)
        model.start_training(3)
        return [step(model, arm.batch, exploration_weight=given) for _ in range(2)], model.policy.snapshot()

    metrics, weights = two_steps(0.2, 0.7)
    expected_metrics, expected = two_steps(0.7, None)
    assert metrics == expected_metrics and all(map(torch.equal, weights, expected))
    assert two_steps(0.2, None)[0][0]["loss"] != pytest.approx(metrics[0]["loss"], rel=1e-3)


def test_asking_for_the_ratio_of_gradients_and_the_reference_leaves_no_gradient_and_changes_no_step(arm, as_collected):
    def ask(model, batch) -> None:
        assert over(model).exploration_gradient_ratio(batch) > 0
        over(model).reference_logprobs(batch)
        assert not any(p.main_grad.any() for chunk in model.built.chunks for p in chunk.parameters())

    results = []
    for options in ({}, {"before_step": ask}):
        model = arm.make()
        results.append(train(model, as_collected(model, arm.batch), **options))
    (not_asked, expected), (asked, weights) = results
    assert asked == not_asked
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("changes", [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"micro_batch_tokens": 30}],
                         ids=str)
def test_percentiles_and_extremes_are_of_the_whole_batch_however_it_is_cut(make_model, batch, changes):
    model = make_model(replace(ED_GRPO, **changes))
    metrics = model.validation_step(batch)
    expected = token_spread(*over(model).logprobs(batch), old_logprobs=batch.old_logprobs, mask=batch.mask)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["entropy_p10"] < metrics["entropy"] < metrics["entropy_p90"]


def test_a_reference_is_the_policy_at_the_time_of_the_last_freeze(model, batch, as_collected):
    with pytest.raises(RuntimeError, match=r"freeze_reference\(\)"):
        over(model).reference_logprobs(batch)
    collected = as_collected(model, batch)
    train(model, collected)
    assert torch.equal(over(model).reference_logprobs(collected), collected.old_logprobs)
    assert (over(model).logprobs(collected)[0] - collected.old_logprobs).abs().max() > 1e-2
    model.freeze_reference()
    assert torch.equal(over(model).reference_logprobs(collected), over(model).logprobs(collected)[0])


@pytest.mark.parametrize(("kind", "decay", "share", "placement"), [
    ("initial", 0.5, 1.0, "resident"), ("previous", 0.5, 0.0, "host"), ("ema", 0.75, 0.75, "resident")])
def test_the_reference_moves_to_the_share_of_its_weights_that_stays(
    make_model, batch, as_collected, kind, decay, share, placement
):
    model = make_model(replace(ED_GRPO, reference_placement=placement))
    collected = as_collected(model, batch)
    start = model.policy.snapshot()
    model.start_training(2)
    step(model, collected)
    current = model.policy.snapshot()
    model.move_reference(kind, decay)
    for reference, old, new in zip(model.reference, start, current, strict=True):
        assert not torch.equal(old, new)
        torch.testing.assert_close(reference, share * old + (1 - share) * new, rtol=0, atol=1e-6)


def test_an_ema_reference_in_bf16_adds_up_moves_below_bf16s_spacing(make_model):
    model = make_model(ED_GRPO, dtype="bf16")
    model.freeze_reference()
    start = model.policy.snapshot()
    assert {weight.dtype for weight in start} == {torch.bfloat16}
    next_ones = [torch.nextafter(weight, torch.full_like(weight, torch.inf)) for weight in start]
    model.policy.load(next_ones)
    for _ in range(10):
        model.move_reference("ema", 0.9)
    for reference, old, new in zip(model.reference, start, next_ones, strict=True):
        share = (reference - old.float()) / (new.float() - old.float())
        torch.testing.assert_close(share, torch.full_like(share, 1 - 0.9**10), rtol=0, atol=1e-2)


# --- ED-GRPO -------------------------------------------------------------------------------------------------------


def test_before_the_first_step_exploration_and_log_ratio_are_exactly_zero_and_not_after_it(model, batch, as_collected):
    first, second = train(model, as_collected(model, batch), steps=2)[0]
    assert (first["exploration"], first["log_ratio"], first["kl"], first["clip_fraction"]) == (0.0, 0.0, 0.0, 0.0)
    assert abs(second["exploration"]) > 1e-4 and second["kl"] > 1e-6


@pytest.fixture(scope="module")
def full_batch(batch):
    """With everything that a collection or a minibatch may add."""
    generator = torch.Generator().manual_seed(1)
    noise, chance = (torch.rand(batch.mask.shape, generator=generator) for _ in range(2))
    return batch.with_fields(
        sampler_logprobs=(batch.old_logprobs + noise - 0.5) * batch.mask,
        exploration_factors=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25]),
        selected=(chance < 0.3).float() * batch.mask,
    )


@pytest.mark.parametrize("changes", [
    {"aggregation": "token-mean", "entropy_coefficient": 0.2},
    {"covariance_control": "kl-cov", "sampler_correction": "tis", "sampler_level": "sequence"},
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
        others += [expected(sampler_logprobs=batch.old_logprobs), expected(selected=torch.zeros_like(batch.mask))]
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
