"""The primary question of the study ``collapse``: does the paper's form, at the mean of its small doses, change votes?

    python tools/docs/primary_question.py            # the answer, once every cell is in the table
    python tools/docs/primary_question.py --power    # the probability of each answer, simulated from the pilots

A block is a task and a seed. Its value is the mean vote@10 of the trainings with the paper's form, one for each dose,
minus that of the two trainings with plain GRPO, at temperature 1. The estimate is the mean over tasks of the means over
their seeds; its standard error is from the seeds' spread within each task, so that tasks may differ in level and in
effect. That is the mixed model with blocks as random effects, for the tasks at hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
from report_tables import markdown
from scipy.special import stdtrit

from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.experiments.study import Study, read_study
from nemo_edo.experiments.study_table import Row, last_rows, read_rows

ROOT = Path(__file__).parents[2]
PILOTS = ROOT / "docs" / "studies" / "pilots.csv"
FORM, CONTROLS = "ed_grpo", ("grpo", "replicate")
SMALL = 0.01
"""A change in votes below this is no change worth having."""
PAPERS = 0.015
"""Within the paper's gains, 0.008 to 0.017."""
VARIES = 0.01
"""Assumed standard deviation of the true effect over seeds, and over tasks."""
PERMUTATIONS = 10_000
Block = tuple[list[float], list[float]]
"""The votes of the form's trainings, and of the controls'."""


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float
    degrees: float

    def interval(self, level: float) -> tuple[float, float]:
        reach = float(stdtrit(self.degrees, 0.5 + level / 2)) * self.error
        return self.mean - reach, self.mean + reach

    @property
    def verdict(self) -> tuple[bool, bool, bool]:
        """(shown to raise votes, shown to lower them, equivalent): by the 95 % interval, and for the last by the 90 %
        interval within +-SMALL, which is two one-sided tests at 0.05."""
        (low, high), (least, most) = self.interval(0.95), self.interval(0.90)
        return low > 0, high < 0, least > -SMALL and most < SMALL


def blocks(rows: Iterable[Row], doses: int) -> dict[str, list[Block]]:
    """The complete blocks of each task. A training that a guard stopped counts 0."""
    votes: dict[tuple[str, int], dict[str, list[float]]] = {}
    for (task, arm, _, seed), row in last_rows(rows, "1").items():
        votes.setdefault((task, seed), {}).setdefault(arm, []).append(0.0 if row["note"] else float(row["vote"]))
    found: dict[str, list[Block]] = {}
    for (task, _), of_block in sorted(votes.items()):
        form, controls = of_block.get(FORM, []), [vote for arm in CONTROLS for vote in of_block.get(arm, [])]
        if len(form) == doses and len(controls) == len(CONTROLS):
            found.setdefault(task, []).append((form, controls))
    return found


def estimate(values: Sequence[Sequence[float]]) -> Estimate:
    """values: of each task's blocks, two at least. Satterthwaite's degrees of freedom."""
    squares = np.array([np.var(of_task, ddof=1) / len(of_task) for of_task in values])
    degrees = squares.sum() ** 2 / (squares**2 / [len(of_task) - 1 for of_task in values]).sum()
    return Estimate(fmean(map(fmean, values)), float(np.sqrt(squares.sum())) / len(values), float(degrees))


def difference(block: Block) -> float:
    return fmean(block[0]) - fmean(block[1])


def permutation_p(found: Mapping[str, Sequence[Block]], rng: np.random.Generator) -> float:
    """Two-sided, with the trainings of each block in random order: exact where the form changes nothing."""
    seen = abs(fmean(fmean(map(difference, of_task)) for of_task in found.values()))
    drawn = np.zeros(PERMUTATIONS)
    for of_task in found.values():
        for form, controls in of_task:
            shuffled = rng.permuted(np.tile([*form, *controls], (PERMUTATIONS, 1)), axis=1)
            apart = shuffled[:, : len(form)].mean(axis=1) - shuffled[:, len(form) :].mean(axis=1)
            drawn += apart / len(of_task) / len(found)
    return float((np.sum(np.abs(drawn) >= seen - 1e-12) + 1) / (PERMUTATIONS + 1))


def answer(study: Study) -> str:
    """The registered answer; before the last cell, how far the study is and nothing of what it shows."""
    left = len(study.unfinished())
    if left:
        return f"In progress: {len(study.cells) - left} of {len(study.cells)} cells; no verdict before the last."
    found = blocks(read_rows(ROOT / study.table), len(study.arms[FORM].doses))
    result = estimate([[difference(block) for block in of_task] for of_task in found.values()])
    (low, high), (least, most) = result.interval(0.95), result.interval(0.90)
    better, worse, equal = result.verdict
    shown = [text for holds, text in ((better, "it raises votes"), (worse, "it lowers votes"),
                                      (equal, f"the change is less than {SMALL:g}")) if holds]  # fmt: skip
    head = f"Shown: {' and '.join(shown)}" if shown else f"Neither a change nor one of less than {SMALL:g} is shown"
    return (
        f"{head}. Votes change by {result.mean:+.4f}, 95 % interval [{low:+.4f}, {high:+.4f}], 90 % interval "
        f"[{least:+.4f}, {most:+.4f}], permutation p = {permutation_p(found, np.random.default_rng(0)):.4f}."
    )


def training_spread(rows: Iterable[Row], tasks: Sequence[str]) -> dict[str, list[float]]:
    """GRPO minus its replicate, by task: their standard deviation is sqrt(2) times that of one training's votes."""
    found: dict[str, list[float]] = {task: [] for task in tasks}
    votes = {(task, arm, seed): float(row["vote"]) for (task, arm, _, seed), row in last_rows(rows, "1").items()}
    for (task, arm, seed), vote in votes.items():
        if arm == CONTROLS[0] and task in found and (task, CONTROLS[1], seed) in votes:
            found[task].append(vote - votes[task, CONTROLS[1], seed])
    return found


def power(spreads: Sequence[float], seeds: int, gain: float, *, varies: float, shared: float, doses: int,
          studies: int = 2000) -> tuple[float, float, float]:  # fmt: skip
    """The shares of simulated studies with each verdict.

    spreads: standard deviation of a training's votes, for each task. varies: of the true effect, over seeds; over tasks
    it differs by the same. shared: the correlation of the doses' votes within a block.
    """
    rng, counts = np.random.default_rng(0), np.zeros(3)
    for _ in range(studies):
        by_task = rng.normal(0, varies, len(spreads))
        by_task += gain - by_task.mean()
        values = []
        for spread, effect in zip(spreads, by_task, strict=True):
            common = np.sqrt(shared) * rng.normal(0, spread, (seeds, 1))
            form = common + np.sqrt(1 - shared) * rng.normal(0, spread, (seeds, doses))
            controls = rng.normal(0, spread, (seeds, len(CONTROLS)))
            values.append(form.mean(axis=1) - controls.mean(axis=1) + rng.normal(effect, varies, seeds))
        counts += estimate(values).verdict
    return tuple(counts / studies)


def power_table(study: Study) -> str:
    """The spread of each task in the pilots, and what the study would show with so many seeds and the pooled spread."""
    apart = training_spread(read_rows(PILOTS), list(study.tasks))
    spreads = {task: float(np.sqrt(np.mean(np.square(values)) / 2)) for task, values in apart.items()}
    pooled = float(np.sqrt(np.mean(np.square([value for values in apart.values() for value in values])) / 2))
    each = [[task, str(len(apart[task])), f"{spread:.4f}"] for task, spread in spreads.items()]
    lines = []
    for seeds, shared in product(sorted({*range(4, 21, 4), len(study.seeds)}), (0.0, 0.3)):
        settings = {"varies": VARIES, "shared": shared, "doses": len(study.arms[FORM].doses)}
        gain, none = (power([pooled] * len(spreads), seeds, true, **settings) for true in (PAPERS, 0.0))
        values = (gain[0], none[2], none[0] + none[1])
        lines.append([str(seeds), f"{shared:g}", *(f"{value:.3f}" for value in values)])
    shown = [f"a gain, of {PAPERS:g}", f"less than {SMALL:g}, of 0", "a change, of 0"]
    return "\n\n".join(
        [
            markdown(
                ["task", "pairs", "standard deviation of a training's votes"], [*each, ["pooled", "", f"{pooled:.4f}"]]
            ),
            markdown(["seeds", "correlation of doses", *shown], lines),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--power", action="store_true")
    wanted = read_study(shipped_config_dir() / "studies" / "collapse.yaml")
    sys.stdout.write((power_table if parser.parse_args().power else answer)(wanted) + "\n")
