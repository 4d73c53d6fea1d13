"""ED-iDPO through Megatron against its equation through ``transformers``."""

import math
from dataclasses import replace

import pytest
import torch

from nemo_edo.config import IDPOConfig, OptimizerConfig, ScheduleConfig
from nemo_edo.losses import dpo_loss, sequence_logprobs

TEMPERATURE = 0.7  # of conftest.py
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_eps=1e-3)
ED_IDPO = IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, beta=0.3, exploration_coefficient=0.2)


@pytest.fixture
def model(make_model):
    return make_model(ED_IDPO)


def as_collected(model, batch):
    """As ``algorithms.idpo`` does: the trainer's own log-probabilities, before the first step."""
    model.freeze_reference()
    return batch.with_fields(old_logprobs=model.log_probs(batch)[0], ref_logprobs=model.reference_log_probs(batch))


def dense_terms(log_probs, batch, settings: IDPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(preference, exploration at weight 1): the equation, row by row."""
    preferences, explorations = [], []

    def of_row(values, row: int):
        tokens = values[row][batch.mask[row] == 1]
        return tokens.mean() if settings.length_normalized else tokens.sum()

    for row in range(batch.size):
        if batch.pair_role[row] == 1:
            chosen, rejected = (of_row(log_probs, i) - of_row(batch.ref_logprobs, i) for i in (row, row + 1))
            margin = chosen - rejected
            if settings.preference_loss == "ipo":
                preferences.append((margin - 1 / (2 * settings.beta)) ** 2)
            else:
                right, wrong = (torch.log(torch.sigmoid(sign * settings.beta * margin)) for sign in (1, -1))
                preferences.append(-(1 - settings.label_smoothing) * right - settings.label_smoothing * wrong)
        if batch.exploration_weights[row]:
            log_ratio = log_probs - batch.old_logprobs
            if settings.log_ratio_floor is not None:
                log_ratio = log_ratio.clamp(min=settings.log_ratio_floor)
            explorations.append(of_row(log_ratio, row))
    return torch.stack(preferences).mean(), torch.stack(explorations).mean()


def gradients(tensor, model) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(tensor, parameters, retain_graph=True), strict=True))


@pytest.fixture
def dense(tiny, tiny_qwen2, pairs):
    """dense(settings): (both terms' values, both terms' gradients) by autograd through ``transformers``."""

    def compute(settings: IDPOConfig, batch=pairs):
        reference = tiny.load_dense(tiny_qwen2)
        terms = dense_terms(tiny.dense_log_probs(reference, batch.tokens, TEMPERATURE)[0], batch, settings)
        return [float(term) for term in terms], [gradients(term, reference) for term in terms]

    return compute


def norm(tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


# --- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {}, {"length_normalized": True}, {"preference_loss": "ipo"}, {"label_smoothing": 0.2}, {"log_ratio_floor": -1.0},
    {"alpha": 0.7, "exploration_coefficient": None}, {"micro_batch_size": 8},
    {"micro_batch_size": 8, "micro_batch_tokens": 30}, {"micro_batch_tokens": 40, "packing": True},
], ids=str)
def test_loss_and_gradients_are_those_of_the_equation_with_two_denominators(make_model, tiny, pairs, dense, changes):
    settings = replace(ED_IDPO, **changes)
    weight = 0.7 * 0.3 if "alpha" in changes else 0.2
    (preference, exploration), (of_preference, of_exploration) = dense(settings)
    model = make_model(settings)
    model.start_training(1)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(pairs, forward_only=False)
    assert loss == pytest.approx(preference + weight * exploration, rel=1e-4)
    assert metrics["preference_loss"] == pytest.approx(preference, rel=1e-4)
    assert metrics["exploration"] == pytest.approx(exploration, rel=1e-4)
    for name, found in tiny.exported_gradients(model.policy).items():
        expected = of_preference[name] + weight * of_exploration[name]
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_metrics_before_the_first_step_say_that_policy_reference_and_sampler_are_one(model, pairs):
    batch = as_collected(model, pairs)
    metrics = model.validation_step(batch)
    assert metrics["preference_loss"] == pytest.approx(math.log(2)) == metrics["loss"]
    assert [metrics[name] for name in ("exploration", "log_ratio", "reward_margin", "reward_accuracy")] == [0.0] * 4
    valid = batch.mask.bool()
    assert metrics["entropy"] == pytest.approx(float(model.log_probs(batch)[1][valid].mean()), rel=1e-5)
    explored = (batch.mask * batch.exploration_weights[:, None]).sum()
    assert metrics["response_length"] == pytest.approx(float(explored) / 5)


def test_training_raises_the_margin_of_its_pairs(make_model, pairs):
    model = make_model(replace(ED_IDPO, exploration_coefficient=0.0))
    batch = as_collected(model, pairs)
    model.start_training(5)
    metrics = [model.train_step(batch) for _ in range(5)]
    margins = [step["reward_margin"] for step in metrics]
    assert margins[0] == 0 and margins == sorted(margins) and margins[-1] > 0.05
    assert metrics[-1]["reward_accuracy"] == 1.0


# --- exploration --------------------------------------------------------------------------------------------------


def snapshot_after(model, batch, steps: int = 3) -> list[torch.Tensor]:
    batch = as_collected(model, batch)
    model.start_training(steps)
    for _ in range(steps):  # exploration acts from the second step on
        model.train_step(batch)
    return model.policy.snapshot()


def test_alpha_zero_takes_exactly_etos_steps(make_model, pairs):
    """Those of DPO alone on the same pairs, to the last bit, whatever else is in the batch."""

    def eto(log_probs, entropies, micro):
        policy, ref = (sequence_logprobs(values, micro.mask) for values in (log_probs, micro.ref_logprobs))
        chosen, rejected = micro.pair_role == 1, micro.pair_role == -1
        return {"dpo": dpo_loss(policy[chosen], policy[rejected], ref[chosen], ref[rejected], beta=0.3)}, {}

    model = make_model(ED_IDPO)
    batch = as_collected(model, pairs)
    model.start_training(3)
    for _ in range(3):
        model.policy.train_step(batch, eto, loss_counts={"dpo": 2.0}, micro_batching=model.micro_batching,
                                temperature=TEMPERATURE)
    expected = model.policy.snapshot()

    off = snapshot_after(make_model(replace(ED_IDPO, alpha=0.0, exploration_coefficient=None)), pairs)
    on = snapshot_after(make_model(ED_IDPO), pairs)
    assert all(map(torch.equal, off, expected))
    assert not any(map(torch.equal, on, expected))


def test_exploration_lowers_the_probability_of_the_explored_samples(make_model, pairs):
    """The sign of the term: without pairs it alone moves the policy, away from what it has sampled."""
    model = make_model(ED_IDPO)
    batch = as_collected(model, pairs).with_fields(pair_role=torch.zeros(8, dtype=torch.int64))
    model.start_training(4)
    exploration = [model.train_step(batch)["exploration"] for _ in range(4)]
    assert exploration == sorted(exploration, reverse=True) and exploration[-1] < -1e-2


def test_rows_that_do_not_explore_have_no_part_in_the_term(model, pairs):
    """Another pi_old of theirs changes nothing but the ratios, which are of all rows."""
    silent = (pairs.exploration_weights == 0)[:, None]
    other = pairs.with_fields(old_logprobs=torch.where(silent, pairs.old_logprobs - 3, pairs.old_logprobs))
    found, expected = ({name: value for name, value in model.validation_step(batch).items()
                        if not name.startswith("ratio_")} for batch in (other, pairs))
    assert found == expected
    heard = pairs.with_fields(old_logprobs=torch.where(silent, pairs.old_logprobs, pairs.old_logprobs - 3))
    assert model.validation_step(heard)["loss"] > model.validation_step(pairs)["loss"] + 1


def test_a_step_with_another_exploration_weight_is_that_of_a_model_configured_so(make_model, pairs):
    def one_step(configured: float, given: float | None):
        model = make_model(replace(ED_IDPO, exploration_coefficient=configured))
        model.start_training(3)
        metrics = [model.train_step(pairs, exploration_weight=weight) for weight in (given, given)]
        return metrics, model.policy.snapshot()

    metrics, weights = one_step(0.2, 0.5)
    expected_metrics, expected = one_step(0.5, None)
    assert metrics == expected_metrics
    assert all(map(torch.equal, weights, expected))
    assert not any(map(torch.equal, weights, one_step(0.2, None)[1]))


def test_a_step_without_a_weight_goes_back_to_the_configured_one(model, pairs):
    before = model.validation_step(pairs)["loss"]
    model.start_training(1, OptimizerConfig(lr=1e-3, warmup_steps=1))  # a first step at learning rate 0
    assert model.train_step(pairs, exploration_weight=5.0)["loss"] != pytest.approx(before, rel=1e-3)
    model.start_training(1, OptimizerConfig(lr=1e-3, warmup_steps=1))
    assert model.train_step(pairs)["loss"] == before


# --- the ratio of gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"length_normalized": True}, {"exploration_coefficient": 0.0},
                                     {"schedule": ScheduleConfig(kind="gradient-share")},
                                     {"micro_batch_size": 8, "micro_batch_tokens": 30}], ids=str)
def test_the_ratio_of_gradients_is_that_of_autograd_whatever_the_weight(make_model, pairs, dense, changes):
    settings = replace(ED_IDPO, **changes)
    _, (preference, exploration) = dense(settings)
    model = make_model(settings)
    model.start_training(1)
    assert model.exploration_gradient_ratio(pairs) == pytest.approx(norm(exploration) / norm(preference), rel=1e-4)


def test_asking_for_the_ratio_leaves_no_gradient_and_changes_nothing(make_model, pairs):
    def train(ask: bool):
        model = make_model(ED_IDPO)
        batch = as_collected(model, pairs)
        model.start_training(3)
        metrics = []
        for _ in range(3):
            if ask:
                weights, loss = model.policy.snapshot(), model.validation_step(batch)["loss"]
                model.finish_validation_step()
                assert model.exploration_gradient_ratio(batch) > 0
                assert all(map(torch.equal, model.policy.snapshot(), weights))
                assert not any(p.main_grad.any() for chunk in model.built.chunks for p in chunk.parameters())
                assert model.validation_step(batch)["loss"] == loss  # with the exploration weight, as before
            metrics.append(model.train_step(batch))
        return metrics, model.policy.snapshot()

    (asked, weights), (not_asked, expected) = train(ask=True), train(ask=False)
    assert asked == not_asked
    assert all(map(torch.equal, weights, expected))


def test_the_ratio_is_infinite_without_a_task_gradient_and_0_without_both(model, pairs):
    model.start_training(1)
    without_pairs = pairs.with_fields(pair_role=torch.zeros(8, dtype=torch.int64))
    assert model.exploration_gradient_ratio(without_pairs) == math.inf
    nothing = without_pairs.with_fields(exploration_weights=torch.zeros(8))
    assert model.exploration_gradient_ratio(nothing) == 0.0
    assert model.exploration_gradient_ratio(pairs.with_fields(exploration_weights=torch.zeros(8))) == 0.0


# --- splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [
    {"micro_batch_size": 4}, {"micro_batch_size": 8}, {"micro_batch_size": 64},
    {"micro_batch_size": 8, "micro_batch_tokens": 24}, {"micro_batch_size": 4, "micro_batch_tokens": 40},
    {"micro_batch_tokens": 40, "packing": True}, {"micro_batch_tokens": 40, "packing": True, "share_prompts": True},
])
def test_steps_do_not_depend_on_how_a_batch_is_cut(make_model, tiny, pairs, cut):
    pairs = tiny.with_shared_prompts(pairs, {1: 0, 3: 0})
    def train(**cut):
        model = make_model(replace(ED_IDPO, **cut))
        start, batch = model.policy.snapshot(), as_collected(model, pairs)
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
