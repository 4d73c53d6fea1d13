import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from nemo_edo.parallel import softmax, vocab, vocab_parallel_log_probs_and_entropy


def unsplit(logits, targets, **options):
    return vocab_parallel_log_probs_and_entropy(logits, targets, vocab_start=0, group=None, **options)


def dense(logits, targets, temperature=1.0, vocab_size=None):
    """The same from torch's own softmax."""
    log_p = (logits[..., :vocab_size] / temperature).log_softmax(-1)
    entropies = torch.distributions.Categorical(logits=log_p).entropy()
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), temperature=st.floats(0.3, 3), padding=st.integers(0, 4))
def test_values_and_gradients_agree_with_the_dense_softmax(seed, temperature, padding):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(2, 3, 11, generator=generator, dtype=torch.float64)
    targets = torch.randint(11 - padding, (2, 3), generator=generator)
    coefficients = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    options = {"temperature": temperature, "vocab_size": 11 - padding}
    results = []
    for function in (unsplit, dense):
        leaf = logits.clone().requires_grad_()
        values = torch.stack(function(leaf, targets, **options))
        results.append((values, *grad((coefficients * values).sum(), leaf)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_analytic_gradient_passes_gradcheck(with_entropy):
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 6, dtype=torch.float64, requires_grad=True), torch.tensor([4, 0])

    def function(x):
        results = unsplit(x, targets, temperature=0.7, vocab_size=5, with_entropy=with_entropy)
        return tuple(result for result in results if result is not None)

    assert gradcheck(function, logits)


def test_each_result_alone_has_its_own_gradient():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, 2])
    for index in (0, 1):
        found, expected = (grad(f(logits, targets)[index].sum(), logits)[0] for f in (unsplit, dense))
        torch.testing.assert_close(found, expected)


def test_without_entropy_the_log_probabilities_are_the_same_and_the_entropy_is_none():
    logits, targets = torch.randn(4, 9), torch.randint(9, (4,))
    logprobs, entropies = unsplit(logits, targets, with_entropy=False)
    assert torch.equal(logprobs, unsplit(logits, targets)[0]) and entropies is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_single_precision(dtype):
    torch.manual_seed(0)
    logits, targets = (5 * torch.randn(4, 2000)).to(dtype).requires_grad_(), torch.randint(2000, (4,))
    results = unsplit(logits, targets)
    for found, expected in zip(results, dense(logits.float(), targets), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert grad(results[0].sum(), logits)[0].dtype == dtype


def test_logits_of_any_size_give_finite_results():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e38, 3e38, 0.0], [0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = unsplit(logits, torch.tensor([0, 1, 0]))
    torch.testing.assert_close(logprobs, torch.tensor([0.0, 0.0, -math.log(2)]))
    torch.testing.assert_close(entropies, torch.tensor([0.0, 0.0, math.log(2)]))
    (gradient,) = grad((logprobs + 3 * entropies).sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0, 0], [0, 0, 0], [0.5, -0.5, 0]]))


def test_an_impossible_target_has_log_probability_minus_infinity():
    assert unsplit(torch.tensor([0.0, -torch.inf]), torch.tensor(1))[0] == -torch.inf


def test_a_nan_logit_is_not_hidden():
    logprobs, entropies = unsplit(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor(0))
    assert logprobs.isnan() and entropies.isnan()


def test_padding_columns_have_neither_probability_nor_gradient_whatever_they_hold():
    logits, targets = torch.randn(3, 6), torch.tensor([0, 3, 1])
    padded = torch.cat([logits, torch.tensor([[torch.nan, torch.inf]]).expand(3, 2)], dim=1).requires_grad_()
    found = torch.stack(unsplit(padded, targets, vocab_size=6))
    torch.testing.assert_close(found, torch.stack(unsplit(logits, targets)))
    assert torch.equal(grad(found.sum(), padded)[0][:, 6:], torch.zeros(3, 2))


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(3, 6)
    before = logits.clone()
    unsplit(logits, torch.tensor([0, 3, 1]), vocab_size=5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("elements", [1, 20, 1000])
def test_the_size_of_chunks_changes_nothing(monkeypatch, elements):
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 9, requires_grad=True), torch.randint(8, (2, 5))
    expected = unsplit(logits, targets, vocab_size=8)
    gradient = grad(sum(result.square().sum() for result in expected), logits)[0]
    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", {"cpu": elements})
    found = unsplit(logits, targets, vocab_size=8)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(grad(sum(result.square().sum() for result in found), logits)[0], gradient)


def test_nothing_of_the_logits_size_is_kept_beside_themselves():
    logits, targets, kept = torch.randn(4, 300).bfloat16().requires_grad_(), torch.randint(300, (4,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        unsplit(logits, targets)
    assert sorted(tensor.numel() for tensor in kept if tensor is not logits) == [4, 4, 4]


def test_overwritten_logits_hold_the_same_gradient():
    torch.manual_seed(0)
    leaf, targets = torch.randn(3, 4, 9, requires_grad=True), torch.randint(8, (3, 4))

    def gradient(overwrite: bool):
        logits = 2 * leaf
        results = unsplit(logits, targets, vocab_size=8, temperature=0.7, overwrite_logits=overwrite)
        return logits, grad(sum(result.square().sum() for result in results), [logits, leaf])

    (_, expected), (logits, found) = gradient(False), gradient(True)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(logits, expected[0]) and found[0].data_ptr() == logits.data_ptr()


def as_a_kernel_does(out, logits, *arguments):
    """Writes the gradient without autograd's seeing it."""
    softmax.write_gradient(out.data, logits.data, *arguments)


@pytest.mark.parametrize("write", [softmax.write_gradient, as_a_kernel_does])
def test_overwritten_logits_that_something_else_needs_are_an_error(monkeypatch, write):
    monkeypatch.setattr(vocab, "write_gradient", write)
    leaf, targets = torch.randn(3, 9, requires_grad=True), torch.tensor([0, 3, 1])
    logits = 2 * leaf
    total = logits.square().sum() + unsplit(logits, targets, overwrite_logits=True)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with pytest.raises(ValueError, match="these are a leaf of the graph"):
        unsplit(leaf, targets, overwrite_logits=True)


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (torch.tensor([0, 1]), {}, r"targets have shape \(2,\), expected \(3,\)"),
        (torch.tensor([0, 1, 6]), {}, r"targets must lie in \[0, 6\), found 0 to 6"),
        (torch.tensor([0, 1, 5]), {"vocab_size": 5}, r"targets must lie in \[0, 5\)"),
        (torch.tensor([0, 1, -100]), {}, r"found -100 to 1"),
        (torch.tensor([0, 1, 2]), {"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(targets, options, message):
    with pytest.raises(ValueError, match=message):
        unsplit(torch.zeros(3, 6), targets, **options)
