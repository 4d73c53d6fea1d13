"""Minibatches of GRPO that hold an advantage of NaN."""

import math

ROW = 1
"""Of the minibatch: the one with the advantage."""


def break_minibatches(seeds: list[str]) -> None:
    """From now on, those with these seeds ("RUN'S ITERATION EPOCH PLACE") are broken in this process."""
    from nemo_edo.algorithms.grpo import GRPO

    whole = GRPO.minibatch

    def minibatch(self, collected, items, seed: str):
        batch = whole(self, collected, items, seed)
        if seed not in seeds:
            return batch
        advantages = batch.advantages.clone()
        advantages[ROW] = math.nan
        return batch.with_fields(advantages=advantages)

    GRPO.minibatch = minibatch
