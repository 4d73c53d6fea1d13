"""Run by torchrun, or alone: what context-parallel processes make of sequences. They write into OUT.

    torchrun --nproc-per-node 2 context_worker.py MODEL OUT

The attention that context parallelism needs on GPUs is Transformer Engine's, which a machine without one does not have.
``GatheredAttention`` stands in for it: everything around it is what a GPU would run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_models
import torch
from torch.overrides import TorchFunctionMode

from nemo_edo.config import ParallelismConfig
from nemo_edo.megatron import platform


def shares_and_gathers(size: int) -> dict:
    """Of ranks [2, 4 size] of positions: this rank's share, what all shares make, and gradients through both."""
    from nemo_edo.megatron.build import initialize_parallel_state
    from nemo_edo.megatron.shapes import context_share, gather_context

    initialize_parallel_state(ParallelismConfig(context_parallel_size=size), seed=0)
    whole = torch.arange(8.0 * size).view(2, 4 * size)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
    slope = torch.tensor(2.0, requires_grad=True)  # a weight that every rank has: Megatron adds up their gradients
    share = context_share(whole)
    gathered = gather_context(slope * share)
    (gathered.square() * weights).sum().backward()
    torch.distributed.all_reduce(slope.grad)
    return {"share": share, "gathered": gathered.detach(), "gradient": slope.grad,
            "expected": 2 * 2.0 * (whole.square() * weights).sum()}


def gathered_attention() -> type:
    """An attention over a shared sequence that gathers all keys and values, and masks by where a query stands."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    from nemo_edo.megatron.shapes import context_share, gather_context

    class GatheredAttention(MegatronModule):
        def __init__(self, config, *args, softmax_scale=None, **kwargs) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(self, query, key, value, attention_mask, **kwargs):
            query, key, value = (part.permute(1, 0, 2, 3) for part in (query, key, value))  # [b, s / C, heads, size]
            key, value = (_summed(gather_context(part)) for part in (key, value))
            positions = torch.arange(key.shape[1])
            seen = positions <= context_share(positions[None])[0][:, None]
            context = torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (query, key, value)), attn_mask=seen, scale=self.scale,
                enable_gqa=True,
            )
            return context.permute(2, 0, 1, 3).flatten(2)

    class _Summed(torch.autograd.Function):
        """Each rank's queries give a gradient of all keys: ``gather_context`` expects ranks that compute the same."""

        @staticmethod
        def forward(ctx, tensor):
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
            return gradient

    def _summed(tensor):
        return _Summed.apply(tensor)

    return GatheredAttention


class Unpinned(TorchFunctionMode):
    """Megatron makes the indices of a rank's rotary positions in pinned memory, which only CUDA has."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def measure(folder: Path, parallelism: ParallelismConfig) -> dict:
    import split_worker

    from nemo_edo.megatron import build, layer_spec

    build.check_device = lambda *_: None  # it would refuse: that has a test of its own
    layer_spec.CORES["local"] = gathered_attention()
    with Unpinned():
        return split_worker.measure(folder, parallelism, None, packing=False)


def main(model: str, out: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    platform.enter(1)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.save(shares_and_gathers(size), Path(out) / f"shares {rank} of {size}.pt")
    results = {}
    for name, sharded in (("context", False), ("context, distributed optimizer", True)):
        layout = ParallelismConfig(context_parallel_size=size, use_distributed_optimizer=sharded)
        results[name] = measure(Path(model), layout)
    tiny_models.leave(results, Path(out) / f"{size}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
