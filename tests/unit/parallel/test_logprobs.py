"""Log-probabilities and entropies from logits and from hidden states, against torch's own linear layer and softmax."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo.parallel import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy
from nemo_edo.parallel import logprobs as heads

unsplit = partial(vocab_parallel_logprobs_and_entropy, vocab_start=0, group=None)
fused = partial(linear_logprobs_and_entropy, vocab_start=0, group=None)


def from_logits(hidden, weight, targets, **options):
    return unsplit(hidden @ weight.t(), targets, **options)


def dense(hidden, weight, targets, temperature=1.0, vocab_size=None):
    log_p = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    entropies = torch.distributions.Categorical(logits=log_p).entropy()
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


every_form = pytest.mark.parametrize("form", [from_logits, fused], ids=["logits", "hidden states"])


def case(seed, shape=(2, 3), features=5, columns=300, real=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=generator, dtype=dtype)
    weight = torch.randn(columns, features, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(real or columns, shape, generator=generator)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven columns: the last one is not full."""
    monkeypatch.setattr(heads, "BLOCK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(heads, "MIN_COLUMNS", 7)


@every_form
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), temperature=st.floats(0.3, 3), padding=st.integers(0, 150),
       width=st.integers(1, 310))
def test_values_and_gradients_agree_with_the_dense_softmax(form, seed, temperature, padding, width):
    hidden, weight, targets = case(seed, real=300 - padding)
    coefficients = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    options = {"temperature": temperature, "vocab_size": 300 - padding}
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "BLOCK_ELEMENTS", {"cpu": 1})
        patch.setattr(heads, "MIN_COLUMNS", width)
        for function in (form, dense):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            values = torch.stack(function(*leaves, targets, **options))
            results.append((values, *grad((coefficients * values).sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@every_form
@pytest.mark.parametrize("index", [0, 1])
def test_each_result_alone_has_its_own_gradient(small_blocks, form, index):
    hidden, weight, targets = case(1)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    found, expected = (grad(f(*leaves, targets)[index].sum(), leaves) for f in (form, dense))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_single_precision(dtype):
    torch.manual_seed(0)
    logits, targets = (5 * torch.randn(4, 2000)).to(dtype).requires_grad_(), torch.randint(2000, (4,))
    results = unsplit(logits, targets)
    for found, expected in zip(results, dense(logits.float(), torch.eye(2000), targets), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert grad(results[0].sum(), logits)[0].dtype == dtype


def test_half_precision_hidden_states_have_the_results_and_gradients_of_their_rounded_logits(small_blocks):
    """Logits in bf16, as an output layer makes them, and everything after them in fp32."""
    hidden, weight, targets = (part.bfloat16() if part.is_floating_point() else part for part in case(3, columns=2000))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    found, expected = fused(*leaves, targets), from_logits(*leaves, targets)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients, references = (grad((r[0] + r[1]).sum(), leaves) for r in (found, expected))
    for ours, theirs in zip(gradients, references, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=2**-8 * float(theirs.abs().max()))


@every_form
def test_padding_columns_have_neither_probability_nor_gradient_whatever_they_hold(form):
    hidden, weight, targets = case(4, columns=9, real=6)
    weight[6:] = torch.tensor([torch.nan, torch.inf, 1e30])[:, None]
    weight.requires_grad_()
    found = torch.stack(form(hidden, weight, targets, vocab_size=6))
    torch.testing.assert_close(found, torch.stack(dense(hidden, weight[:6], targets)))
    assert torch.equal(grad(found.sum(), weight)[0][6:], torch.zeros(3, 5, dtype=weight.dtype))


def test_an_impossible_target_has_log_probability_minus_infinity_and_a_nan_logit_is_not_hidden():
    assert unsplit(torch.tensor([0.0, -torch.inf]), torch.tensor(1))[0] == -torch.inf
    assert all(result.isnan() for result in unsplit(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor(0)))


def test_nothing_of_the_logits_size_is_kept_but_themselves():
    logits, targets, kept = torch.randn(4, 300).bfloat16().requires_grad_(), torch.randint(300, (4,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        unsplit(logits, targets)
    assert sorted(tensor.numel() for tensor in kept if tensor is not logits) == [4, 4, 4]


def test_memory_for_logits_does_not_grow_with_the_vocabulary_from_hidden_states():
    sizes = []
    allocate = torch.Tensor.new_empty

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is allocate:
                sizes.append(args[1])
            return function(*args, **(kwargs or {}))

    hidden, weight, targets = case(5, shape=(40,), features=2, columns=400_000, dtype=torch.float32)
    with Watch():
        fused(hidden.requires_grad_(), weight, targets)[0].sum().backward()
    assert sizes and max(sizes) <= heads.BLOCK_ELEMENTS["cpu"] < hidden.shape[0] * len(weight) / 3


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


def as_a_kernel_does(out, logits, *arguments, write=heads.write_gradient):
    """Writes the gradient without autograd's seeing it."""
    write(out.data, logits.data, *arguments)


@pytest.mark.parametrize("write", [heads.write_gradient, as_a_kernel_does])
def test_overwritten_logits_that_something_else_needs_are_an_error(monkeypatch, write):
    monkeypatch.setattr(heads, "write_gradient", write)
    leaf, targets = torch.randn(3, 9, requires_grad=True), torch.tensor([0, 3, 1])
    logits = 2 * leaf
    total = logits.square().sum() + unsplit(logits, targets, overwrite_logits=True)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with pytest.raises(ValueError, match="leaf of the graph"):
        unsplit(leaf, targets, overwrite_logits=True)
