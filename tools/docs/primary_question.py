"""The primary question of the study ``collapse``: does the paper's form, at the mean of its small doses, change votes?

    python tools/docs/primary_question.py            # the answer, once every cell is in the table
    python tools/docs/primary_question.py --power    # the probability of each answer, simulated from the pilots

A block is a task and a seed. Its value is the mean vote@10 of the trainings with the paper's form, one for each dose,
minus that of the two trainings with plain GRPO, at temperature 1. The estimate is the weighted mean over tasks of the
means over their seeds. A task's weight is in inverse proportion to the standard deviation of its pilots' votes
(``pilot_spreads``), and so fixed before the study's first run: a task where two trainings lie far apart tells less. The
standard error is from the seeds' spread within each task, so that tasks may differ in level and in effect: a stratified
mean with Satterthwaite's degrees of freedom, for the tasks, starts and test problems at hand.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
from report_tables import markdown
from scipy.special import stdtrit
from studies_table import CONTROLS, FORM, REGISTERED, study_rows

from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.experiments.study import Study, read_study
from nemo_edo.experiments.study_table import Row, last_rows, read_rows

ROOT = Path(__file__).parents[2]
PILOTS = ROOT / "docs" / "studies" / "pilots.csv"
DOSES = 3
SMALL = 0.01
"""A change in votes below this is no change worth having."""
PILOTED = {"chain": ("chain_20", 66), "lcm": ("lcm_34", 32), "residues": ("residues_28", 90), "sums": ("sums_21", 52)}
"""Each task's pilots by their name in the table, and the iterations after which the study ends."""
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


def estimate(values: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """values: of each task's blocks, two at least. weights: of the tasks, with a sum of 1. Satterthwaite's degrees of
    freedom."""
    weighted = list(zip(weights, values, strict=True))
    squares = np.array([weight**2 * np.var(of_task, ddof=1) / len(of_task) for weight, of_task in weighted])
    degrees = squares.sum() ** 2 / (squares**2 / [len(of_task) - 1 for of_task in values]).sum()
    mean = sum(weight * fmean(of_task) for weight, of_task in weighted)
    return Estimate(float(mean), float(np.sqrt(squares.sum())), float(degrees))


def difference(block: Block) -> float:
    return fmean(block[0]) - fmean(block[1])


def permutation_p(
    found: Mapping[str, Sequence[Block]], weights: Mapping[str, float], rng: np.random.Generator
) -> float:
    """The two-sided p-value with the trainings of each block in random order. Exact only if these are exchangeable:
    the doses and one of the controls share a seed, and where doses correlate by 0.3 it is below 0.05 in 0.09 of studies
    without an effect."""
    seen = abs(sum(weights[task] * fmean(map(difference, of_task)) for task, of_task in found.items()))
    drawn = np.zeros(PERMUTATIONS)
    for task, of_task in found.items():
        for form, controls in of_task:
            shuffled = rng.permuted(np.tile([*form, *controls], (PERMUTATIONS, 1)), axis=1)
            apart = shuffled[:, : len(form)].mean(axis=1) - shuffled[:, len(form) :].mean(axis=1)
            drawn += weights[task] * apart / len(of_task)
    return float((np.sum(np.abs(drawn) >= seen - 1e-12) + 1) / (PERMUTATIONS + 1))


def answer(study: Study) -> str:
    """The registered answer; before the last cell, how far the study is and nothing of what it shows."""
    left = len(study.unfinished())
    if left:
        return f"In progress: {len(study.cells) - left} of {len(study.cells)} cells; no verdict before the last."
    rows = study_rows(study)
    found, weights = blocks(rows, DOSES), task_weights(pilot_spreads(read_rows(PILOTS)))
    complete = {task: len(found.get(task, ())) for task in study.tasks}
    if set(complete.values()) != {len(study.seeds)}:
        return f"No verdict: of {len(study.seeds)} blocks of each task, only so many are complete: {complete}"
    result = weighted(found, weights)
    (low, high), (least, most) = result.interval(0.95), result.interval(0.90)
    better, worse, equal = result.verdict
    shown = [text for holds, text in ((better, "it raises votes"), (worse, "it lowers votes"),
                                      (equal, f"the mean change over doses is less than {SMALL:g} either way"))
             if holds]  # fmt: skip
    head = f"Shown: {' and '.join(shown)}" if shown else f"Neither a change nor one of less than {SMALL:g} is shown"
    return (
        f"{head}. Votes change by {result.mean:+.4f}, 95 % interval [{low:+.4f}, {high:+.4f}], 90 % interval "
        f"[{least:+.4f}, {most:+.4f}], permutation p = {permutation_p(found, weights, np.random.default_rng(0)):.4f}. "
        + sensitivity(rows, weights)
    )


def weighted(found: Mapping[str, Sequence[Block]], weights: Mapping[str, float]) -> Estimate:
    values = {task: [difference(block) for block in of_task] for task, of_task in found.items()}
    return estimate([*values.values()], [weights[task] for task in values])


def sensitivity(rows: Sequence[Row], weights: Mapping[str, float]) -> str:
    """The trainings that guards stopped, and the estimate without their blocks, which decides nothing."""
    stopped = [row for row in rows if row["note"] and row["arm"] in (FORM, *CONTROLS)]
    if not stopped:
        return "No guard stopped a training."
    hit = {(row["task"], row["seed"]) for row in stopped}
    found = blocks([row for row in rows if (row["task"], row["seed"]) not in hit], DOSES)
    found = {task: of_task for task, of_task in found.items() if len(of_task) > 1}
    arms = Counter(f"{row['arm']} {row['dose']}".strip() for row in stopped)
    counts = ", ".join(f"{count} of {arm}" for arm, count in arms.items())
    if not found:
        return f"Guards stopped {counts}; no task has two blocks without them."
    of_left = sum(weights[task] for task in found)
    left = weighted(found, {task: weights[task] / of_left for task in found})
    low, high = left.interval(0.95)
    of_tasks = f" of {', '.join(found)}"
    return f"Guards stopped {counts}; without these blocks{of_tasks} {left.mean:+.4f} [{low:+.4f}, {high:+.4f}]."


def pilot_votes(rows: Iterable[Row]) -> dict[str, list[float]]:
    """The votes of each task's pilots, trainings with plain GRPO from one start, where the study's trainings end."""
    found: dict[str, list[float]] = {task: [] for task in PILOTED}
    for row in rows:
        for task, (pilot, iterations) in PILOTED.items():
            at_the_end = (row["task"], row["iteration"], row["temperature"]) == (pilot, str(iterations), "1")
            if at_the_end and row["arm"] in CONTROLS:
                found[task].append(float(row["vote"]))
    return found


def pilot_spreads(rows: Iterable[Row]) -> dict[str, float]:
    """Each task's standard deviation of one training's votes: the root of the mean of its pilots' variance and the
    tasks' mean variance, as four trainings alone may lie close together by chance."""
    variances = {task: float(np.var(votes, ddof=1)) for task, votes in pilot_votes(rows).items()}
    shared = fmean(variances.values())
    return {task: ((own + shared) / 2) ** 0.5 for task, own in variances.items()}


def task_weights(spreads: Mapping[str, float]) -> dict[str, float]:
    total = sum(1 / spread for spread in spreads.values())
    return {task: 1 / spread / total for task, spread in spreads.items()}


def power(spreads: Mapping[str, float], seeds: int, gain: float, *, varies: float, shared: float, doses: int,
          studies: int = 2000) -> tuple[float, float, float]:  # fmt: skip
    """The shares of simulated studies with each verdict.

    spreads: standard deviation of a training's votes, by task. varies: of the true effect, over seeds; over tasks
    it differs by the same. shared: the correlation of the doses' votes within a block.
    """
    rng, counts = np.random.default_rng(0), np.zeros(3)
    weights = [*task_weights(spreads).values()]
    for _ in range(studies):
        by_task = rng.normal(0, varies, len(spreads))
        by_task += gain - by_task @ weights
        values = []
        for spread, effect in zip(spreads.values(), by_task, strict=True):
            common = np.sqrt(shared) * rng.normal(0, spread, (seeds, 1))
            form = common + np.sqrt(1 - shared) * rng.normal(0, spread, (seeds, doses))
            controls = rng.normal(0, spread, (seeds, len(CONTROLS)))
            values.append(form.mean(axis=1) - controls.mean(axis=1) + rng.normal(effect, varies, seeds))
        counts += estimate(values, weights).verdict
    return tuple(counts / studies)


def power_table() -> str:
    """The spread of each task's pilots, and what the study would show with so many seeds."""
    pilots = read_rows(PILOTS)
    votes, spreads = pilot_votes(pilots), pilot_spreads(pilots)
    weights = task_weights(spreads)
    each = [
        [task, *map(str, PILOTED[task]), str(len(votes[task])), f"{spreads[task]:.4f}", f"{weights[task]:.2f}"]
        for task in PILOTED
    ]
    lines = []
    for seeds, shared in product(range(8, 33, 4), (0.0, 0.3)):
        settings = {"varies": VARIES, "shared": shared, "doses": DOSES}
        gain, none = (power(spreads, seeds, true, **settings) for true in (PAPERS, 0.0))
        values = (gain[0], none[2], none[0] + none[1])
        lines.append([str(seeds), f"{shared:g}", *(f"{value:.3f}" for value in values)])
    shown = [f"a gain, of {PAPERS:g}", f"less than {SMALL:g}, of 0", "a change, of 0"]
    return "\n\n".join(
        [
            markdown(["task", "pilot", "iterations", "trainings", "standard deviation of their votes", "weight"], each),
            markdown(["seeds", "correlation of doses", *shown], lines),
        ]
    )


if __name__ == "__main__":
    os.chdir(ROOT)  # the study's table is named from there
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--power", action="store_true")
    if parser.parse_args().power:
        sys.stdout.write(power_table() + "\n")
    else:
        sys.stdout.write(answer(read_study(shipped_config_dir() / "studies" / f"{REGISTERED}.yaml")) + "\n")
