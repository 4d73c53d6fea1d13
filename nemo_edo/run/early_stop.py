"""Where an arm's training ends before its last iteration (``early_stop``): read from its stored evaluations, so that a
resumed run, and whoever opens the run later, comes to the same end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_edo.config import EarlyStopConfig
from nemo_edo.evaluation.results import BEST, load_evaluation
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.settings import RunSettings
from nemo_edo.utils.files import read_object


@dataclass(frozen=True)
class EarlyStop:
    """iteration: before which the training ended. best, best_iteration: the metric's best value, and where it was."""

    iteration: int
    best: float
    best_iteration: int
    settings: EarlyStopConfig

    def in_words(self, iterations: int) -> str:
        """iterations: those that the arm would have had."""
        change = "risen" if self.settings.mode == "max" else "fallen"
        by = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        count = "1 evaluation" if self.settings.patience == 1 else f"{self.settings.patience} evaluations"
        return (
            f"stopped after {self.iteration} of {iterations} iterations: {self.settings.metric} has not {change}"
            f"{by} in {count}; its best was {self.best:.3g}, after {self.best_iteration}"
        )


def early_stop(config: EarlyStopConfig, folder: RunFolder, arm: str, last: int | None = None) -> EarlyStop | None:
    """Where the arm's stored evaluations end its training; None where they do not. last: the last iteration whose
    evaluation counts; None: all."""
    metric = config.metric
    if metric is None:
        return None
    places = [t for t in folder.evaluated_iterations(arm) if last is None or t <= last]
    return end_of(((t, load_evaluation(folder.evaluation(arm, t)).mean(metric)) for t in places), config)


def end_of(values: Iterable[tuple[int, float]], settings: EarlyStopConfig) -> EarlyStop | None:
    """values: (iteration, value) of each evaluation in order. A value that is not a number is no improvement."""
    sign = 1 if settings.mode == "max" else -1
    best, best_iteration, waited = math.nan, 0, 0
    for iteration, value in values:
        if not math.isnan(value) and (math.isnan(best) or sign * (value - best) > settings.min_delta):
            best, best_iteration, waited = value, iteration, 0
            continue
        waited += 1
        if waited == settings.patience:
            return EarlyStop(iteration, best, best_iteration, settings)
    return None


def trained_iterations(settings: RunSettings, folder: RunFolder, policy: str) -> int:
    """How many iterations a policy was trained for: an arm, the start of all arms, or one that ``checkpoint.best`` has
    kept."""
    if BEST in policy:
        return read_object(folder.checkpoint(policy) / "about.json", ("extra",))["extra"]["iteration"]
    stop = early_stop(settings.early_stop, folder, policy)
    return settings.final_iteration(policy) if stop is None else stop.iteration
