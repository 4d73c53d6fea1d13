import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad
from torch.nn import functional as F

from nemo_edo.losses import (
    LossTerm,
    exact_exploration_term,
    exploration,
    exploration_noise_term,
    exploration_term,
    floor_share,
    reduce_tokens,
    reduction_count,
)
from nemo_edo.losses.term import REDUCTIONS

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="session")
def policy(enumerable_policy):
    return enumerable_policy


def expected_term(policy, logprobs, old_logprobs, reduction, log_ratio_floor=None, term=exploration_term):
    """The term's exact expectation over pi_old: every response once, weighted by its probability."""
    weights = policy.probabilities(old_logprobs).detach()
    return term(
        logprobs, old_logprobs, policy.mask,
        reduction=reduction, weights=weights, log_ratio_floor=log_ratio_floor, norm_length=7,
    ).sum


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-sum-norm"])
@few
@given(seed=seeds)
def test_the_expected_gradient_of_sums_is_zero_while_the_policy_is_its_sampler(policy, reduction, seed):
    logits = policy.random_logits(seed)
    logprobs = policy.logprobs(logits)
    (gradient,) = grad(expected_term(policy, logprobs, logprobs.detach(), reduction), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


@few
@given(seed=seeds)
def test_the_expected_gradient_of_sequence_means_is_that_of_the_mean_inverse_length(policy, seed):
    logits = policy.random_logits(seed)
    logprobs = policy.logprobs(logits)
    (gradient,) = grad(
        expected_term(policy, logprobs, logprobs.detach(), "seq-mean-token-mean"), logits, retain_graph=True
    )
    (expected,) = grad((policy.probabilities(logprobs) / policy.lengths).sum(), logits)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@few
@given(seed=seeds, old_seed=seeds)
def test_the_expected_value_of_sums_is_minus_the_kl_from_sampler_to_policy(policy, seed, old_seed):
    logprobs, old = policy.logprobs(policy.random_logits(seed)), policy.logprobs(policy.random_logits(old_seed))
    value = expected_term(policy, logprobs, old.detach(), "seq-sum")
    p_old, p = policy.probabilities(old), policy.probabilities(logprobs)
    torch.testing.assert_close(value, -(p_old * (p_old.log() - p.log())).sum(), rtol=0, atol=1e-12)
    assert value <= 1e-15


def test_the_logit_gradient_of_the_expected_log_probability_is_sampler_minus_policy():
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    log_p = logits.log_softmax(0)
    term = exploration_term(log_p[:, None], q.log()[:, None], torch.ones(3, 1), reduction="seq-sum", weights=q)
    (gradient,) = grad(term.sum, logits)
    torch.testing.assert_close(gradient, q - log_p.exp())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@few
@given(seed=seeds)
def test_which_frozen_policy_stands_in_the_log_ratio_does_not_change_the_gradient(random_batch, reduction, seed):
    batch = random_batch(seed)
    gradients = [
        grad(exploration_term(batch.logprobs, frozen, batch.mask, reduction=reduction, norm_length=7).mean(),
             batch.logprobs)[0]
        for frozen in (batch.old, batch.ref)
    ]
    assert torch.equal(*gradients)


@few
@given(seed=seeds, floor=st.floats(-0.6, -0.01))
def test_below_the_floor_the_value_is_the_floor_and_the_gradient_exactly_zero(random_batch, seed, floor):
    batch = random_batch(seed)
    term = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="token-mean", log_ratio_floor=floor)
    (gradient,) = grad(term.sum, batch.logprobs)
    log_ratio = (batch.logprobs - batch.old).detach()
    held = (log_ratio < floor) & (batch.mask == 1)
    assert torch.equal(gradient, torch.where(held, 0.0, batch.mask))
    torch.testing.assert_close(term.sum.detach(), (torch.where(held, floor, log_ratio) * batch.mask).sum())
    assert term.mean() >= floor
    share = floor_share(batch.logprobs, batch.old, batch.mask, floor)
    assert (int(share.sum), int(share.count)) == (int(held.sum()), int(batch.mask.sum()))
    assert not share.sum.requires_grad


def test_without_a_floor_the_floor_share_is_zero_of_all_valid_tokens(random_batch):
    batch = random_batch(0)
    share = floor_share(batch.logprobs, batch.old, batch.mask, None)
    assert (share.sum.item(), int(share.count)) == (0.0, int(batch.mask.sum()))


@few
@given(seed=seeds)
def test_token_weights_multiply_the_gradient_and_leave_the_count(random_batch, seed):
    batch = random_batch(seed)
    weights = batch.ref.exp().requires_grad_()
    plain = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-mean-token-mean")
    weighted = exploration_term(
        batch.logprobs, batch.old, batch.mask, reduction="seq-mean-token-mean", weights=weights
    )
    (plain_gradient,), (gradient,) = grad(plain.sum, batch.logprobs), grad(weighted.sum, batch.logprobs)
    torch.testing.assert_close(gradient, weights.detach() * plain_gradient)
    assert weighted.count == plain.count


@few
@given(seed=seeds, garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_padding_content_changes_neither_value_nor_gradient(random_batch, seed, garbage):
    batch = random_batch(seed)
    results = []
    for filler in (0.0, garbage):
        leaf = torch.where(batch.mask == 1, batch.logprobs.detach(), filler).requires_grad_()
        old = torch.where(batch.mask == 1, batch.old, filler)
        weights = torch.where(batch.lengths > 0, batch.advantages.abs(), filler)
        mean = exploration_term(
            leaf, old, batch.mask, reduction="seq-mean-token-mean", weights=weights, log_ratio_floor=-0.2
        ).mean()
        results.append((mean, *grad(mean, leaf)))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


def test_no_gradient_flows_into_the_sampler_or_the_weights(random_batch):
    batch = random_batch(0)
    old, weights = batch.old.clone().requires_grad_(), batch.advantages.abs().requires_grad_()
    exploration_term(batch.logprobs, old, batch.mask, reduction="seq-sum", weights=weights).sum.backward()
    assert old.grad is None and weights.grad is None and batch.logprobs.grad is not None


@pytest.mark.parametrize("floor", [0.0, 0.1, torch.nan])
def test_a_floor_that_is_not_below_zero_is_an_error(random_batch, floor):
    batch = random_batch(0)
    with pytest.raises(ValueError, match="log_ratio_floor is"):
        exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-sum", log_ratio_floor=floor)
    with pytest.raises(ValueError, match="log_ratio_floor is"):
        floor_share(batch.logprobs, batch.old, batch.mask, floor)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "weights"])
@pytest.mark.parametrize("broken", ["shape", "value"])
def test_an_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    arguments = {"logprobs": batch.logprobs.detach(), "old_logprobs": batch.old, "weights": batch.ref.exp()}
    if broken == "shape":
        arguments[name] = arguments[name][:, 1:]
    else:
        arguments[name] = arguments[name].clone().index_fill_(1, torch.tensor(0), torch.nan)
    with pytest.raises(ValueError, match=f"^{name} has "):
        exploration_term(**arguments, mask=batch.mask, reduction="seq-sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@few
@given(seed=seeds, old_seed=seeds)
def test_the_gradient_is_the_weighted_mean_of_the_responses_log_probability_gradients(
    policy, reduction, seed, old_seed
):
    logits, old = policy.random_logits(seed), policy.logprobs(policy.random_logits(old_seed)).detach()
    n, lengths = len(policy.responses), policy.lengths
    weights = {
        "seq-sum": torch.full_like(lengths, 1 / n),
        "seq-mean-token-mean": 1 / (n * lengths),
        "token-mean": torch.full_like(lengths, 1 / lengths.sum()),
        "seq-mean-token-sum-norm": torch.full_like(lengths, 1 / (7 * n)),
    }[reduction]

    def mean(logits):
        return exploration_term(policy.logprobs(logits), old, policy.mask, reduction=reduction, norm_length=7).mean()

    (gradient,) = grad(mean(logits), logits)
    (expected,) = grad(weights @ policy.probabilities(policy.logprobs(logits)).log(), logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)
    direction, step = torch.linspace(-1, 2, gradient.numel(), dtype=torch.float64).view_as(gradient), 1e-5
    with torch.no_grad():
        slope = (mean(logits + step * direction) - mean(logits - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-9)


def form_of_the_term(name, seed):
    """(row slice -> term, leaf, mask) of one of the three forms on random data with padding."""
    generator = torch.Generator().manual_seed(seed)
    logits, old_logits = torch.randn(2, 6, 5, 4, generator=generator, dtype=torch.float64)
    tokens = torch.randint(4, (6, 5, 1), generator=generator)
    mask = torch.arange(5) < torch.randint(0, 6, (6, 1), generator=generator)
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    old, leaf = old_logits.log_softmax(-1).gather(-1, tokens)[..., 0], logits.requires_grad_()

    def term(rows, reduction):
        options = {"reduction": reduction, "log_ratio_floor": -0.7, "weights": weights[rows], "norm_length": 7}
        if name == "exact":
            return exact_exploration_term(leaf[rows], old_logits[rows], mask[rows], **options)
        logprobs = leaf.log_softmax(-1).gather(-1, tokens)[..., 0]
        form = {"sampled": exploration_term, "noise": exploration_noise_term}[name]
        return form(logprobs[rows], old[rows], mask[rows], **options)

    return term, leaf, mask


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["sampled", "noise", "exact"])
@few
@given(seed=seeds, cuts=st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_gives_the_same_gradient(name, reduction, seed, cuts):
    term, leaf, mask = form_of_the_term(name, seed)
    whole = term(slice(None), reduction)
    assert whole.count == reduction_count(mask, reduction)
    edges = [0, *sorted(cuts), 6]
    total, gradient = LossTerm(torch.zeros((), dtype=torch.float64), 0), torch.zeros_like(leaf)
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        if not mask[start:end].any():
            continue  # padding alone is no micro-batch
        part = term(slice(start, end), reduction)
        total, gradient = total + part.detached(), gradient + grad(part.sum / whole.count.clamp(min=1), leaf)[0]
    torch.testing.assert_close(total.mean(), whole.mean().detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, grad(whole.mean(), leaf)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-sum-norm"])
@few
@given(seed=st.integers(0, 1000), old_seed=st.integers(1001, 2000))
def test_the_noise_controls_expected_gradient_of_sums_is_zero_off_policy_where_the_terms_is_not(
    policy, reduction, seed, old_seed
):
    logits, old = policy.random_logits(seed), policy.logprobs(policy.random_logits(old_seed)).detach()
    noise, term = (
        grad(expected_term(policy, policy.logprobs(logits), old, reduction, term=form), logits)[0]
        for form in (exploration_noise_term, exploration_term)
    )
    torch.testing.assert_close(noise, torch.zeros_like(noise), rtol=0, atol=1e-14)
    assert term.abs().max() > 1e-3


@few
@given(seed=seeds)
def test_the_noise_control_multiplies_each_tokens_term_by_its_ratio_and_keeps_the_floor(random_batch, seed):
    batch = random_batch(seed)
    ratio = (batch.logprobs - batch.old).detach().exp()
    weights = batch.ref.exp()
    arguments = {"reduction": "seq-mean-token-mean", "log_ratio_floor": -0.2}
    noise = exploration_noise_term(batch.logprobs, batch.old, batch.mask, weights=weights, **arguments)
    plain = exploration_term(batch.logprobs, batch.old, batch.mask, weights=weights * ratio, **arguments)
    assert noise.count == plain.count
    torch.testing.assert_close(noise.sum, plain.sum)
    (gradient,), (expected,) = (grad(term.sum, batch.logprobs) for term in (noise, plain))
    torch.testing.assert_close(gradient, expected)
    assert (gradient[ratio.log() < -0.2] == 0).all()


def test_while_the_policy_is_its_sampler_the_noise_control_is_the_term(random_batch):
    batch = random_batch(0)
    gradients = [
        grad(form(batch.logprobs, batch.logprobs, batch.mask, reduction="token-mean").mean(), batch.logprobs)[0]
        for form in (exploration_noise_term, exploration_term)
    ]
    assert torch.equal(*gradients)


def test_the_noise_control_refuses_a_ratio_that_overflows():
    with pytest.raises(ValueError, match=r"^the ratio exp\(logprobs - old_logprobs\) has NaN or infinite"):
        exploration_noise_term(torch.zeros(1, 1), torch.full((1, 1), -100.0), torch.ones(1, 1), reduction="seq-sum")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("floor", [None, -0.5])
@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-sum-norm"])
@few
@given(seed=st.integers(0, 1000), old_seed=st.integers(1001, 2000))
def test_the_exact_form_is_the_expectation_of_the_sampled_one(policy, reduction, floor, temperature, seed, old_seed):
    logits, old_logits = policy.random_logits(seed), policy.random_logits(old_seed).detach()
    old = policy.logprobs(old_logits / temperature)
    sampled = expected_term(policy, policy.logprobs(logits / temperature), old, reduction, floor)
    exact = exact_exploration_term(
        policy.position_logits(logits), policy.position_logits(old_logits), policy.mask,
        reduction=reduction, log_ratio_floor=floor, weights=policy.probabilities(old), temperature=temperature,
        norm_length=7,
    ).sum
    torch.testing.assert_close(exact, sampled, rtol=0, atol=1e-13)
    torch.testing.assert_close(*(grad(value, logits)[0] for value in (exact, sampled)), rtol=0, atol=1e-13)


def position_data(seed, dtype=torch.float64, vocabulary=6):
    generator = torch.Generator().manual_seed(seed)
    logits, old_logits = torch.randn(2, 3, 4, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    return logits.requires_grad_(), old_logits, mask


@pytest.mark.parametrize("chunk", [1, 13, 2**24])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@few
@given(seed=seeds)
def test_the_exact_form_is_torchs_negated_kl_whatever_the_chunk(reduction, chunk, seed):
    logits, old_logits, mask = position_data(seed)
    divergence = F.kl_div(logits.log_softmax(-1), old_logits.log_softmax(-1), reduction="none", log_target=True)
    expected = reduce_tokens(-divergence.sum(-1), mask, reduction, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exploration, "_CHUNK_ELEMENTS", chunk)
        found = exact_exploration_term(logits, old_logits, mask, reduction=reduction, norm_length=7)
        (gradient,) = grad(found.mean(), logits)
    assert found.count == expected.count
    torch.testing.assert_close(found.sum, expected.sum)
    torch.testing.assert_close(gradient, grad(expected.mean(), logits)[0], rtol=1e-12, atol=1e-14)


def test_the_exact_forms_gradient_agrees_with_finite_differences():
    logits, old_logits, mask = position_data(3)

    def mean(logits):
        return exact_exploration_term(
            logits, old_logits, mask, reduction="seq-sum", log_ratio_floor=-0.5, temperature=0.7
        ).mean()

    assert torch.autograd.gradcheck(mean, logits)


def test_entries_with_probability_zero_under_the_sampler_contribute_nothing():
    logits, old_logits, mask = position_data(0)
    fewer = exact_exploration_term(logits[..., :4], old_logits[..., :4], mask, reduction="seq-sum").sum
    with torch.no_grad():
        padded, old_padded = logits.clone(), old_logits.clone()
        padded[..., 4:] = old_padded[..., 4:] = -torch.inf  # columns that only pad the vocabulary
    padded.requires_grad_()
    both = exact_exploration_term(padded, old_padded, mask, reduction="seq-sum").sum
    torch.testing.assert_close(both, fewer)
    torch.testing.assert_close(grad(both, padded)[0], grad(fewer, logits)[0])

    q, log_p = old_logits[..., :4].softmax(-1), logits.log_softmax(-1)[..., :4]
    expected = ((q * (log_p - q.log())).sum(-1) * mask).sum()
    found = exact_exploration_term(logits, old_padded, mask, reduction="seq-sum").sum
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad(found, logits)[0], grad(expected, logits)[0])


def test_an_entry_that_the_policy_excludes_and_the_sampler_does_not_needs_the_floor():
    logits, old_logits, mask = position_data(0)
    excluded = logits.detach().clone()
    excluded[1, 2, 0] = -torch.inf
    excluded.requires_grad_()
    with pytest.raises(ValueError, match="^logits has probability 0 .* sequence 1, token 2,.* log_ratio_floor"):
        exact_exploration_term(excluded, old_logits, mask, reduction="seq-sum")
    floored = exact_exploration_term(excluded, old_logits, mask, reduction="seq-sum", log_ratio_floor=-50.0).sum
    (gradient,) = grad(floored, excluded)
    q, log_p = old_logits[1, 2].softmax(-1), logits[1, 2, 1:].log_softmax(-1)
    elsewhere = mask.clone()
    elsewhere[1, 2] = 0
    others = exact_exploration_term(logits, old_logits, elsewhere, reduction="seq-sum").sum
    torch.testing.assert_close(floored, others + q[0] * -50 + (q[1:] * (log_p - q[1:].log())).sum())
    assert gradient[1, 2, 0] == 0 and gradient.isfinite().all()
    torch.testing.assert_close(gradient[1, 2, 1:], q[1:] - log_p.exp() * q[1:].sum())


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_logits_at_padding_reach_neither_value_nor_gradient_of_the_exact_form(garbage):
    logits, old_logits, mask = position_data(0)
    clean = exact_exploration_term(logits, old_logits, mask, reduction="token-mean").mean()
    dirty_logits, dirty_old = (
        torch.where(mask[..., None] == 1, x.detach(), garbage) for x in (logits, old_logits)
    )
    dirty = exact_exploration_term(dirty_logits.requires_grad_(), dirty_old, mask, reduction="token-mean").mean()
    assert torch.equal(dirty, clean)
    (gradient,) = grad(dirty, dirty_logits)
    assert torch.equal(gradient, grad(clean, logits)[0])
    assert (gradient[mask == 0] == 0).all()


def test_the_exact_form_of_an_empty_mask_is_an_error():
    logits, old_logits, mask = position_data(0)
    with pytest.raises(ValueError, match="mask is empty"):
        exact_exploration_term(logits, old_logits, torch.zeros_like(mask), reduction="token-mean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_form_of_half_precision_logits_is_computed_in_single_precision(dtype):
    logits, old_logits, mask = position_data(0, dtype, vocabulary=500)
    found = exact_exploration_term(logits, old_logits, mask, reduction="token-mean", temperature=0.7).mean()
    wide = logits.detach().double().requires_grad_()
    expected = exact_exploration_term(wide, old_logits.double(), mask, reduction="token-mean", temperature=0.7).mean()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = grad(found, logits)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, grad(expected, wide)[0].to(dtype), rtol=1e-2, atol=1e-6)


def test_the_exact_form_keeps_nothing_of_the_logits_size_but_the_logits():
    logits, old_logits, mask = position_data(0, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        exact_exploration_term(logits, old_logits, mask, reduction="token-mean")
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert {tensor.data_ptr() for tensor in large} == {logits.data_ptr(), old_logits.data_ptr()}


def test_no_gradient_of_the_exact_form_flows_into_the_sampler_or_the_weights():
    logits, old_logits, mask = position_data(0)
    old_logits.requires_grad_()
    weights = torch.ones(3, requires_grad=True)
    exact_exploration_term(logits, old_logits, mask, reduction="seq-sum", weights=weights).sum.backward()
    assert old_logits.grad is None and weights.grad is None and logits.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 4)}, r"^logits has shape \(3, 4\), expected \[B, T, V\] with mask \(3, 4\)"),
        ({"old_logits": torch.zeros(3, 5, 6)}, r"^old_logits has shape \(3, 5, 6\), expected \[B, T, V\]"),
        ({"old_logits": torch.zeros(3, 4, 5)}, r"^old_logits has shape \(3, 4, 5\), but logits has \(3, 4, 6\)"),
        ({"logits": torch.full((3, 4, 6), torch.nan)}, "^logits has NaN, .* at sequence 0, token 0"),
        ({"logits": torch.full((3, 4, 6), -torch.inf)}, "^logits has NaN, .* nothing but -infinity"),
        ({"old_logits": torch.full((3, 4, 6), torch.inf)}, r"^old_logits has NaN, \+infinity"),
        ({"weights": torch.ones(2)}, r"^weights has shape \(2,\)"),
        ({"weights": torch.full((3,), torch.nan)}, "^weights has NaN"),
        ({"temperature": 0.0}, "^temperature is 0.0"),
        ({"temperature": torch.inf}, "^temperature is inf"),
        ({"log_ratio_floor": 0.0}, "^log_ratio_floor is 0.0"),
        ({"reduction": "mean"}, "^reduction is 'mean'"),
        ({"mask": torch.full((3, 4), 0.5)}, "^mask has values other than 0 and 1"),
    ],
)
def test_an_argument_of_the_exact_form_that_does_not_fit_is_named(change, message):
    logits, old_logits, mask = position_data(0)
    arguments = {"logits": logits, "old_logits": old_logits, "mask": mask, "reduction": "seq-sum", **change}
    with pytest.raises(ValueError, match=message):
        exact_exploration_term(**arguments)
