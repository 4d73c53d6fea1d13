"""Routing replay: the trainer's passes send each token to the experts that the sampler chose for it.

A router whose logits nearly tie chooses other experts after any rounding, and the log-probabilities of the trainer's
pass then belong to another network than the one that sampled (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning
by Aligning Training and Inference Routers"). The gates' probabilities, and so the router's gradient, are always the
trainer's own. megatron-core records and replays (``RouterReplay``, one for each router); here is what it replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import get_model_config
from torch import Tensor


def set_replayed(chunk: MegatronModule, experts: Tensor) -> None:
    """The chunk's next forward pass replays ``experts`` [r, s, layers * k], those of all layers with experts (vLLM's:
    of all layers, dense ones included), and so does the recomputation of its layers in the backward pass, which takes
    micro-batches in the same order.

    Padding, all zeros, gets the experts 0 to k - 1: a token has k distinct ones.
    Raises ValueError where the rollouts were sampled by a model with other layers or another k.
    """
    routers, config = _routers(chunk), get_model_config(chunk)
    every, k = config.moe_layer_freq, config.moe_router_topk
    pattern = every if isinstance(every, list) else [number % every == 0 for number in range(config.num_layers)]
    layers = [number + 1 for number, has_experts in enumerate(pattern) if has_experts]  # counted as Megatron does
    if experts.shape[-1] == config.num_layers * k:
        layers = list(range(1, config.num_layers + 1))
    if experts.shape[-1] != len(layers) * k:
        raise ValueError(
            f"a token of the rollouts has {experts.shape[-1]} experts in all layers, but this model has {len(layers)} "
            f"layers of {k}: they were sampled by another model"
        )
    experts = experts.unflatten(-1, (len(layers), k)).transpose(0, 1).long()  # [s, r, layers, k]
    if config.sequence_parallel:
        experts = scatter_to_sequence_parallel_region(experts)
    if k > 1:
        padding = experts[..., :1] == experts[..., 1:2]
        experts = torch.where(padding, torch.arange(k, device=experts.device), experts)
    for router in routers:
        router.router_replay.set_target_indices(experts[:, :, layers.index(router.layer_number)].flatten(0, 1))
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def set_recomputing(chunk: MegatronModule) -> None:
    """Call after the chunk's forward pass: what follows until the next one is recomputation."""
    for router in _routers(chunk):
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


@contextmanager
def own_routing_afterwards(chunks: list[MegatronModule]) -> Iterator[None]:
    """A block after which routers choose for themselves, and nothing is kept."""
    try:
        yield
    finally:
        for router in (router for chunk in chunks for router in _routers(chunk)):
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()


@contextmanager
def recording(chunks: list[MegatronModule]) -> Iterator[None]:
    """Inside the block, ``recorded`` has what the routers chose in the last forward pass."""
    with own_routing_afterwards(chunks):
        for router in (router for chunk in chunks for router in _routers(chunk)):
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        yield


def recorded(chunks: list[MegatronModule], tokens: Tensor) -> Tensor:
    """[b, s, layers * k] int16: the experts of the last forward pass, over tokens [b, s]."""
    rows, length = tokens.shape
    chosen = [router.router_replay.get_recorded_indices() for chunk in chunks for router in _routers(chunk)]
    return torch.stack(chosen, dim=1).view(length, rows, -1).transpose(0, 1).to(torch.int16)


def _routers(chunk: MegatronModule) -> list[Router]:
    return [module for module in chunk.modules() if isinstance(module, Router)]
