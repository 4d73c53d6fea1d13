"""The state of Adam in Megatron's optimizers: PyTorch's Adam on a CPU, Transformer Engine's on a GPU.

Megatron's distributed optimizer is written for Transformer Engine's. PyTorch's counts steps for each parameter,
Transformer Engine's for each group of parameters, and their groups have settings that the other lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import Adam, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_edo.megatron.optimizer_shares import load_share, sharded_share


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def distributed(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """The distributed ones among the optimizers that Megatron has chained."""
    return (part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer))


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    return (part.optimizer for part in distributed(optimizer) if isinstance(part.optimizer, torch.optim.Adam))


def begin_adam(optimizer: MegatronOptimizer) -> None:
    """Loading fills existing tensors: PyTorch's Adam makes its moments and step counters at its first step only."""
    for adam in _adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


@contextlib.contextmanager
def _replaced(owners: Sequence[object], method: str, function: Callable[..., None]) -> Iterator[None]:
    """Inside the block, each owner's method is ``function``, called with the owner first."""
    for owner in owners:
        setattr(owner, method, partial(function, owner))
    try:
        yield
    finally:
        for owner in owners:
            delattr(owner, method)


@contextlib.contextmanager
def own_shares(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside the block, the reshardable state of a distributed optimizer is each rank's own share."""
    parts = list(distributed(optimizer))
    with (
        _replaced(parts, "sharded_param_state_fully_reshardable", sharded_share),
        _replaced(parts, "load_parameter_state_from_fully_reshardable", load_share),
    ):
        yield


@contextlib.contextmanager
def own_step_counters(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside the block, a parameter's loaded state has the step counter that the parameter has already: Megatron leaves
    it out of a reshardable state, and asks for it when that is put in place."""
    parts = [part for part in distributed(optimizer) if isinstance(part.optimizer, torch.optim.Adam)]

    def with_counter(part: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict) -> None:
        group, place = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        DistributedOptimizer._set_main_param_and_optimizer_states(part, parameter, {"step": state["step"], **tensors})

    with _replaced(parts, "_set_main_param_and_optimizer_states", with_counter):
        yield


def count_adam_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron loads the number of steps into the parameter groups; PyTorch's Adam counts for each parameter."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


@contextlib.contextmanager
def loading_either_adam(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside the block, ``optimizer`` loads the state of either Adam, whichever is its own."""
    adams = [part.optimizer for part in _parts(optimizer) if isinstance(part.optimizer, Adam)]
    with _replaced(adams, "load_state_dict", _load_either):
        yield


def _load_either(adam: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    groups, parameters = state["param_groups"], state["state"]
    counters = [each.pop("step") for each in parameters.values() if "step" in each]
    counters = counters or [group["step"] for group in groups if "step" in group]
    steps = int(max(counters, default=0))
    if isinstance(adam, torch.optim.Adam):
        parameters = {place: {"step": torch.tensor(float(steps)), **each} for place, each in parameters.items()}
    own = [{name: value for name, value in group.items() if name != "params"} for group in adam.param_groups]
    groups = [{**mine, **group, "step": steps} for mine, group in zip(own, groups, strict=True)]
    type(adam).load_state_dict(adam, {"state": parameters, "param_groups": groups})
