"""Runs ``nemo-edo`` commands as ``killed_runs.py`` does, with minibatches of GRPO that hold an advantage of NaN.

    python broken_runs.py IN.json OUT.json

Each command of IN also has "broken": the seeds ("RUN'S ITERATION EPOCH PLACE") of the minibatches in question.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import killed_runs

from nemo_edo.algorithms.grpo import GRPO

ROW = 1
"""Of the minibatch: the one with the advantage."""


def broken(seeds: list[str]):
    """GRPO.minibatch, but for the minibatches with these seeds."""

    def minibatch(self, collected, items, seed: str):
        batch = whole(self, collected, items, seed)
        if seed in seeds:
            advantages = batch.advantages.clone()
            advantages[ROW] = math.nan
            batch = batch.with_fields(advantages=advantages)
        return batch

    return minibatch


if __name__ == "__main__":
    whole, done = GRPO.minibatch, []
    for command in json.loads(Path(sys.argv[1]).read_text()):
        GRPO.minibatch = broken(command["broken"])
        done.append(killed_runs.attempts(command))
    Path(sys.argv[2]).write_text(json.dumps(done))
