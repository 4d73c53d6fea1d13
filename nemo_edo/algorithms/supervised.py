"""Supervised warm-up: the policy learns the solutions of a problems file before it explores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, islice

from tqdm import tqdm

from nemo_edo.config import SFTConfig
from nemo_edo.data.batching import PromptAndResponse, build_batch, epoch_order, minibatches
from nemo_edo.interfaces import Policy

Log = Callable[..., None]
"""log(kind, **values) keeps a line of metrics."""


def train_supervised(
    policy: Policy,
    solutions: Sequence[PromptAndResponse],
    config: SFTConfig,
    *,
    pad_id: int,
    seed: int,
    log: Log,
    progress: bool = False,
) -> None:
    """``config.steps`` optimizer steps over seeded permutations of the solutions, whole batches only."""
    batch_size = min(config.batch_size, len(solutions))
    batches = (
        rows
        for epoch in count()
        for rows in minibatches(epoch_order(len(solutions), seed, epoch), batch_size)
        if len(rows) == batch_size
    )
    steps = tqdm(islice(batches, config.steps), total=config.steps, desc="warm-up", disable=not progress)
    for step, rows in enumerate(steps):
        metrics = policy.train_step(build_batch([solutions[row] for row in rows], pad_id=pad_id))
        log("sft_step", step=step, **metrics)
