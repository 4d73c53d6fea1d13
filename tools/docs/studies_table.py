"""Writes docs/study_tables.md from the studies' CSV files.

    python tools/docs/studies_table.py

For each study of conf/studies/: which of its cells are done, and for each task every arm and dose, with the mean over
seeds and the difference in votes from GRPO of the same seed. Then the paper's claims, from all of them. The tests
compare the page with what this gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from paper_claims import FAMILIES, METRIC, Finding, findings
from paper_claims import markdown as claims_table
from report_tables import markdown

from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.evaluation.results import START, seeds_interval
from nemo_edo.experiments.study import Study, cpu_hours_left, read_study, study_file, verdict_lines
from nemo_edo.experiments.study_table import METRICS, Row, cell_of, last_rows, read_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "study_tables.md"
HEAD = """# Tables of the studies

Written by `python tools/docs/studies_table.py` from the files in `docs/studies/`. [Studies](studies.md) says what they
show, and how the studies were made. Means are over seeds; differences are paired by seed, with Student's t intervals.
"""
TOGETHER = "On the mean over the tasks of each seed, corrected for this table's tests alone:"
SHOWN = {
    "greedy_accuracy": "greedy accuracy",
    "accuracy": "sampled accuracy",
    "vote": "vote@10",
    "pass": "pass@10",
    "distinct_4": "Distinct-4",
    "entropy": "entropy (nats)",
}
LENGTH = "response_length"
"""Shown for each task alone: samples and steps are equal, tokens need not be."""
MEANED = (*SHOWN, *METRIC.values(), "well_formed")
"""The columns that have a mean over tasks; METRIC's and the last are those of the claims."""
BASELINE = "grpo"
CONTROLS = (BASELINE, "replicate")
"""The two trainings with plain GRPO of each block of the registered study."""
REGISTERED = "collapse"
"""The study with one primary question (primary_question.py): nothing of its results is shown before its last cell."""
AT_ITS_BEST = "collapse_temperature"
"""The small study next to it: its GRPO trainings again, each at the temperature that is best on training problems."""
FORM = "ed_grpo"
"""The paper's form, of which both ask."""
ITS_RULES = (
    "All of this is secondary. Differences are from the mean of the two GRPO trainings of the same task and seed, "
    "which the line grpo has, and unweighted over tasks. A training that a guard stopped has votes of 0 and no other "
    "metric."
)
ITS_BASELINE = {family.arm: family.baseline for family in FAMILIES}
"""The baselines of the paper's forms: over all tasks each form is compared with its dose 0."""
Arm = tuple[str, str]
"""(name, dose)"""
AT_1 = dict.fromkeys(SHOWN, "1")
"""The metrics of the tables, at the temperature of all but the last columns."""
BySeed = dict[Arm, dict[int, Row]]


class Difference(NamedTuple):
    """An arm's from its baseline in a metric, by seed."""

    arm: Arm
    metric: str
    values: list[float]


def page(found: list[Study]) -> str:
    sections = [(study.name.replace("_", " ").capitalize(), tables(study)) for study in found]
    of_claims = [claims_table(claims(found)), TOGETHER, claims_table(together(found))]
    sections.append(("The paper's three claims", of_claims))
    return "\n".join([HEAD, *("\n\n".join([f"## {title}", *parts]) + "\n" for title, parts in sections)])


def claims(found: list[Study]) -> list[Finding]:
    """The paper's claims on each task of the studies, from every row of their files: one table, with one correction."""
    return findings(row for rows in files(found) for row in rows)


def together(found: list[Study]) -> list[Finding]:
    """The paper's claims on the tasks of each file together: fewer tests, so that a smaller effect is found."""
    return findings(row for rows in files(found) for row in meaned(rows))


def files(found: list[Study]) -> list[list[Row]]:
    """The rows of each of the studies' tables; of the registered study, whose tasks have other settings, none."""
    tables = dict.fromkeys(study.table for study in found if study.name != REGISTERED)
    return [read_rows(ROOT / table) for table in tables]


def meaned(rows: list[Row], temperature: str = "1") -> list[Row]:
    """A row for each arm, dose and seed that every task has, with the means over the tasks (of votes, over those that
    have votes); none for one task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    of_tasks = [by_seed([row for row in rows if row["task"] == task], temperature) for task in tasks]
    found: list[Row] = []
    for arm, seeds in of_tasks[0].items() if len(tasks) > 1 else ():
        for seed, first in seeds.items():
            same = [one[arm][seed] for one in of_tasks if seed in one.get(arm, {})]
            if len(same) == len(tasks):
                values = {metric: [float(row[metric]) for row in same if row[metric]] for metric in MEANED}
                means = {metric: str(fmean(known)) if known else "" for metric, known in values.items()}
                found.append({**first, "task": ", ".join(tasks), **means})
    return found


def studies() -> list[Study]:
    return [read_study(path) for path in sorted((shipped_config_dir() / "studies").glob("*.yaml"))]


def tables(study: Study) -> list[str]:
    """The state of the study, a table for each task with results, what the temperature does, the arms over all tasks,
    and then what the study is for: the doses that would be chosen, or the verdict on a held-out claim."""
    rows = study_rows(study)
    about = state(study, rows)
    found: list[str | None] = [about]
    if study.name in (REGISTERED, AT_ITS_BEST):
        registered = study if study.name == REGISTERED else read_study(study_file(REGISTERED))
        if study.unfinished() or registered.unfinished():
            return [about, f"Its results come with the last cell of {REGISTERED}."]
    if study.name == AT_ITS_BEST:
        found.append(at_its_best_table(rows, read_rows(ROOT / registered.table)))
    if study.name == REGISTERED:
        stopped = ", ".join(" ".join(cell_of(row)[:3]) for row in rows if row["note"])
        found.append(f"{ITS_RULES} Stopped: {stopped or 'none'}.")
        rows = of_blocks(rows)
    for task in study.tasks:
        of_task = [row for row in rows if row["task"] == task]
        if of_task:
            found.append(task_table(task, of_task, study))
    found += [temperature_table(rows, study), over_tasks_table(rows, study)]
    if study.held_out:
        found += verdict_lines(study) or ["The candidates are judged when every cell is done."]
    else:
        found.append(choice_table(rows, study))
    return [one for one in found if one]


def study_rows(study: Study) -> list[Row]:
    """The rows of the study's cells and their starts: the file may have other studies' too."""
    wanted = {cell.key for cell in study.cells} | {
        study.start(task, seed).key for task in study.tasks for seed in study.seeds
    }
    return [row for row in read_rows(ROOT / study.table) if cell_of(row) in wanted]


def of_blocks(rows: list[Row]) -> list[Row]:
    """The last rows, with the mean of a block's two GRPO trainings in place of both; ``ITS_RULES``."""
    found: list[Row] = []
    plain: dict[tuple[str, str], list[Row]] = defaultdict(list)
    of_a_stopped = dict.fromkeys(METRICS, "") | {"vote": "0", "note": "", "temperature": "1"}
    for row in last_rows(rows, "1").values():
        of_arm = plain[row["task"], row["seed"]] if row["arm"] in CONTROLS else found
        of_arm.append(row | of_a_stopped if row["note"] else row)
    for both in plain.values():
        known = {metric: [float(row[metric]) for row in both if row[metric]] for metric in METRICS}
        means = {metric: str(fmean(values)) if values else "" for metric, values in known.items()}
        found.append({**both[0], "arm": BASELINE, **means})
    return found


def state(study: Study, rows: list[Row]) -> str:
    left, hours = study.unfinished(), cpu_hours_left(study)
    lines = []
    for task in study.tasks:
        cells = [cell for cell in study.cells if cell.task == task]
        done = len(cells) - sum(cell.task == task for cell in left)
        spent = {cell_of(row): float(row["cpu_seconds"]) for row in rows if row["task"] == task}
        trained = [cost for key, cost in spent.items() if key[1] != START]
        each = f"{fmean(trained):.0f}" if trained else ""
        lines.append([task, f"{done} of {len(cells)}", f"{sum(spent.values()) / 3600:.2f}", each])
    remaining = "unknown before the first cell" if hours is None else f"about {hours:.1f}"
    table = markdown(["task", "cells done", "CPU hours used", "CPU seconds per cell"], lines)
    return f"{table}\n\nCPU hours that are left: {remaining if left else 'none'}."


def by_seed(rows: list[Row], temperature: str = "1") -> BySeed:
    """The last evaluation of each arm, dose and seed, at a temperature."""
    found: BySeed = defaultdict(dict)
    for (_, arm, dose, seed), row in last_rows(rows, temperature).items():
        if not row["note"]:
            found[arm, dose][seed] = row
    return found


def task_table(task: str, of_task: list[Row], study: Study) -> str:
    found, tuned = by_seed(of_task), by_seed(of_task, "best")
    order = [(START, ""), *dict.fromkeys((cell.arm, cell.dose) for cell in study.cells)]
    rows = []
    for arm in (one for one in order if one in found):
        means = [mean(found[arm], metric) for metric in (*SHOWN, LENGTH)]
        votes = [difference(found, arm, "vote"), mean(tuned[arm], "vote"), difference(tuned, arm, "vote")]
        rows.append([name(arm), str(len(found[arm])), *means, *votes])
    votes = ["vote@10 minus GRPO's", "vote@10 at the best temperature", "this minus GRPO's"]
    return markdown([f"{task}: arm, dose", "seeds", *SHOWN.values(), "tokens per response", *votes], rows)


def over_tasks(rows: list[Row], study: Study, at: Mapping[str, str] = AT_1) -> list[Difference]:
    """Each arm's differences from its baseline, meaned over the tasks of each seed that has both on all of them; none
    for one task. A training that a guard stopped has no metrics.

    at: the metrics, and the temperature of each.
    """
    if {row["task"] for row in rows} != set(study.tasks):
        return []
    found = []
    for metric, temperature in at.items():
        over = by_seed(meaned(rows, temperature), temperature)
        for arm in dict.fromkeys((cell.arm, cell.dose) for cell in study.cells if cell.arm != BASELINE):
            own, plain = over.get(arm, {}), over.get((ITS_BASELINE.get(arm[0], BASELINE), ""), {})
            seeds = sorted(seed for seed in own.keys() & plain.keys() if own[seed][metric] and plain[seed][metric])
            if seeds:
                apart = [float(own[seed][metric]) - float(plain[seed][metric]) for seed in seeds]
                found.append(Difference(arm, metric, apart))
    return found


def over_tasks_table(rows: list[Row], study: Study) -> str | None:
    """``over_tasks``, a line for each arm; None where no arm has a seed on every task."""
    found = [*over_tasks(rows, study), *over_tasks(rows, study, {"vote": "best"})]
    lines = [
        [name(arm), str(len(next(one.values for one in found if one.arm == arm))),
         *(in_words(one.metric, one.values) for one in found if one.arm == arm)]
        for arm in dict.fromkeys(one.arm for one in found)
    ]  # fmt: skip
    plain = all(one.arm[0] not in ITS_BASELINE or ITS_BASELINE[one.arm[0]] == BASELINE for one in found)
    minus = "GRPO" if plain else "GRPO (ED-iDPO: ETO)"
    heads = [f"all tasks: arm, dose, minus {minus}", "seeds", *SHOWN.values(), "vote@10 at the best temperature"]
    return markdown(heads, lines) if lines else None


def temperature_table(rows: list[Row], study: Study) -> str | None:
    """For each task, what the best temperature adds to the baseline's votes at temperature 1; None before it is known
    for one."""
    lines = []
    for task in study.tasks:
        of_task = [row for row in rows if row["task"] == task]
        plain, tuned = (by_seed(of_task, at).get((BASELINE, ""), {}) for at in ("1", "best"))
        pairs = [(plain[seed], tuned[seed]) for seed in plain if seed in tuned and plain[seed]["vote"]]
        if pairs:
            chosen = Counter(float(at_1["best_temperature"]) for at_1, _ in pairs)
            each = ", ".join(f"{one:g} ({chosen[one]})" for one in sorted(chosen))
            apart = [float(best["vote"]) - float(at_1["vote"]) for at_1, best in pairs]
            votes = [mean(plain, "vote"), mean(tuned, "vote"), in_words("vote", apart)]
            lines.append([task, str(len(pairs)), each, *votes])
    heads = ["GRPO on", "seeds", "best temperatures (seeds)", "vote@10 at 1", "at the best temperature", "difference"]
    return markdown(heads, lines) if lines else None


def at_its_best_table(rows: list[Row], registered: list[Row]) -> str:
    """The paper's form at temperature 1, meaned over its doses, minus GRPO of the same task and seed at its best
    temperature, and its mean over the tasks of each seed. A training that a guard stopped has votes of 0."""
    form: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (task, arm, _, seed), row in last_rows(registered, "1").items():
        if arm == FORM:
            form[task, seed].append(0.0 if row["note"] else float(row["vote"]))
    apart: dict[str, dict[int, float]] = defaultdict(dict)
    for (task, arm, _, seed), row in last_rows(rows, "best").items():
        if arm == BASELINE:
            apart[task][seed] = fmean(form[task, seed]) - (0.0 if row["note"] else float(row["vote"]))
    seeds = set.intersection(*(set(of_task) for of_task in apart.values()))
    meaned = {seed: fmean(of_task[seed] for of_task in apart.values()) for seed in sorted(seeds)}
    lines = [[task, str(len(of_task)), in_words("vote", [*of_task.values()])]
             for task, of_task in {**apart, "all tasks": meaned}.items()]  # fmt: skip
    return markdown(["task", "seeds", f"vote@10 of {FORM} at 1 minus GRPO's at its best temperature"], lines)


def choice_table(rows: list[Row], study: Study) -> str | None:
    """Each arm's dose with the highest vote@10 at the best temperature, meaned over seeds and then tasks, among the
    doses whose cells are all done; None where no arm has one."""
    found = {task: by_seed([row for row in rows if row["task"] == task], "best") for task in study.tasks}
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for arm, dose in dict.fromkeys((cell.arm, cell.dose) for cell in study.cells):
        seeds = [found[task].get((arm, dose), {}) for task in study.tasks]
        if all(set(of_task) == set(study.seeds) for of_task in seeds):
            votes = [[float(row["vote"]) for row in of_task.values() if row["vote"]] for of_task in seeds]
            scores[arm][dose] = fmean(fmean(of_task) for of_task in votes if of_task)
    lines = []
    for arm, of_dose in scores.items():
        best = max(of_dose, key=of_dose.__getitem__)
        lines.append([arm, best, f"{of_dose[best]:.3f}", f"{len(of_dose)} of {len(study.arms[arm].doses) or 1}"])
    return markdown(["arm", "best dose", "vote@10 at the best temperature", "doses done"], lines) if lines else None


def name(arm: Arm) -> str:
    return " ".join(arm).strip()


def mean(rows: dict[int, Row], metric: str) -> str:
    values = [float(row[metric]) for row in rows.values() if row[metric]]
    return f"{fmean(values):.3f}" if values else ""


def difference(found: BySeed, arm: Arm, metric: str) -> str:
    """From the baseline, paired by seed."""
    baseline = found.get((BASELINE, ""), {})
    if arm[0] in (START, BASELINE) or not baseline:
        return ""
    pairs = [(row[metric], baseline[seed][metric]) for seed, row in found[arm].items() if seed in baseline]
    return in_words(metric, [float(ours) - float(theirs) for ours, theirs in pairs if ours and theirs])


def in_words(metric: str, apart: list[float]) -> str:
    """The mean of differences, with Student's t interval from two on."""
    if len(apart) < 2:
        return f"{apart[0]:+.3f}" if apart else ""
    interval = seeds_interval(metric, apart, differences=True)
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


if __name__ == "__main__":
    PAGE.write_text(page(studies()), encoding="utf-8")
