"""What a run's summary.json and samples.json say about its arms."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform as machine
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nemo_edo
from nemo_edo import __version__
from nemo_edo.config import ArmConfig, IDPOConfig
from nemo_edo.config.run import REPLICATE, arm_label, baseline_arm
from nemo_edo.types import Problem, ScoredRollout

EXAMPLES, EXAMPLE_RESPONSES = 6, 3
"""Test problems, and responses to each by each arm, that the trackers show."""
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformers")


def summary(
    name: str,
    seed: int,
    arms: Mapping[str, ArmConfig],
    skipped_rows: int,
    seconds: Mapping[str, float],
    processes: int,
) -> dict:
    """The content of summary.json."""
    settings_of = {
        arm: {
            "label": arm_label(settings) + (", replicate" if arm == REPLICATE else ""),
            "algorithm": "idpo" if isinstance(settings, IDPOConfig) else "grpo",
            "alpha": settings.effective_alpha,
            "beta": settings.beta,
            "exploration_weight": settings.exploration_weight,
            "log_ratio_floor": settings.log_ratio_floor,
            "entropy_coefficient": getattr(settings, "entropy_coefficient", 0.0),
            "iterations": settings.iterations,
        }
        for arm, settings in arms.items()
    }
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        "name": name,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": _machine(),
        "versions": {"nemo-edo": __version__, "python": machine.python_version(), **versions},
        "processes": processes,
        "arms": settings_of,
        "baseline": baseline_arm(arms),
        "skipped_rows": skipped_rows,
        "time": dict(seconds),
    }


def _commit() -> str | None:
    """The commit of the package's source, with a + where its files differ from it; None where git does not keep it.

    Other files do not count: a study's table grows by each of its runs.
    """
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(Path(__file__).parents[1])]
    kept = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
    if kept.returncode:  # installed, perhaps inside the repository of another project
        return None
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], check=False)
    return head.stdout.strip() + "+" * (changed.returncode != 0)


def _machine() -> str:
    """The devices that the first process computes on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} x {machine.machine()} CPU"


def examples(problems: Sequence[Problem], scored: Sequence[ScoredRollout]) -> dict[str, list[dict[str, Any]]]:
    """An arm's first responses to the first problems, by problem."""
    return {
        problem.id: [{"text": item.rollout.text, "reward": item.reward} for item in _first_responses(problem, scored)]
        for problem in problems[:EXAMPLES]
    }


def _first_responses(problem: Problem, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    return [item for item in scored if item.rollout.problem_id == problem.id][:EXAMPLE_RESPONSES]


SOLUTION_COLUMNS = ("problem", "arm", "iteration", "sample", "text", "answer", "reward")
"""Columns of the table of solutions that an evaluation gives to the trackers."""


def solution_rows(
    problems: Sequence[Problem], scored: Sequence[ScoredRollout], arm: str, iteration: int
) -> list[tuple[str, str, int, int, str, str, float]]:
    """An arm's first responses to the first problems, by ``SOLUTION_COLUMNS``; "" where no answer was found."""
    return [
        (problem.question, arm, iteration, sample, item.rollout.text, item.answer or "", item.reward)
        for problem in problems[:EXAMPLES]
        for sample, item in enumerate(_first_responses(problem, scored))
    ]


FILE = "warnings.jsonl"
PACKAGE = Path(nemo_edo.__file__).parent


@contextmanager
def kept_warnings(folder: Path, stage: Callable[[], str]) -> Iterator[None]:
    """Inside the block, this package's own warnings are also written to the folder, each once, with the stage that they
    came in."""
    show, known = warnings.showwarning, kept(folder)

    def write_and_show(message, category, filename, lineno, file=None, line=None) -> None:
        show(message, category, filename, lineno, file, line)
        entry = {"arm": stage(), "text": str(message)}
        if Path(filename).is_relative_to(PACKAGE) and entry not in known:
            known.append(entry)
            with (folder / FILE).open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")

    warnings.showwarning = write_and_show
    try:
        yield
    finally:
        warnings.showwarning = show


def kept(folder: Path) -> list[dict[str, str]]:
    path = folder / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
