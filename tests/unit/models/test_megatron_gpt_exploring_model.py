"""What ED-GRPO and ED-iDPO share: the exploration weight, the ratio of gradients, the reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.models import MegatronGPTGRPOModel
from nemo_edo.models.megatron_gpt_model import model_config

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


def test_asking_for_the_ratio_of_gradients_leaves_no_gradient_and_changes_no_step(arm, as_collected):
    def ask(model, batch) -> None:
        assert over(model).exploration_gradient_ratio(batch) > 0
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
    logprobs, entropies = over(model).logprobs(batch)
    valid = batch.mask == 1
    ratios, entropies = (logprobs - batch.old_logprobs)[valid].double().exp(), entropies[valid].double()
    low, high, _ = entropies.quantile(torch.tensor([0.1, 0.9, 0.99], dtype=torch.float64)).tolist()
    expected = {"entropy_p10": low, "entropy_p90": high, "ratio_mean": ratios.mean().item(),
                "ratio_std": ratios.std(correction=0).item(), "ratio_min": ratios.min().item(),
                "ratio_max": ratios.max().item(), "ratio_p99": ratios.quantile(0.99).item()}
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


@pytest.mark.parametrize("kind", ["initial", "ema"])
def test_asking_for_the_reference_changes_no_step_wherever_it_is_kept(make_model, batch, as_collected, kind):
    def trained(placement: str, before_step):
        model = make_model(replace(ED_GRPO, reference=kind, reference_placement=placement))
        collected = as_collected(model, batch)
        weights = train(model, collected, before_step=before_step)[1]
        model.move_reference(kind, 0.5)
        return weights, over(model).reference_logprobs(collected)

    expected, reference = trained("host", lambda model, batch: None)
    for placement in ("host", "resident"):
        weights, found = trained(placement, lambda model, batch: over(model).reference_logprobs(batch))
        assert all(map(torch.equal, weights, expected)) and torch.equal(found, reference)


@pytest.mark.parametrize(("kind", "decay", "share"), [("initial", 0.5, 1.0), ("previous", 0.5, 0.0),
                                                      ("ema", 0.75, 0.75)])
def test_the_reference_moves_to_the_share_of_its_weights_that_stays(model, batch, as_collected, kind, decay, share):
    collected = as_collected(model, batch)
    start = model.policy.snapshot()
    model.start_training(2)
    step(model, collected)
    current = model.policy.snapshot()
    model.move_reference(kind, decay)
    for reference, old, new in zip(model.reference, start, current, strict=True):
        assert not torch.equal(old, new)
        torch.testing.assert_close(reference, share * old + (1 - share) * new, rtol=0, atol=1e-6)


def test_an_ema_reference_in_bf16_adds_up_moves_below_bf16s_spacing(tiny_qwen2):
    config = model_config(tiny_qwen2, parallelism=ParallelismConfig(), precision=PrecisionConfig("bf16"), seed=0,
                          threads=1, training=ED_GRPO)
    model = MegatronGPTGRPOModel(config)
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
