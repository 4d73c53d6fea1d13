"""Supervised warm-up: the policy learns the solutions of a problems file before it explores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

from nemo_edo.algorithms.guards import Guards, loggable, respond
from nemo_edo.algorithms.services import Log, Position, Progress
from nemo_edo.config import GuardsConfig, SFTConfig
from nemo_edo.data.batching import PromptAndResponse, build_batch, epoch_order, minibatches
from nemo_edo.interfaces import Policy
from nemo_edo.utils.phases import PhaseClock


def train_supervised(
    policy: Policy,
    solutions: Sequence[PromptAndResponse],
    config: SFTConfig,
    *,
    pad_id: int,
    seed: int,
    log: Log,
    progress: Progress | None = None,
    guards: GuardsConfig | None = None,
    clock: PhaseClock | None = None,
) -> None:
    """``config.steps`` optimizer steps over seeded permutations of the solutions, whole batches only.

    progress: where to resume; None: at the beginning, and nothing is kept.
    guards: None: with their defaults. Raises StoppedByGuard where one of them ends the training.
    """
    progress, clock = progress or Progress(), clock or PhaseClock()
    watch = Guards(guards or GuardsConfig(), progress.start.guards)
    batch_size = min(config.batch_size, len(solutions))
    batches = (
        rows
        for epoch in count()
        for rows in minibatches(epoch_order(len(solutions), seed, epoch), batch_size)
        if len(rows) == batch_size
    )
    first = progress.start.step
    for step, rows in enumerate(islice(batches, first, config.steps), start=first):
        batch = build_batch([solutions[row] for row in rows], pad_id=pad_id)
        with clock.phase("train"):
            metrics = policy.train_step(batch, exploration_weight=0.0, grad_norm_limit=watch.grad_norm_limit)
        alarms = watch.step(metrics)
        log("sft_step", step=step, **loggable(metrics), skipped_steps=watch.skipped_steps)
        here = Position(step=step + 1, steps_taken=step + 1, guards=watch.state_dict())
        with clock.phase("checkpoint"):
            respond(alarms, here, {"step": step}, log=log, progress=progress, batch=batch, about=metrics)
            progress.reached(here)
