"""What a run's summary.json and samples.json say about its arms."""

from __future__ import annotations

import importlib.metadata
import platform as machine
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_edo import __version__
from nemo_edo.config import GRPOConfig, IDPOConfig, LoopConfig, RunConfig
from nemo_edo.report.run_record import PLAIN_LABELS
from nemo_edo.types import Problem, ScoredRollout

EXAMPLES, EXAMPLE_RESPONSES = 6, 3
"""Test problems, and responses to each by each arm, that the report and the trackers show."""
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformers")


def summary(cfg: RunConfig, arms: Mapping[str, LoopConfig], skipped_rows: int, seconds: Mapping[str, float]) -> dict:
    """The content of summary.json."""
    settings_of = {
        name: {
            "label": arm_label(settings),
            "algorithm": "idpo" if isinstance(settings, IDPOConfig) else "grpo",
            "alpha": settings.effective_alpha,
            "beta": settings.beta,
            "exploration_weight": settings.exploration_weight,
            "log_ratio_floor": settings.log_ratio_floor,
            "entropy_coefficient": getattr(settings, "entropy_coefficient", 0.0),
            "iterations": settings.iterations,
        }
        for name, settings in arms.items()
    }
    plain = [name for name, settings in arms.items() if arm_label(settings) in PLAIN_LABELS]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "name": cfg.name,
        "seed": cfg.seed,
        "versions": {"nemo-edo": __version__, "python": machine.python_version(), **versions},
        "processes": torch.distributed.get_world_size(),
        "arms": settings_of,
        "baseline": next(iter(plain or arms), None),
        "skipped_rows": skipped_rows,
        "time": dict(seconds),
    }


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


def side_by_side(problems: Sequence[Problem], of_arms: Mapping[str, dict[str, list[dict[str, Any]]]]) -> list[dict]:
    """The content of samples.json, from the ``examples`` of each arm."""
    return [
        {
            "question": problem.question,
            "answer": problem.answer,
            "responses": {arm: found[problem.id] for arm, found in of_arms.items()},
        }
        for problem in problems[:EXAMPLES]
    ]


def arm_label(settings: LoopConfig) -> str:
    """What an arm is, from its settings: "GRPO", "ED-GRPO α=0.001", "GRPO, entropy bonus 0.03"."""
    plain, exploring = ("ETO", "ED-iDPO") if isinstance(settings, IDPOConfig) else ("GRPO", "ED-GRPO")
    parts = [plain]
    if settings.exploration_weight:
        strength = (
            f"α={settings.effective_alpha:g}"
            if settings.effective_alpha is not None
            else f"αβ={settings.exploration_coefficient:g}"
        )
        parts = [f"{exploring} {strength}"]
        if settings.log_ratio_floor is not None:
            parts.append(f"floor {settings.log_ratio_floor:g}")
    if settings.exploration_weight and settings.schedule.kind != "constant":
        parts.append(f"{settings.schedule.kind} schedule")
    return ", ".join(parts + (_baseline_labels(settings) if isinstance(settings, GRPOConfig) else []))


def _baseline_labels(settings: GRPOConfig) -> list[str]:
    """How a GRPO arm differs from GRPO, exploration aside; variants of the term only if it explores."""
    labels = {
        "pure noise": settings.exploration_weight and settings.exploration_control == "noise",
        "redundancy-weighted": settings.exploration_weight and settings.redundancy_weighted,
        "without zero-advantage groups": settings.exploration_weight and not settings.explore_uninformative_groups,
        f"entropy bonus {settings.entropy_coefficient:g}": settings.entropy_coefficient,
        settings.covariance_control: settings.covariance_control != "none",
        f"pass@{settings.pass_k}": settings.pass_k,
        f"novelty {settings.novelty_strength:g}": settings.novelty_strength,
        "dynamic sampling": settings.dynamic_sampling,
        settings.surrogate: settings.surrogate != "clip",
        "sequence ratios": settings.importance_sampling_level == "sequence",
    }
    return [label for label, present in labels.items() if present]
