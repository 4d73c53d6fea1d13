"""How many rows the in-process engine decodes at a time with ``generation.max_batch_size=auto``: as many as fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.attention import Attention

FP32 = 4
MOST_ON_CPU = 512  # A CPU computes as many tokens a second with more rows
GPU_RESERVE = 2 * 2**30  # bytes that stay free: cuBLAS's workspaces and NCCL's buffers are allocated when first used
USED_OF_GPU, USED_OF_HOST = 0.9, 0.5  # of the free memory: GPUs fragment, hosts have other processes

SPARE = 4  # a cache of rows that begin at different times has room for 1/SPARE of a response more


def refilled_places(response: int) -> int:
    """Tokens after the prompts for which such a cache has room, where responses have ``response`` at most."""
    return response + response // SPARE + 1


def decoding_bytes(*, cache: int, layer: int, logits: int) -> int:
    """Bytes of the key-value cache, one layer of it twice (rows that have ended leave it layer by layer), and of the
    next tokens' logits in fp32, twice. cache, layer: bytes of the whole cache and of one layer's; logits: a number."""
    return cache + layer + 2 * FP32 * logits


def row_bytes(layers: Sequence[Attention], *, prompt: int, response: int, vocabulary: int, device: torch.device) -> int:
    """Bytes that a row of so many tokens takes at most, with the prompt's own cache: while it is decoded, or while
    one layer computes its prompt, whichever needs more. layers: of this rank. vocabulary: 0 where it has no logits."""
    config, number = layers[0].config, layers[0].config.params_dtype.itemsize
    cached = FP32 if device.type == "cpu" else number  # RotatingSelfAttention caches fp32 on a CPU
    positions = (prompt + response) * cached
    caches = [
        positions * layer.num_query_groups_per_partition * (layer.key_hidden_size + layer.val_hidden_size)
        for layer in layers
    ]
    experts = config.moe_router_topk * (config.moe_ffn_hidden_size or 0) if config.num_moe_experts else 0
    wide = 3 * max(config.ffn_hidden_size, experts) // config.tensor_model_parallel_size
    computed = prompt * (4 * config.hidden_size + wide) * number
    decoded = decoding_bytes(cache=0, layer=max(caches), logits=vocabulary)
    return sum(caches) + max(decoded, computed)


def rows_that_fit(row: int, device: torch.device) -> int:
    """The rows of ``row`` bytes for which every rank has memory: the same number on all ranks, which all call it.
    Raises UserError, on all ranks, where one of them has no room for a single row."""
    # The doctor reads the numbers of this module without torch.
    from nemo_edo.parallel.free_memory import free_gpu_memory, free_host_memory, of_each_rank

    if device.type == "cpu":
        free, most = [int(USED_OF_HOST * has) for has in free_host_memory()], MOST_ON_CPU
    else:
        free, most = [int(USED_OF_GPU * max(0, has - GPU_RESERVE)) for has in free_gpu_memory()], None
    ranks = enumerate(zip(free, of_each_rank(row, device), strict=True))
    rows, rank, has, needs = min((has // needs, rank, has, needs) for rank, (has, needs) in ranks)
    if rows == 0:
        raise UserError(
            f"generation.max_batch_size=auto: rank {rank} has {has:,} bytes for generation and a single sequence "
            f"needs {needs:,}: lower sampling.max_new_tokens or the prompts' length, split the model over more "
            "processes (parallelism), or generate with servers (generation=vllm)"
        )
    return rows if most is None else min(rows, most)


def split_evenly(places: Sequence[int], most: int) -> list[Sequence[int]]:
    """Runs of at most ``most`` places, as few as there can be, of equal length but for one place."""
    runs = math.ceil(len(places) / most)
    bounds = [run * len(places) // max(1, runs) for run in range(runs + 1)]
    return [places[begin:end] for begin, end in itertools.pairwise(bounds)]


def of_similar_length(lengths: Sequence[int], fewest: int) -> list[slice]:
    """Runs of ascending lengths in each of which none is a tenth shorter than the longest; but a run of fewer tokens
    than ``fewest``, padding included, continues with shorter ones."""
    runs, end = [], len(lengths)
    while end:
        longest, begin = lengths[end - 1], end - 1
        while begin and (lengths[begin - 1] >= 0.9 * longest or (end - begin) * longest < fewest):
            begin -= 1
        runs.append(slice(begin, end))
        end = begin
    return runs[::-1]
