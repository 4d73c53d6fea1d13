"""Weights in oneDNN's own layout, into which a product otherwise brings them each time: with the few rows of decoding
that costs as much as the product."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


def packs(layer: torch.nn.Module) -> bool:
    """Whether a layer is a matrix product that this rank makes alone, and not an expert, which may have no rows."""
    if type(layer) not in (ColumnParallelLinear, RowParallelLinear) or layer.is_expert or layer.tp_group.size() > 1:
        return False
    dtype = layer.config.params_dtype
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def packed_weights(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside the block the layers that ``packs`` names multiply with a copy of their weight, which is made at the first
    product: weights may not change, and nothing is differentiated."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if packs(layer)]
    for layer in layers:
        layer.forward = _Product(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Product:
    """Replaces the ``forward`` of a layer."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        self._layer = layer
        self._packed: Tensor | None = None

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias where the layer leaves its addition to others. weight: a shared embedding's."""
        bias, skips = self._layer.bias, self._layer.skip_bias_add
        if self._packed is None:
            weight = self._layer.weight if weight is None else weight
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), hidden.shape[:-1].numel())
        product = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, None if skips else bias, "none", [], "")
        return product, bias if skips else None
