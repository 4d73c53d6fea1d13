"""The fused Triton kernels of the loss against fp64. Without a GPU, in Triton's interpreter,

    TRITON_INTERPRET=1 python -m helpers.loss_kernels

prints, as JSON, each case's largest error and its bound, both relative to the largest element.
"""

from __future__ import annotations

import itertools
import json

import torch
from torch import Tensor

from nemo_edo.parallel.softmax_state import ResultGradients, RunningSoftmax

ROWS, COLUMNS, SPLIT = 5, 70, 40
"""Two blocks of columns, neither a power of two."""
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
"""Results are fp32 whatever the logits' type; gradients are rounded to it, and bf16 is cut off by the interpreter."""


def dense(logits: Tensor, targets: Tensor, temperature: float, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and the gradient of their sum, weighted by ``weights`` [2, N], in fp64."""
    leaf = logits.double().clamp(min=-1e4).requires_grad_()  # as good as -inf, and 0 times it is 0
    log_p = (leaf / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    (weights * torch.stack([logprobs, entropies])).sum().backward()
    return logprobs.detach(), entropies.detach(), leaf.grad


def through_kernels(
    logits: Tensor, targets: Tensor, temperature: float, weights: Tensor, with_entropy: bool, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    from nemo_edo.parallel import kernels  # imports Triton

    kernels.TILE = tile
    blocks = [(logits[:, :SPLIT].contiguous(), targets), (logits[:, SPLIT:], targets - SPLIT)]  # one with other strides
    softmax = RunningSoftmax.start(logits, len(logits))
    for block, local in blocks:
        kernels.add_columns(softmax, block, local, temperature)
    logprobs, entropies, log_sum_exp = softmax.results()
    results = ResultGradients.of(log_sum_exp, entropies, weights[0], weights[1] if with_entropy else None)
    parts = [torch.empty_like(block) for block, _ in blocks]
    for part, (block, local) in zip(parts, blocks, strict=True):
        kernels.write_gradient(part, block, local, temperature, results)
    return logprobs, entropies, torch.cat(parts, dim=1)


def errors(device: str) -> dict[str, tuple[float, float]]:
    """(error, bound) of every case: three types, with and without entropy, one tile and several, a temperature."""
    found = {}
    for dtype, with_entropy, tile, temperature in itertools.product(BOUNDS, (True, False), (4096, 16), (1.0, 0.7)):
        generator = torch.Generator().manual_seed(0)
        logits = (4 * torch.randn(ROWS, COLUMNS, generator=generator)).to(dtype)
        logits[0, :3] = -torch.inf  # impossible tokens, as a sampler's mask makes them
        targets = torch.tensor([69, 0, 39, 40, 5])
        weights = torch.randn(2, ROWS, generator=generator)
        weights[1] *= with_entropy
        logits, targets, weights = logits.to(device), targets.to(device), weights.to(device)
        ours = through_kernels(logits, targets, temperature, weights, with_entropy, tile)
        expected = dense(logits, targets, temperature, weights)
        for name, one, other in zip(("log_prob", "entropy", "gradient"), ours, expected, strict=True):
            bound = BOUNDS[dtype if name == "gradient" else torch.float32]
            key = f"{name} {dtype} entropy={with_entropy} tile={tile} temperature={temperature}"
            found[key] = (float((one.double() - other).abs().max() / other.abs().max()), bound)
    return found


def nan_is_not_hidden(device: str) -> bool:
    """Whether one NaN logit makes all results of its row NaN, and no other row's."""
    from nemo_edo.parallel import kernels

    logits = torch.zeros(2, 20, device=device)
    logits[1, 7] = torch.nan
    softmax = RunningSoftmax.start(logits, 2)
    kernels.add_columns(softmax, logits, torch.zeros(2, dtype=torch.int64, device=device), 1.0)
    return all(result.isnan().tolist() == [False, True] for result in softmax.results())


if __name__ == "__main__":
    print(json.dumps({"errors": errors("cpu"), "nan_is_not_hidden": nan_is_not_hidden("cpu")}))
