"""Token ids to training batches, the order in which an epoch visits them, a batch on disk, and preference pairs."""

import json
import random
from collections.abc import Iterable, Sequence
from itertools import chain
from math import gcd, lcm
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_edo.errors import UserError
from nemo_edo.types import PreferencePair, ScoredRollout, TrainingBatch
from nemo_edo.utils.files import replacing

T = TypeVar("T")
PromptAndResponse = tuple[Sequence[int], Sequence[int]]
RENAMED = {"exploration_weights": "exploration_factors"}  # tensors' names in files of earlier versions


def build_batch(
    sequences: Sequence[PromptAndResponse],
    *,
    pad_id: int,
    length: int | None = None,
    **logprobs: Sequence[Sequence[float]],
) -> TrainingBatch:
    """One row for each (prompt ids, response ids), right-padded to ``length`` (None: the longest sequence). The mask is
    1 at the R positions that predict a response's R tokens, the first of which is the prompt's last. logprobs: one per
    response token, of the batch's fields old_logprobs, ref_logprobs and sampler_logprobs."""
    begins = torch.tensor([len(prompt) for prompt, _ in sequences])[:, None]
    ends = begins + torch.tensor([len(response) for _, response in sequences])[:, None]
    column = torch.arange(int(ends.max()) if length is None else length)
    tokens = torch.full((len(sequences), len(column)), pad_id, dtype=torch.int64)
    tokens[column < ends] = _joined(chain.from_iterable(sequences), np.int64)
    predicts = ((column >= begins - 1) & (column < ends - 1))[:, :-1]
    placed = {name: torch.zeros(predicts.shape) for name in logprobs}
    for name, rows in logprobs.items():
        placed[name][predicts] = _joined(rows, np.float32)
    return TrainingBatch(tokens=tokens, mask=predicts.float(), **placed)


def place_experts(rows: Sequence[bytes], sequences: Sequence[PromptAndResponse], length: int) -> Tensor | None:
    """[B, T = length - 1, layers * k] int16: ``Rollout.routed_experts`` of each sequence; None where they have none.
    Raises ValueError where some have them and others do not, or other numbers of layers and experts."""
    inputs = [len(prompt) + len(response) - 1 for prompt, response in sequences]
    widths = {len(experts) / count for experts, count in zip(rows, inputs, strict=True)}
    if widths == {0}:
        return None
    if len(widths) > 1:
        raise ValueError(f"the rollouts keep {sorted(widths)} bytes of experts a token, expected one number for all")
    placed = torch.zeros(len(rows), length - 1, int(widths.pop()) // 2, dtype=torch.int16)
    for row, experts, count in zip(placed, rows, inputs, strict=True):
        row[:count] = torch.frombuffer(bytearray(experts), dtype=torch.int16).view(count, -1)
    return placed


def _joined(rows: Iterable[Sequence[float]], dtype: type) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))


def sequence_lengths(batch: TrainingBatch) -> list[int]:
    """For each row, its tokens up to the last one that counts, at least 2; the rest is padding."""
    positions = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
    return ((batch.mask != 0) * positions).amax(dim=1).add(1).clamp(min=2).tolist()


def epoch_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num_items), determined by the seed and the epoch."""
    order = list(range(num_items))
    random.Random(f"{seed}, epoch {epoch}").shuffle(order)  # a text, so that (1, 2) and (2, 1) differ
    return order


def minibatches(order: Sequence[T], size: int) -> list[list[T]]:
    """The items cut into pieces of ``size``; the last one holds what remains, so that no sample is left out."""
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def preference_pairs(group: Sequence[ScoredRollout], count: int, seed: int | str) -> list[PreferencePair]:
    """At most ``count`` pairs of a success and a failure among the responses to one prompt (iterative DPO), iterating
    over both sets in an order of the seed. Both sets are iterated in step, each starting over at its end, so that every
    response is used before one is used twice (in the larger set). No pair occurs twice. Empty where a set is empty."""
    order = random.Random(f"pairs {seed}").sample(list(group), len(group))
    chosen = [item for item in order if item.success]
    rejected = [item for item in order if not item.success]
    if not chosen or not rejected:
        return []
    # After lcm steps the walk would repeat itself; shifted by one it meets new pairs, and gcd shifts meet them all.
    steps = lcm(len(chosen), len(rejected))
    walk = [(k, k + shift) for shift in range(gcd(len(chosen), len(rejected))) for k in range(steps)]
    return [PreferencePair(chosen[i % len(chosen)], rejected[j % len(rejected)]) for i, j in walk[:count]]


def write_batch(batch: TrainingBatch, about: dict[str, Any], path: Path) -> None:
    """Writes a safetensors file, which appears when it is whole. about: values for JSON, NaN and infinities too."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in batch.tensors().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(save(tensors, metadata={name: json.dumps(value) for name, value in about.items()}))


def read_batch(path: Path) -> tuple[TrainingBatch, dict[str, Any]]:
    """What ``write_batch`` was given, to the last bit. Raises UserError for a file that is not a batch."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {RENAMED.get(name, name): file.get_tensor(name) for name in file.keys()}
            about = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
        return TrainingBatch(**tensors), about
    except (SafetensorError, OSError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a batch ({error})") from error
