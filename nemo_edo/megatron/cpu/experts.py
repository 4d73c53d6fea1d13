"""Experts of Megatron's local layers, and what Megatron-Bridge lacks to convert them.

Transformer Engine's layers hold a process's experts in one grouped module, whose weights end in their number
("linear_fc1.weight3"); local layers hold a module for each ("local_experts.3.linear_fc1.weight"). Bridge knows both
names, and finds the expert's number in the first kind only: with the second it counts each process's experts from 0,
pairs them between processes in the order of their names ("10" before "2"), and fails on its way back.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from megatron.core import parallel_state

LOCAL_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")


def convert_local_experts() -> None:
    """Teaches Megatron-Bridge the numbers of local experts, in this process; a second call changes nothing."""
    from megatron.bridge.models.conversion import model_bridge
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    if getattr(model_bridge, "_local_experts_convert", False):
        return
    to_global, sort_key = model_bridge._megatron_local_name_to_global, model_bridge.extract_sort_key
    gather = MegatronParamMapping.gather_from_ep_ranks

    def global_name(models, config, name: str, *args, **kwargs) -> str:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * (config.num_moe_experts or 0) // ranks
        name = to_global(models, config, name, *args, **kwargs)
        return LOCAL_EXPERT.sub(lambda number: str(first + int(number[0])), name)

    def gather_from_ep_ranks(mapping, *args, **kwargs):
        with _as_if_grouped(mapping):
            return gather(mapping, *args, **kwargs)

    model_bridge._megatron_local_name_to_global = global_name
    model_bridge.extract_sort_key = lambda name: sort_key(grouped_name(name))
    MegatronParamMapping.gather_from_ep_ranks = gather_from_ep_ranks
    model_bridge._local_experts_convert = True


def grouped_name(name: str) -> str:
    """What a weight of a local expert is called among grouped ones; other names as they are."""
    number = LOCAL_EXPERT.search(name)
    return name if number is None else name.replace(f"local_experts.{number[0]}.", "") + number[0]


@contextlib.contextmanager
def _as_if_grouped(mapping) -> Iterator[None]:
    own = mapping.megatron_param
    mapping.megatron_param = grouped_name(own)
    try:
        yield
    finally:
        mapping.megatron_param = own
