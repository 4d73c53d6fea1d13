import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import (
    GradientComparison,
    exploration_diagnostics,
    exploration_term,
    floor_share,
    gradient_comparison,
    token_spread,
)
from nemo_edo.losses.term import REDUCTIONS

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@few
@given(seed=seeds, garbage=st.sampled_from([torch.nan, torch.inf, -1e30]))
def test_token_spread_is_that_of_the_valid_tokens_in_any_order_to_the_last_bit(random_batch, seed, garbage):
    batch = random_batch(seed)
    valid, entropies = batch.mask == 1, batch.logprobs.detach().square()
    given_ = [torch.where(valid, tensor.detach(), garbage) for tensor in (batch.logprobs, entropies, batch.old)]
    found = token_spread(*given_, batch.mask)
    ratios = np.exp(given_[0][valid].double().numpy() - given_[2][valid].double().numpy())
    expected = {"entropy_p10": np.percentile(given_[1][valid].double(), 10),
                "entropy_p90": np.percentile(given_[1][valid].double(), 90), "ratio_mean": ratios.mean(),
                "ratio_std": ratios.std(), "ratio_min": ratios.min(), "ratio_max": ratios.max(),
                "ratio_p99": np.percentile(ratios, 99)}
    assert found == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(seed))
    assert token_spread(*(tensor[order] for tensor in given_), batch.mask[order]) == found


def test_token_spread_takes_percentiles_between_order_statistics():
    entropies = torch.tensor([[0.0, 9.0, 1.0, 8.0, 2.0, 7.0], [3.0, 6.0, 4.0, 5.0, 10.0, 99.0]])
    mask = torch.ones(2, 6)
    mask[1, 5] = 0
    zeros = torch.zeros(2, 6)
    found = token_spread(zeros, entropies, zeros, mask)
    assert (found["entropy_p10"], found["entropy_p90"]) == (1.0, 9.0)  # of 0, 1, ..., 10
    assert (found["ratio_min"], found["ratio_mean"], found["ratio_p99"], found["ratio_std"]) == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@few
@given(seed=seeds)
def test_diagnostics_are_the_term_j_star_the_floors_share_and_the_mean_length(random_batch, reduction, seed):
    batch = random_batch(seed)
    options = {"reduction": reduction, "log_ratio_floor": -0.2, "norm_length": 7}
    found = exploration_diagnostics(batch.logprobs, batch.old, batch.ref, batch.mask, beta=0.3, **options)
    assert found.keys() == {"exploration", "j_star", "floor_share", "response_length"}
    assert not any(term.sum.requires_grad for term in found.values())
    expected = exploration_term(batch.logprobs, batch.old, batch.mask, **options)
    assert torch.equal(found["exploration"].mean(), expected.mean())
    assert torch.equal(found["floor_share"].sum, floor_share(batch.logprobs, batch.old, batch.mask, -0.2).sum)
    lengths = batch.lengths[batch.lengths > 0].double()
    torch.testing.assert_close(found["response_length"].mean(), lengths.mean())
    j_star = -0.3 * ((batch.logprobs - batch.ref) * batch.mask).sum() / len(lengths)
    torch.testing.assert_close(found["j_star"].mean(), j_star.detach())


@few
@given(seed=seeds, beta=st.floats(0.05, 2))
def test_j_star_is_the_optimal_value_of_the_normalised_reward(seed, beta):
    ref, reward = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_ref = ref.log_softmax(0)
    reward = reward - reward.mean()  # mean zero under a uniform pi_old, of which every answer once is a fair sample
    log_z = (log_ref + reward / beta).logsumexp(0)
    optimal = log_ref + reward / beta - log_z
    uniform, mask = torch.full((5, 1), -math.log(5), dtype=torch.float64), torch.ones(5, 1)
    found = exploration_diagnostics(optimal[:, None], uniform, log_ref[:, None], mask, beta=beta)
    torch.testing.assert_close(found["j_star"].mean(), beta * log_z)


def test_the_content_of_padding_does_not_show_in_diagnostics(random_batch):
    batch = random_batch(0)
    dirty = [torch.where(batch.mask == 1, x.detach(), torch.nan) for x in (batch.logprobs, batch.old, batch.ref)]
    clean = exploration_diagnostics(batch.logprobs, batch.old, batch.ref, batch.mask, beta=0.1)
    found = exploration_diagnostics(*dirty, batch.mask, beta=0.1)
    assert all(torch.equal(found[name].sum, clean[name].sum) for name in clean)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("broken", ["shape", "value"])
def test_a_diagnostics_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    arguments = {"logprobs": batch.logprobs.detach(), "old_logprobs": batch.old, "ref_logprobs": batch.ref}
    arguments[name] = arguments[name][1:] if broken == "shape" else torch.full_like(batch.old, torch.inf)
    with pytest.raises(ValueError, match=f"^{name} has "):
        exploration_diagnostics(**arguments, mask=batch.mask, beta=0.1)


@pytest.mark.parametrize("beta", [-0.1, torch.inf, torch.nan])
def test_a_beta_below_zero_or_not_finite_is_an_error(random_batch, beta):
    batch = random_batch(0)
    with pytest.raises(ValueError, match="^beta is"):
        exploration_diagnostics(batch.logprobs, batch.old, batch.ref, batch.mask, beta=beta)


def network(seed=0):
    """A small network and two losses through its first layers; the last layer serves the task alone."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    hidden = layers[1](layers[0](torch.randn(5, 3)))
    return layers, layers[2](hidden).square().mean(), 0.1 * hidden.sum()


@few
@given(seed=st.integers(0, 10_000))
def test_the_comparison_is_that_of_the_concatenated_gradients(seed):
    layers, task, exploration = network(seed)
    found = gradient_comparison(task, exploration, layers.parameters())

    gradients = []
    for loss in (task, exploration):
        layers.zero_grad()
        loss.backward(retain_graph=True)
        every = [torch.zeros_like(p) if p.grad is None else p.grad for p in layers.parameters()]
        gradients.append(torch.cat([gradient.flatten() for gradient in every]).double())
    expected = [gradient.norm().item() for gradient in gradients]
    assert [found.task_norm, found.exploration_norm] == pytest.approx(expected, rel=1e-6)
    assert found.share == pytest.approx(expected[1] / expected[0], rel=1e-6)
    assert found.cosine == pytest.approx(torch.cosine_similarity(*gradients, dim=0).item(), rel=1e-5, abs=1e-7)


def test_the_training_step_goes_on_as_if_nothing_had_been_compared():
    layers, task, exploration = network()
    before = torch.ones(4)
    layers[0].bias.grad = before
    gradient_comparison(task, exploration, layers.parameters())
    assert layers[0].bias.grad is before and torch.equal(before, torch.ones(4))
    assert all(p.grad is None for p in layers.parameters() if p is not layers[0].bias)
    (task + exploration).backward()

    others, *losses = network()
    sum(losses).backward()
    torch.testing.assert_close(layers[0].bias.grad, others[0].bias.grad + 1)
    torch.testing.assert_close(layers[2].weight.grad, others[2].weight.grad)


def test_frozen_parameters_are_left_out():
    torch.manual_seed(0)
    frozen, trained = torch.randn(3), torch.randn(3, requires_grad=True)
    found = gradient_comparison((frozen * trained).sum(), trained.sum(), iter([frozen, trained]))
    assert found.task_norm == pytest.approx(frozen.norm().item())
    assert found.exploration_norm == pytest.approx(math.sqrt(3))


def test_the_norms_of_half_precision_gradients_are_added_up_in_double_precision():
    weights = torch.ones(5000, dtype=torch.float16, requires_grad=True)
    found = gradient_comparison((weights * 100).sum(), (weights * 1e-4).sum(), [weights])
    assert found.task_norm == pytest.approx(math.sqrt(5000) * 100)
    tiny = torch.tensor(1e-4, dtype=torch.float16).item()
    assert found.exploration_norm == pytest.approx(math.sqrt(5000) * tiny)
    assert found.cosine == pytest.approx(1)


@pytest.mark.parametrize(
    ("task_factor", "exploration_factor", "share"), [(0.0, 2.0, math.inf), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_a_zero_gradient_has_a_share_and_no_angle(task_factor, exploration_factor, share):
    weight = torch.ones(2, requires_grad=True)
    found = gradient_comparison(task_factor * weight.sum(), exploration_factor * weight.sum(), [weight])
    assert found.share == share and math.isnan(found.cosine)


def test_a_loss_without_a_graph_has_gradient_zero():
    weight = torch.ones(2, requires_grad=True)
    found = gradient_comparison(weight.sum(), torch.tensor(3.0), [weight])
    assert (found.exploration_norm, found.share) == (0.0, 0.0)


@few
@given(seed=seeds, cut=st.integers(0, 8))
def test_moments_of_parts_add_up_to_the_comparison_of_the_whole(seed, cut):
    task, exploration = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = [(task[:cut], exploration[:cut]), (task[cut:], exploration[cut:])]
    moments = sum(torch.stack([a @ a, b @ b, a @ b]) for a, b in parts)
    found = GradientComparison.from_moments(*moments)
    assert found.task_norm == pytest.approx(task.norm().item())
    assert found.exploration_norm == pytest.approx(exploration.norm().item())
    assert found.share == pytest.approx((exploration.norm() / task.norm()).item())
    assert found.cosine == pytest.approx(torch.cosine_similarity(task, exploration, dim=0).item())


def test_rounding_takes_no_cosine_beyond_one():
    assert GradientComparison.from_moments(1.0, 1.0, 1.0 + 1e-7).cosine == 1.0
    assert GradientComparison.from_moments(1.0, 4.0, -2.0 - 1e-7).cosine == -1.0


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ((-1.0, 1.0, 0.0), "^task_square is -1.0"),
        ((1.0, math.inf, 0.0), "^exploration_square is inf"),
        ((1.0, 1.0, math.nan), "^dot is nan"),
        ((1.0, 1.0, 2.0), "^dot is 2.0, beyond the product of the norms, 1.0"),
        ((0.0, 1.0, 0.5), "^dot is 0.5, beyond"),
    ],
)
def test_moments_that_no_gradients_have_are_errors(moments, message):
    with pytest.raises(ValueError, match=message):
        GradientComparison.from_moments(*moments)


def test_losses_and_parameters_that_cannot_be_compared_are_errors():
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"^exploration_loss has shape \(2,\), expected a scalar"):
        gradient_comparison(weight.sum(), 2 * weight, [weight])
    with pytest.raises(ValueError, match="^parameters has no tensor that requires a gradient"):
        gradient_comparison(weight.sum(), weight.sum(), [])
    with pytest.raises(ValueError, match=r"^parameters is one tensor of shape \(2,\)"):
        gradient_comparison(weight.sum(), weight.sum(), weight)
    with pytest.raises(ValueError, match="^task_loss has a gradient with NaN or infinite"):
        gradient_comparison((weight * torch.inf).sum(), weight.sum(), [weight])
