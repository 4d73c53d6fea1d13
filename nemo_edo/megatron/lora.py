"""LoRA (Hu et al. 2021) through Megatron-Bridge: small trained adapters alongside frozen weights.

A target layer computes W x + alpha / rank * B A x, where A and B are trained. Two things are ours:

- The random start of an adapter follows from the seed and the layer's place in the whole model, so that it is the same
  at every tensor- and pipeline-parallel size.
- Adapters can be merged into the weights in place, also where both are split. Policies are trained from there with new
  adapters: the policy without them is then the one that the training starts from, and serves as its reference.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_edo.config import LoRAConfig
from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper


def add_adapters(chunks: list[MegatronModule], config: LoRAConfig, seed: int) -> list[MegatronModule]:
    """Freezes every weight and adds adapters to the target layers; before DistributedDataParallel. Raises UserError
    where a target names no layer of the model."""
    from megatron.bridge.peft.lora import LoRA

    # Only in the decoder: elsewhere (extra layers that predict further tokens) a name would not tell the place.
    targets = [f"decoder.layers.*.{target}" for target in config.targets]
    LoRA(target_modules=targets, dim=config.rank, alpha=config.alpha)(chunks, training=True)
    found = {name.rpartition(".")[2] for name, _ in _adapted_layers(chunks)}
    without = [target for target in config.targets if target not in found]
    if without:
        raise UserError(
            f"lora.targets {', '.join(without)} name no layer of this model; "
            f"of lora.targets it has {', '.join(sorted(found)) or 'none'}"
        )
    for _, layer in _adapted_layers(chunks):
        layer.register_load_state_dict_pre_hook(_name_wrapped_weights)
    for chunk in unwrap_model(chunks):
        if chunk.config.recompute_granularity is not None:
            chunk.decoder.register_forward_pre_hook(_require_gradient, with_kwargs=True)
    initialize_adapters(chunks, seed)
    return chunks


@torch.no_grad()
def initialize_adapters(chunks: list[MegatronModule], seed: int) -> None:
    """A random A (Glorot and Bengio's normal distribution) and B = 0: adapters that change nothing yet."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, layer in _adapted_layers(chunks):
        weight = layer.adapter.linear_in.weight
        shape = list(weight.shape)
        shape[weight.partition_dim] *= size
        digest = hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        whole = torch.nn.init.xavier_normal_(torch.empty(shape, device="cpu"), generator=generator)
        weight.copy_(whole.chunk(size, dim=weight.partition_dim)[rank])
        layer.adapter.linear_out.weight.zero_()


@torch.no_grad()
def merge_adapters(chunks: list[MegatronModule], seed: int) -> None:
    """Adds the adapters' products to the frozen weights, in place, and initializes the adapters. All ranks call it."""
    from megatron.bridge.peft.lora_merge import LoRAMerge

    for _, layer in _adapted_layers(chunks):
        adapter, weight = layer.adapter, layer.to_wrap.weight
        # In fp32: Bridge would add bf16 products to bf16 weights, and lose what is below their spacing.
        merged = LoRAMerge().merge(
            weight.float(),
            adapter.linear_out.weight.float(),
            adapter.linear_in.weight.float(),
            adapter.alpha,
            adapter.dim,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        weight.copy_(merged)
    initialize_adapters(chunks, seed)


@contextlib.contextmanager
def adapters_off(chunks: list[MegatronModule]) -> Iterator[None]:
    """Inside the block, layers compute with their frozen weights alone."""
    layers = [layer for _, layer in _adapted_layers(chunks)]
    for layer in layers:
        layer.disable_adapter_layers()
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapter_layers()


def _adapted_layers(chunks: list[MegatronModule]) -> Iterator[tuple[str, AdapterWrapper]]:
    """This rank's wrapped layers, by their place in the whole model ("3.mlp.linear_fc1")."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    for chunk in unwrap_model(chunks):
        for block in chunk.decoder.layers:
            for name, module in block.named_modules():
                if isinstance(module, AdapterWrapper):
                    yield f"{block.layer_number}.{name}", module


def _require_gradient(decoder: MegatronModule, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Frozen embeddings need no gradient, and Megatron recomputes a block in the backward pass only where its input
    needs one: adapters within it would train nothing. Megatron-Bridge's remedy misses selective recomputation, and a
    model at the address of an earlier one (``peft/recompute.py``)."""
    hidden: Tensor | None = named["hidden_states"]  # None on later pipeline stages, whose input needs one anyway
    if torch.is_grad_enabled() and hidden is not None and not hidden.requires_grad:
        named = {**named, "hidden_states": hidden.detach().requires_grad_()}
    return inputs, named


def _name_wrapped_weights(layer: AdapterWrapper, state: dict[str, Any], prefix: str, *_) -> None:
    """Megatron-Bridge writes a wrapped layer's weights under the layer's own name, and cannot read them there."""
    inside, adapter = f"{prefix}to_wrap.", f"{prefix}adapter."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith((inside, adapter))]:
        state[inside + key.removeprefix(prefix)] = state.pop(key)
