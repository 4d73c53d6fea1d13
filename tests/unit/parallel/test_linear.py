"""The fused head against torch's own linear layer and softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from nemo_edo.parallel import linear, linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy


def fused(hidden, weight, targets, **options):
    return linear_log_probs_and_entropy(hidden, weight, targets, vocab_start=0, group=None, **options)


def dense(hidden, weight, targets, temperature=1.0, vocab_size=None):
    log_p = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    entropies = torch.distributions.Categorical(logits=log_p).entropy()
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


def case(seed, shape=(2, 3), features=5, columns=300, real=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=generator, dtype=dtype)
    weight = torch.randn(columns, features, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(real or columns, shape, generator=generator)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven columns: the last one is not full."""
    monkeypatch.setattr(linear, "BLOCK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(linear, "MIN_COLUMNS", 7)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.3, 3),
    padding=st.integers(0, 150),
    width=st.integers(1, 310),
)
def test_values_and_gradients_agree_with_the_dense_softmax(seed, temperature, padding, width):
    hidden, weight, targets = case(seed, real=300 - padding)
    coefficients = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    options = {"temperature": temperature, "vocab_size": 300 - padding}
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "BLOCK_ELEMENTS", {"cpu": 1})
        patch.setattr(linear, "MIN_COLUMNS", width)
        for function in (fused, dense):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            values = torch.stack(function(*leaves, targets, **options))
            results.append((values, *grad((coefficients * values).sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_analytic_gradient_passes_gradcheck(small_blocks, with_entropy):
    hidden, weight, targets = case(0, features=3, columns=17, real=15)

    def function(*inputs):
        results = fused(*inputs, targets, temperature=0.7, vocab_size=15, with_entropy=with_entropy)
        return tuple(result for result in results if result is not None)

    assert gradcheck(function, [hidden.requires_grad_(), weight.requires_grad_()])


def test_each_result_alone_has_its_own_gradient(small_blocks):
    hidden, weight, targets = case(1)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    for index in (0, 1):
        found, expected = (grad(f(*leaves, targets)[index].sum(), leaves) for f in (fused, dense))
        torch.testing.assert_close(found, expected)


def test_inputs_that_need_no_gradient_get_none_and_do_not_change_the_others(small_blocks):
    hidden, weight, targets = case(2)
    both = grad(fused(hidden.requires_grad_(), weight.requires_grad_(), targets)[0].sum(), [hidden, weight])
    frozen = fused(hidden, weight.detach(), targets)[0].sum()
    assert torch.equal(grad(frozen, hidden)[0], both[0])
    first_layer = fused(hidden.detach(), weight, targets)[0].sum()
    assert torch.equal(grad(first_layer, weight)[0], both[1])


def test_half_precision_results_and_gradients_are_those_of_its_rounded_logits(small_blocks):
    """Logits in bf16, as an output layer makes them, and everything behind them in fp32."""
    hidden, weight, targets = (part.bfloat16() if part.is_floating_point() else part for part in case(3, columns=2000))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    found = fused(*leaves, targets)
    expected = vocab_parallel_log_probs_and_entropy(hidden @ weight.t(), targets, vocab_start=0, group=None)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients, references = (grad((r[0] + r[1]).sum(), leaves) for r in (found, expected))
    for ours, theirs in zip(gradients, references, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=2**-8 * float(theirs.abs().max()))


def test_padding_rows_of_the_weight_have_neither_probability_nor_gradient_whatever_they_hold():
    hidden, weight, targets = case(4, columns=9, real=6)
    weight[6:] = torch.tensor([torch.nan, torch.inf, 1e30])[:, None]
    weight.requires_grad_()
    found = torch.stack(fused(hidden, weight, targets, vocab_size=6))
    torch.testing.assert_close(found, torch.stack(dense(hidden, weight[:6], targets)))
    assert torch.equal(grad(found.sum(), weight)[0][6:], torch.zeros(3, 5, dtype=weight.dtype))


def test_memory_for_logits_does_not_grow_with_the_vocabulary():
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
    assert sizes and max(sizes) <= linear.BLOCK_ELEMENTS["cpu"] < hidden.shape[0] * len(weight) / 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 5)}, "hidden has type torch.float32, weight_shard torch.float64"),
        ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, "hidden has 5 features, weight_shard 4"),
        ({"targets": torch.zeros(3, 2, dtype=torch.int64)}, r"targets have shape \(3, 2\), expected \(2, 3\)"),
        ({"targets": torch.full((2, 3), 9)}, r"targets must lie in \[0, 9\), found 9 to 9"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(changes, message):
    hidden, weight, targets = case(6, columns=9)
    with pytest.raises(ValueError, match=message):
        fused(**{"hidden": hidden, "weight": weight, "targets": targets, **changes})
