"""What context-parallel processes compute of sequences. Run by a WorkerPool.

The attention that context parallelism needs on GPUs is Transformer Engine's, which a machine without one does not have.
``GatheredAttention`` replaces it: everything around it is what a GPU would run.
"""

from pathlib import Path

import torch
from helpers import split_cases
from torch.overrides import TorchFunctionMode


def gathered_attention() -> type:
    """An attention over shared sequences that gathers all keys and values, and masks by a query's place."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    from nemo_edo.megatron.packing import context_order, context_share, gather_context

    class GatheredAttention(MegatronModule):
        def __init__(self, config, *args, softmax_scale=None, **kwargs) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(self, query, key, value, attention_mask, packed_seq_params=None, **kwargs):
            packed = packed_seq_params is not None
            parts = (part[:, None] if packed else part for part in (query, key, value))
            query, key, value = (part.transpose(0, 1) for part in parts)  # [b, s / C, heads, size]
            size = parallel_state.get_context_parallel_world_size()
            lengths = packed_seq_params.lengths if packed else (size * query.shape[1],)
            order = context_order(lengths)
            key, value = (Summed.apply(gather_context(part, order)) for part in (key, value))
            numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            places = torch.stack([torch.arange(sum(lengths)), numbers])
            position, number = context_share(places, order)[..., None]
            seen = (places[0] <= position) & (places[1] == number)
            context = torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (query, key, value)), attn_mask=seen, scale=self.scale,
                enable_gqa=True,
            )
            context = context.permute(2, 0, 1, 3).flatten(2)
            return context[:, 0] if packed else context

    class Summed(torch.autograd.Function):
        """Each rank's queries give a gradient of all keys: ``gather_context`` expects ranks that compute the same."""

        @staticmethod
        def forward(ctx, tensor):
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
            return gradient

    return GatheredAttention


class Unpinned(TorchFunctionMode):
    """Megatron makes the indices of a rank's rotary positions in pinned memory, which only CUDA has."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def measure(folder: Path, sizes: dict, **how) -> dict:
    """In a process that ends with the case."""
    from nemo_edo.megatron import bridge, layer_spec, platform

    platform.enter(1)
    bridge.check_device = lambda *_: None  # it would refuse: that has its own test
    layer_spec.CORES["local"] = gathered_attention()
    with Unpinned():
        return split_cases.measure(folder, sizes, **how)
