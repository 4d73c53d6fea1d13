"""The loss layer on a GPU: its compiled kernels by themselves, and both heads with them.

Needs torch and Triton alone. Written on a machine without CUDA, where it is skipped and the kernels run in Triton's
interpreter (tests/unit/parallel/test_kernels.py): until it has been run on one, take its tolerances as estimates.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import loss_kernels

from nemo_edo.parallel import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy

pytestmark = pytest.mark.gpu
TOKENS, VOCABULARY, HIDDEN = 300, 50_000, 64
UNSPLIT = {"vocab_start": 0, "group": None}


def test_the_kernels_give_the_numbers_of_fp64_and_hide_no_nan():
    too_far = {case: pair for case, pair in loss_kernels.errors("cuda").items() if not pair[0] <= pair[1]}
    assert not too_far and loss_kernels.nan_is_not_hidden("cuda")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def passed(head, dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probabilities, entropies and the gradients of hidden states and weight, in fp64."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (TOKENS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator).cuda()
    weights = torch.randn(2, TOKENS, generator=generator).cuda()
    leaves = [part.to(dtype).cuda().to(dtype).requires_grad_() for part in (hidden, weight / 4)]
    results = torch.stack(head(*leaves, targets))
    (weights * results).sum().backward()
    return [part.detach().double() for part in (*results, *(leaf.grad for leaf in leaves))]


def dense(hidden, weight, targets):
    log_p = F.linear(hidden.double(), weight.double()).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def fused(hidden, weight, targets):
    return linear_logprobs_and_entropy(hidden, weight, targets, **UNSPLIT)


def logits(hidden, weight, targets):
    return vocab_parallel_logprobs_and_entropy(F.linear(hidden, weight), targets, overwrite_logits=True, **UNSPLIT)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("head", [fused, logits])
def test_both_heads_are_near_the_dense_softmax_in_fp64(head, dtype, bound):
    for found, expected in zip(passed(head, dtype), passed(dense, dtype), strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < bound


def test_the_fused_head_needs_a_fraction_of_the_logits_memory():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(8192, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(150_000, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    targets = torch.zeros(8192, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sum(result.sum() for result in fused(hidden, weight, targets)).backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 8192 * 150_000 / 5
