"""ED-iDPO through Megatron against its equation through ``transformers``."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.tiny_models import over

from nemo_edo.config import IDPOConfig, OptimizerConfig

TEMPERATURE = 0.7  # of conftest.py
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_eps=1e-3)
ED_IDPO = IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, beta=0.3, exploration_coefficient=0.2)


@pytest.fixture
def model(make_model):
    return make_model(ED_IDPO)


def dense_terms(logprobs, batch, settings: IDPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(preference, exploration at weight 1): the equation, row by row."""
    preferences, explorations = [], []

    def of_row(values, row: int):
        tokens = values[row][batch.mask[row] == 1]
        return tokens.mean() if settings.length_normalized else tokens.sum()

    for row in range(batch.size):
        if batch.pair_role[row] == 1:
            chosen, rejected = (of_row(logprobs - batch.ref_logprobs, i) for i in (row, row + 1))
            preferences.append(-torch.log(torch.sigmoid(settings.beta * (chosen - rejected))))
        if batch.exploration_factors[row]:
            explorations.append(of_row(logprobs - batch.old_logprobs, row))
    return torch.stack(preferences).mean(), torch.stack(explorations).mean()


def gradients(tensor, model) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(tensor, parameters, retain_graph=True), strict=True))


@pytest.mark.parametrize("changes", [
    {}, {"length_normalized": True}, {"alpha": 0.7, "exploration_coefficient": None},
    {"micro_batch_size": 8, "micro_batch_tokens": 30}, {"micro_batch_tokens": 40, "packing": True},
    {"micro_batch_tokens": 40, "packing": True, "share_prompts": True},
], ids=str)
def test_loss_gradients_and_their_ratio_are_those_of_the_equation_with_two_denominators(
    make_model, tiny, tiny_qwen2, pairs, changes
):
    """By autograd through ``transformers``."""
    settings = replace(ED_IDPO, **changes)
    weight = 0.7 * 0.3 if "alpha" in changes else 0.2
    dense = tiny.load_dense(tiny_qwen2)
    terms = dense_terms(tiny.dense_logprobs(dense, pairs.tokens, TEMPERATURE)[0], pairs, settings)
    of_preference, of_exploration = (gradients(term, dense) for term in terms)
    preference, exploration = (term.item() for term in terms)
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
    norms = [math.hypot(*(float(part.norm()) for part in parts.values())) for parts in (of_exploration, of_preference)]
    assert over(model).exploration_gradient_ratio(pairs) == pytest.approx(norms[0] / norms[1], rel=1e-4)


def test_metrics_before_the_first_step_say_that_policy_reference_and_sampler_are_one(model, pairs, as_collected):
    batch = as_collected(model, pairs)
    metrics = model.validation_step(batch)
    assert metrics["preference_loss"] == pytest.approx(math.log(2)) == metrics["loss"]
    assert [metrics[name] for name in ("exploration", "log_ratio", "reward_margin", "reward_accuracy")] == [0.0] * 4
    valid = batch.mask.bool()
    assert metrics["entropy"] == pytest.approx(float(over(model).logprobs(batch)[1][valid].mean()), rel=1e-5)
    explored = (batch.mask * batch.exploration_factors[:, None]).sum()
    assert metrics["response_length"] == pytest.approx(float(explored) / 5)


def test_the_ratio_is_infinite_without_a_task_gradient_and_0_without_both(model, pairs):
    model.start_training(1)
    without_pairs = pairs.with_fields(pair_role=torch.zeros(8, dtype=torch.int64))
    assert over(model).exploration_gradient_ratio(without_pairs) == math.inf
    nothing = without_pairs.with_fields(exploration_factors=torch.zeros(8))
    assert over(model).exploration_gradient_ratio(nothing) == 0.0
    assert over(model).exploration_gradient_ratio(pairs.with_fields(exploration_factors=torch.zeros(8))) == 0.0
