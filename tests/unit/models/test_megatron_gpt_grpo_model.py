import math
from dataclasses import replace

import pytest
import torch

from nemo_edo.config import GRPOConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig, ScheduleConfig
from nemo_edo.losses import entropy_bonus, grpo_loss, kl_per_token
from nemo_edo.models import MegatronGPTGRPOModel
from nemo_edo.models.megatron_gpt_model import model_config

TEMPERATURE = 0.7  # of conftest.py
ED_GRPO = GRPOConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3), beta=0.1, exploration_coefficient=0.3)


@pytest.fixture
def model(make_model):
    return make_model(ED_GRPO)


@pytest.fixture(scope="module")
def raw_batch(tiny):
    return tiny.random_batch(rows=5)


def as_collected(model, batch):
    """As ``algorithms.grpo`` does: the trainer's own log-probabilities, before the first step."""
    model.freeze_reference()
    return replace(batch, old_logprobs=model.log_probs(batch)[0], ref_logprobs=model.reference_log_probs(batch))


# --- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.2])
def test_the_loss_is_grpo_loss_with_the_entropy_bonus_where_it_has_a_weight(
    make_model, raw_batch, aggregation, entropy_coefficient
):
    settings = replace(ED_GRPO, aggregation=aggregation, entropy_coefficient=entropy_coefficient)
    model = make_model(settings)
    log_probs, entropies = model.log_probs(raw_batch)
    terms, metrics = model.loss(log_probs, entropies, raw_batch)
    term = terms["grpo"]
    expected, expected_metrics = grpo_loss(
        log_probs, raw_batch.old_logprobs, raw_batch.ref_logprobs, raw_batch.advantages, raw_batch.mask, settings
    )
    bonus = entropy_bonus(entropies, raw_batch.mask, reduction=aggregation)
    assert float(term.sum) == pytest.approx(float(expected.sum + entropy_coefficient * bonus.sum), rel=1e-6)
    assert float(term.count) == model.loss_counts(raw_batch)["grpo"]
    assert metrics.keys() == expected_metrics.keys() | {"entropy"}
    assert float(metrics["entropy"].mean()) == pytest.approx(
        float((entropies * raw_batch.mask).sum() / raw_batch.mask.sum()), rel=1e-6
    )


def first_step(make_model, batch, **changes) -> list[torch.Tensor]:
    model = make_model(replace(ED_GRPO, **changes))
    batch = as_collected(model, batch)
    model.start_training(3)
    for _ in range(3):  # exploration acts from the second step on
        model.train_step(batch)
    return model.policy.snapshot()


def test_alpha_zero_takes_the_steps_of_exploration_off_to_the_last_bit(make_model, raw_batch):
    alpha_zero = first_step(make_model, raw_batch, alpha=0.0, exploration_coefficient=None)
    off = first_step(make_model, raw_batch, alpha=None, exploration_coefficient=0.0)
    on = first_step(make_model, raw_batch)
    assert all(map(torch.equal, alpha_zero, off))
    assert not any(map(torch.equal, alpha_zero, on))


def test_before_the_first_step_exploration_and_log_ratio_are_exactly_zero_and_not_after_it(model, raw_batch):
    batch = as_collected(model, raw_batch)
    model.start_training(2)
    first, second = model.train_step(batch), model.train_step(batch)
    assert (first["exploration"], first["log_ratio"], first["kl"], first["clip_fraction"]) == (0.0, 0.0, 0.0, 0.0)
    assert abs(second["exploration"]) > 1e-4 and second["kl"] > 1e-6


def test_exploration_lowers_the_probability_of_what_was_sampled(make_model, raw_batch):
    """The sign of the term: with no advantages and no KL, it alone moves the policy, away from its samples."""
    model = make_model(replace(ED_GRPO, beta=0.0, optimizer=OptimizerConfig(lr=1e-4)))
    batch = replace(as_collected(model, raw_batch), advantages=torch.zeros(5))
    model.start_training(4)
    metrics = [model.train_step(batch) for _ in range(4)]
    assert [m["exploration"] for m in metrics] == sorted((m["exploration"] for m in metrics), reverse=True)
    assert metrics[-1]["exploration"] < -1e-3


@pytest.fixture(scope="module")
def full_batch(raw_batch):
    """With everything that a collection or a minibatch may add."""
    generator = torch.Generator().manual_seed(1)
    noise, chance = (torch.rand(raw_batch.mask.shape, generator=generator) for _ in range(2))
    return raw_batch.with_fields(
        sampler_logprobs=(raw_batch.old_logprobs + noise - 0.5) * raw_batch.mask,
        exploration_weights=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25]),
        selected=(chance < 0.3).float() * raw_batch.mask,
    )


@pytest.mark.parametrize("changes", [
    {"covariance_control": "kl-cov", "sampler_correction": "tis"},
    {"covariance_control": "clip-cov", "sampler_correction": "icepop", "exploration_control": "noise"},
], ids=lambda changes: changes["covariance_control"])
def test_sampler_log_probs_exploration_weights_and_selected_tokens_reach_the_loss(make_model, full_batch, changes):
    model = make_model(replace(ED_GRPO, **changes))
    log_probs, entropies = model.log_probs(full_batch)

    def loss(**dropped) -> float:
        given = {name: getattr(full_batch, name) for name in ("sampler_logprobs", "exploration_weights", "selected")}
        term, _ = grpo_loss(log_probs, full_batch.old_logprobs, full_batch.ref_logprobs, full_batch.advantages,
                            full_batch.mask, model.settings, **{**given, **dropped})
        return float(term.mean())

    found = float(model.loss(log_probs, entropies, full_batch)[0]["grpo"].mean())
    assert found == pytest.approx(loss(), rel=1e-6)
    others = [loss(sampler_logprobs=full_batch.old_logprobs), loss(exploration_weights=None)]
    if changes["covariance_control"] == "kl-cov":  # clip-cov changes gradients only
        others.append(loss(selected=torch.zeros_like(full_batch.mask)))
    assert all(other != pytest.approx(found, rel=1e-4) for other in others)


# --- the exploration weight ---------------------------------------------------------------------------------------


def test_a_step_with_another_exploration_weight_is_that_of_a_model_configured_so(make_model, raw_batch):
    def one_step(configured: float, given: float | None):
        model = make_model(replace(ED_GRPO, exploration_coefficient=configured))
        model.start_training(1)
        return model.train_step(raw_batch, exploration_weight=given), model.policy.snapshot()

    metrics, weights = one_step(0.3, 0.7)
    expected_metrics, expected = one_step(0.7, None)
    assert metrics == expected_metrics
    assert all(map(torch.equal, weights, expected))
    assert one_step(0.3, None)[0]["loss"] != pytest.approx(metrics["loss"], rel=1e-3)


def dense_gradient_norms(tiny, folder, batch, settings: GRPOConfig) -> tuple[float, float]:
    """(exploration at weight 1, the rest of the loss), of means over sequences, through ``transformers``."""
    model = tiny.load_dense(folder)
    log_probs, entropies = tiny.dense_log_probs(model, batch.tokens, TEMPERATURE)
    lengths = batch.mask.sum(dim=1)

    def mean(values):
        per_sequence = (values * batch.mask).sum(dim=1) / lengths.clamp(min=1)
        return per_sequence.sum() / (lengths > 0).sum()

    ratio, advantages = (log_probs - batch.old_logprobs).exp(), batch.advantages[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = kl_per_token(log_probs, batch.ref_logprobs, "k3")
    task = mean(-surrogate + settings.beta * kl - settings.entropy_coefficient * entropies)
    weights = 1.0 if batch.exploration_weights is None else batch.exploration_weights[:, None]
    exploration = mean(weights * (log_probs - batch.old_logprobs))

    def norm(value) -> float:
        gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))

    return norm(exploration), norm(task)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("changes", [{}, {"exploration_coefficient": 0.0}, {"micro_batch_tokens": 30},
                                     {"entropy_coefficient": 0.2}, {"schedule": ScheduleConfig(kind="gradient-share")}],
                         ids=str)
def test_the_ratio_of_gradients_is_that_of_autograd(make_model, tiny, tiny_qwen2, raw_batch, full_batch, changes,
                                                    weighted):
    settings = replace(ED_GRPO, **changes)
    batch = raw_batch
    if weighted:
        batch = batch.with_fields(exploration_weights=full_batch.exploration_weights)
    exploration, task = dense_gradient_norms(tiny, tiny_qwen2, batch, settings)
    model = make_model(settings)
    model.start_training(1)
    assert model.exploration_gradient_ratio(batch) == pytest.approx(exploration / task, rel=1e-4)


def test_asking_for_the_ratio_leaves_no_gradient_and_changes_no_step(make_model, raw_batch):
    def train(ask: bool):
        model = make_model(ED_GRPO)
        batch = as_collected(model, raw_batch)
        model.start_training(3)
        metrics = []
        for _ in range(3):
            if ask:
                weights, loss = model.policy.snapshot(), model.validation_step(batch)["loss"]
                assert model.exploration_gradient_ratio(batch) > 0
                assert all(map(torch.equal, model.policy.snapshot(), weights))
                assert not any(p.main_grad.any() for chunk in model.built.chunks for p in chunk.parameters())
                assert model.validation_step(batch)["loss"] == loss  # with the exploration weight, as before
            metrics.append(model.train_step(batch))
        return metrics, model.policy.snapshot()

    (asked, weights), (not_asked, expected) = train(ask=True), train(ask=False)
    assert asked == not_asked
    assert all(map(torch.equal, weights, expected))


def test_the_ratio_is_infinite_where_no_advantage_and_no_kl_has_a_gradient(make_model, raw_batch):
    model = make_model(replace(ED_GRPO, beta=0.0))
    model.start_training(1)
    without = raw_batch.with_fields(advantages=torch.zeros(5))
    assert model.exploration_gradient_ratio(without) == math.inf
    assert model.exploration_gradient_ratio(without.with_fields(exploration_weights=torch.zeros(5))) == 0.0


# --- splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [
    {"micro_batch_size": 1}, {"micro_batch_size": 5}, {"micro_batch_size": 5, "micro_batch_tokens": 12},
    {"micro_batch_size": 5, "micro_batch_tokens": 30}, {"micro_batch_tokens": 30, "packing": True},
    {"micro_batch_tokens": 30, "packing": True, "share_prompts": True},
])
def test_steps_do_not_depend_on_how_a_batch_is_cut(make_model, tiny, raw_batch, cut):
    raw_batch = tiny.with_shared_prompts(raw_batch, {1: 0, 4: 2})
    # eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
    settings = replace(ED_GRPO, optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3), entropy_coefficient=0.1)

    def train(**cut):
        model = make_model(replace(settings, **cut))
        start, batch = model.policy.snapshot(), as_collected(model, raw_batch)
        model.start_training(3)
        metrics = [model.train_step(batch) for _ in range(3)]
        for step in metrics:
            step.pop("padding_share")
        return metrics, model.policy.snapshot(), start

    metrics, weights, start = train(**cut)
    expected_metrics, expected, _ = train(micro_batch_size=2)
    for found, wanted in zip(metrics, expected_metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for found, wanted, before in zip(weights, expected, start, strict=True):
        assert (wanted - before).abs().max() > 1e-4, "nothing to compare"
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


# --- the reference ------------------------------------------------------------------------------------------------


def test_reference_log_probs_stay_fixed_while_the_policy_trains(model, raw_batch):
    batch = as_collected(model, raw_batch)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    model.start_training(3)
    for _ in range(3):
        model.train_step(batch)
        assert torch.equal(model.reference_log_probs(batch), batch.ref_logprobs)
    assert (model.log_probs(batch)[0] - batch.ref_logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("placement", ["host", "resident"])
def test_asking_for_the_reference_between_steps_changes_no_step(make_model, raw_batch, placement):
    def train(ask: bool):
        model = make_model(replace(ED_GRPO, reference_placement=placement))
        batch = as_collected(model, raw_batch)
        model.start_training(3)
        for _ in range(3):
            model.train_step(batch)
            if ask:
                model.reference_log_probs(batch)
        return model.policy.snapshot()

    assert all(map(torch.equal, train(ask=True), train(ask=False)))


@pytest.mark.parametrize("kind", ["initial", "previous", "ema"])
def test_the_references_log_probs_do_not_depend_on_where_it_is_kept(make_model, raw_batch, kind):
    def log_probs(placement: str):
        model = make_model(replace(ED_GRPO, reference=kind, reference_placement=placement))
        batch = as_collected(model, raw_batch)
        model.start_training(2)
        for _ in range(2):
            model.train_step(batch)
            model.move_reference(kind, 0.5)
        return model.reference_log_probs(batch)

    assert torch.equal(log_probs("host"), log_probs("resident"))


def test_freeze_reference_again_moves_the_reference_to_the_current_weights(model, raw_batch):
    batch = as_collected(model, raw_batch)
    model.start_training(1)
    model.train_step(batch)
    model.freeze_reference()
    assert torch.equal(model.reference_log_probs(batch), model.log_probs(batch)[0])


@pytest.mark.parametrize(("kind", "decay", "share"), [("initial", 0.5, 1.0), ("previous", 0.5, 0.0),
                                                      ("ema", 0.75, 0.75), ("ema", 0.0, 0.0), ("ema", 1.0, 1.0)])
def test_the_reference_moves_to_the_share_of_its_weights_that_stays(model, raw_batch, kind, decay, share):
    batch = as_collected(model, raw_batch)
    start = model.policy.snapshot()
    model.start_training(2)
    model.train_step(batch)
    current = model.policy.snapshot()
    model.move_reference(kind, decay)
    for reference, old, new in zip(model.reference, start, current, strict=True):
        assert not torch.equal(old, new)
        torch.testing.assert_close(reference, share * old + (1 - share) * new, rtol=0, atol=1e-6)
    moved = model.reference_log_probs(batch)
    model.train_step(batch)
    assert torch.equal(model.reference_log_probs(batch), moved), "the reference trains along"


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


def test_reference_log_probs_without_a_reference_are_an_error_that_says_what_to_call(model, raw_batch):
    with pytest.raises(RuntimeError, match=r"call freeze_reference\(\)"):
        model.reference_log_probs(raw_batch)


@pytest.mark.parametrize("changes", [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"micro_batch_tokens": 30}],
                         ids=str)
def test_percentiles_and_extremes_are_of_the_whole_batch_however_it_is_cut(make_model, raw_batch, changes):
    model = make_model(replace(ED_GRPO, **changes))
    metrics = model.validation_step(raw_batch)
    log_probs, entropies = model.log_probs(raw_batch)
    valid = raw_batch.mask == 1
    ratios, entropies = (log_probs - raw_batch.old_logprobs)[valid].double().exp(), entropies[valid].double()
    quantile = torch.tensor([0.1, 0.9, 0.99], dtype=torch.float64)
    low, high, _ = entropies.quantile(quantile).tolist()
    expected = {"entropy_p10": low, "entropy_p90": high, "ratio_mean": ratios.mean().item(),
                "ratio_std": ratios.std(correction=0).item(), "ratio_min": ratios.min().item(),
                "ratio_max": ratios.max().item(), "ratio_p99": ratios.quantile(quantile).tolist()[2]}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["entropy_p10"] < metrics["entropy"] < metrics["entropy_p90"]
