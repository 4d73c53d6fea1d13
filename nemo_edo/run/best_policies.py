"""The policies of an arm that are kept because they were the best by ``checkpoint.best``.

The best one is ``checkpoints/ARM.best``, the others are ``checkpoints/ARM.best_iter_00003`` and so on. A killed run
evaluates again where it was killed, and sets right what it left.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from nemo_edo.config import CheckpointConfig
from nemo_edo.megatron import checkpoint
from nemo_edo.run.folder import RunFolder
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker


def keep_best(
    model: RemotePolicy, folder: RunFolder, config: CheckpointConfig, arm: str, value: float, iteration: int
) -> None:
    """Keeps the policy, evaluated with ``value`` at the iteration, if it is among the ``config.best_count`` best."""
    if math.isnan(value):
        return
    about = {"metric": config.best, "value": value, "iteration": iteration}
    kept = _kept(folder, arm, config)
    if any(one["iteration"] == iteration for one in kept.values()):
        place = None
    else:
        ranked = _ranked({**kept, "": about}, config)
        place = ranked.index("") if "" in ranked[: config.best_count] else None
    if place is not None:
        if place == 0:
            _make_room(folder, arm)
        target = folder.best_checkpoint(arm) if place == 0 else folder.best_checkpoint(arm, iteration)
        model.workers.call(Worker.save, target, about)
    _tidy(folder, arm, config)


def _kept(folder: RunFolder, arm: str, config: CheckpointConfig) -> dict[str, dict[str, Any]]:
    """What is kept by the same metric, by folder."""
    found = {str(path): checkpoint.load_extra(path) for path in folder.best_checkpoints(arm)}
    return {path: about for path, about in found.items() if about["metric"] == config.best}


def _ranked(kept: dict[str, dict[str, Any]], config: CheckpointConfig) -> list[str]:
    """The best first, of equal ones the earlier."""
    sign = -1 if config.best_mode == "max" else 1
    return sorted(kept, key=lambda path: (sign * kept[path]["value"], kept[path]["iteration"]))


def _make_room(folder: RunFolder, arm: str) -> None:
    """Renames the best one so far."""
    best = folder.best_checkpoint(arm)
    if best.is_dir():
        best.rename(folder.best_checkpoint(arm, checkpoint.load_extra(best)["iteration"]))


def _tidy(folder: RunFolder, arm: str, config: CheckpointConfig) -> None:
    """Removes what is no longer among the best, or was by another metric, and sees that the first has its name."""
    kept = _kept(folder, arm, config)
    ranked = _ranked(kept, config)[: config.best_count]
    for path in folder.best_checkpoints(arm):
        if str(path) not in ranked:
            shutil.rmtree(path)
    if ranked and Path(ranked[0]) != folder.best_checkpoint(arm):
        _make_room(folder, arm)
        Path(ranked[0]).rename(folder.best_checkpoint(arm))
