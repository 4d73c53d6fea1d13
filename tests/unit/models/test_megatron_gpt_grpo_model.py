from dataclasses import replace

import pytest
import torch

from nemo_edo.config import GRPOConfig, OptimizerConfig
from nemo_edo.losses import entropy_bonus, grpo_loss

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
    term, metrics = model.loss(log_probs, entropies, raw_batch)
    expected, expected_metrics = grpo_loss(
        log_probs, raw_batch.old_logprobs, raw_batch.ref_logprobs, raw_batch.advantages, raw_batch.mask, settings
    )
    bonus = entropy_bonus(entropies, raw_batch.mask, reduction=aggregation)
    assert float(term.sum) == pytest.approx(float(expected.sum + entropy_coefficient * bonus.sum), rel=1e-6)
    assert float(term.count) == model.loss_count(raw_batch)
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


# --- the reference ------------------------------------------------------------------------------------------------


def test_reference_log_probs_stay_fixed_while_the_policy_trains(model, raw_batch):
    batch = as_collected(model, raw_batch)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    model.start_training(3)
    for _ in range(3):
        model.train_step(batch)
        assert torch.equal(model.reference_log_probs(batch), batch.ref_logprobs)
    assert (model.log_probs(batch)[0] - batch.ref_logprobs).abs().max() > 1e-2


def test_asking_for_the_reference_between_steps_changes_no_step(make_model, raw_batch):
    def train(ask: bool):
        model = make_model(ED_GRPO)
        batch = as_collected(model, raw_batch)
        model.start_training(3)
        for _ in range(3):
            model.train_step(batch)
            if ask:
                model.reference_log_probs(batch)
        return model.policy.snapshot()

    assert all(map(torch.equal, train(ask=True), train(ask=False)))


def test_freeze_reference_again_moves_the_reference_to_the_current_weights(model, raw_batch):
    batch = as_collected(model, raw_batch)
    model.start_training(1)
    model.train_step(batch)
    model.freeze_reference()
    assert torch.equal(model.reference_log_probs(batch), model.log_probs(batch)[0])


def test_reference_log_probs_without_a_reference_are_an_error_that_says_what_to_call(model, raw_batch):
    with pytest.raises(RuntimeError, match=r"call freeze_reference\(\)"):
        model.reference_log_probs(raw_batch)
