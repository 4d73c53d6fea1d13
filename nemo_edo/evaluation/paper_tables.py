"""The paper's tables, and which run of which config of ``conf/experiment/`` stands for each of their rows.

``paper_tables.csv`` has the numbers as they are printed. Where the paper has two values for one cell, both stand there,
each under its table's name.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_edo.evaluation.comparison import START
from nemo_edo.evaluation.test_time_record import SEARCH_ACCURACY

FILE = Path(__file__).with_name("paper_tables.csv")
TABLES = {
    "main": "Main results, in distribution",
    "ood": "Out-of-distribution results",
    "seeds": "Robustness to the seed",
    "alpha": "Sensitivity to alpha",
    "test_time": "Test-time scaling strategies",
    "iterations": "Accuracy over iterations",
}
ALPHAS = ("1e-4", "1e-3", "1e-2", "1e-1")
OVERALL = "Overall"
OUT_OF_DISTRIBUTION = ("AIME24", "AIME25", "MATH500", "Minerva Math", "OlympiadBench")
"""What ``Overall`` is the plain mean of."""
_BENCHMARKS = {
    "gsm8k": "GSM8K",
    "math": "MATH",
    "s1k_eval": "s1K_eval",
    **dict(zip(("aime24", "aime25", "math500", "minerva", "olympiadbench"), OUT_OF_DISTRIBUTION, strict=True)),
}


@dataclass(frozen=True)
class Column:
    """A measured quantity with the aggregator that makes one answer of many."""

    title: str
    metrics: tuple[str, ...]
    """Where it stands in an evaluation; the first that is there."""
    percent: bool = True
    iteration: int | None = None
    """That it is evaluated after, during training; None: at the end."""


GREEDY = Column("greedy", ("greedy_accuracy",))
VOTE = Column("vote@10", ("vote@10", "majority@10"))
DISTINCT = Column("Distinct-4", ("distinct_4",), percent=False)
BEST_BY_QWEN = Column("best-of-10 by qwen", ("best_of@10/qwen",))
BEST_BY_SKYWORK = Column("best-of-10 by skywork", ("best_of@10/skywork",))
SEARCH = Column("SearchLLM", (SEARCH_ACCURACY,))
COLUMNS = {
    "main": (GREEDY, VOTE),
    "ood": (GREEDY, VOTE),
    "seeds": (VOTE, DISTINCT),
    "alpha": (VOTE, DISTINCT),
    "test_time": (GREEDY, VOTE, BEST_BY_QWEN, BEST_BY_SKYWORK, SEARCH),
}
_OF_STRATEGY = {
    "greedy": GREEDY,
    "sc": VOTE,
    "bon10": VOTE,  # as the seeds' and alphas' tables call it; their values agree with the vote's (docs/experiments.md)
    "bon_qwen": BEST_BY_QWEN,
    "bon_skywork": BEST_BY_SKYWORK,
    "search": SEARCH,
}
_SAME_METHOD = {
    "ed-grpo alpha=0": "grpo",
    "ed-grpo alpha=1e-3": "ed-grpo",
    "ed-idpo alpha=0": "eto",
    "ed-idpo alpha=1e-3": "ed-idpo",
    "searchllm": "cot",
}
"""Rows of one policy under two names. SearchLLM searches with the policy of the row CoT."""


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper."""

    table: str
    backbone: str
    trained_on: str
    evaluated_on: str
    method: str
    column: Column
    value: float
    """In percent, but for Distinct-4."""
    spread: float | None
    """Standard deviation over seeds, where the value is their mean."""

    @property
    def quantity(self) -> tuple[str, str, str, str, Column]:
        """What is measured, whatever table it stands in."""
        return self.backbone, self.trained_on, self.evaluated_on, canonical(self.method), self.column


@dataclass(frozen=True)
class Experiment:
    """A config of ``conf/experiment/``: what its arms are in the paper's tables."""

    tables: tuple[str, ...]
    backbone: str
    trained_on: str
    methods: Mapping[str, str]
    """Arm -> the paper's name of the method. The start of an experiment is CoT."""
    elsewhere: bool = False
    """Evaluated where it was not trained: the config evaluates ``model.path`` and trains nothing."""
    lora_rank: int = 0
    lr: float | None = None
    """Learning rate, where the paper gives it."""
    batch: int | None = None
    warmed_up: bool = False
    """Whether the config begins with a supervised epoch."""


def canonical(method: str) -> str:
    """One name for each policy."""
    return _SAME_METHOD.get(method, method)


@functools.cache
def paper_values() -> tuple[PaperValue, ...]:
    """All numbers of the paper's tables, in their order."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(
            PaperValue(
                row["table"],
                row["backbone"],
                row["trained_on"],
                row["evaluated_on"],
                row["method"],
                DISTINCT if row["metric"] == "distinct_4" else _OF_STRATEGY[row["strategy"]],
                float(row["value"]),
                float(row["spread"]) if row["spread"] else None,
            )
            for row in csv.DictReader(file)
        )


def evaluated_on(benchmark: str | None, trained_on: str) -> str | None:
    """The paper's name of a benchmark; None where the paper does not use it. Trained on MATH, the 500 problems of
    MATH500 are what the paper's accuracies are multiples of a 500th of."""
    name = _BENCHMARKS.get(benchmark)
    return "MATH" if (trained_on, name) == ("MATH", "MATH500") else name


_GRPO = {"grpo": "grpo", "ed_grpo": "ed-grpo"}
_POLICY_GRADIENT = {START: "cot", **_GRPO, "dapo": "dapo"}
_IDPO = {"eto": "eto", "ed_idpo": "ed-idpo"}
LLAMA3, LLAMA31_SFT = "Llama-3-8B-Instruct", "Llama-3.1-8B-Instruct-SFT"
QWEN, QWEN_SFT = "Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct-SFT"


def _experiments() -> dict[str, Experiment]:
    found: dict[str, Experiment] = {}
    for key, backbone, trained_on, batch in (
        ("gsm8k_llama3", LLAMA3, "GSM8K", 256),
        ("math_qwen", QWEN, "MATH", 128),
    ):
        tables = ("main", "test_time", "iterations")
        policy_gradient = Experiment(tables, backbone, trained_on, _POLICY_GRADIENT, batch=512)
        idpo = Experiment(tables, backbone, trained_on, _IDPO, lora_rank=8, lr=5e-7, batch=batch)
        found |= {f"main/{key}_grpo": policy_gradient, f"main/{key}_idpo": idpo}
        found[f"seeds/{key}_grpo"] = Experiment(("seeds",), backbone, trained_on, _GRPO, batch=512)
        found[f"seeds/{key}_idpo"] = Experiment(
            ("seeds",), backbone, trained_on, _IDPO, lora_rank=8, lr=5e-7, batch=batch
        )
    alphas = {f"alpha_{alpha}": alpha for alpha in ALPHAS}
    for arm, method, name, settings in (
        ("grpo", "ed-grpo", "grpo", {"batch": 512}),
        ("eto", "ed-idpo", "idpo", {"lora_rank": 8, "lr": 5e-7, "batch": 128}),
    ):
        methods = {arm: f"{method} alpha=0", **{key: f"{method} alpha={alpha}" for key, alpha in alphas.items()}}
        found[f"alpha/math_qwen_{name}"] = Experiment(("alpha",), QWEN, "MATH", methods, **settings)
    for key, backbone in (("s1k_qwen", QWEN_SFT), ("s1k_llama", LLAMA31_SFT)):
        tables = ("main", "test_time")
        found[f"main/{key}_grpo"] = Experiment(tables, backbone, "s1K", _POLICY_GRADIENT, batch=32, warmed_up=True)
        found[f"main/{key}_idpo"] = Experiment(tables, backbone, "s1K", _IDPO, lora_rank=8, lr=5e-7, batch=4)
        for method in ("cot", "eto", "grpo", "dapo", "ed-idpo", "ed-grpo"):
            found[f"ood/{key}_{method.replace('-', '_')}"] = Experiment(
                ("ood", "test_time"), backbone, "s1K", {START: method}, elsewhere=True
            )
    return found


EXPERIMENTS = _experiments()


@dataclass(frozen=True)
class Row:
    """A row of a table: a method on a backbone, trained and evaluated somewhere."""

    backbone: str
    trained_on: str
    evaluated_on: str
    method: str
    values: dict[Column, list[PaperValue]] = field(default_factory=dict, compare=False)


def rows_of(table: str) -> list[Row]:
    """The rows of one of the paper's tables, in its order, with its values by column. Accuracy over iterations is a
    figure without numbers: its rows are those that it draws."""
    if table == "iterations":
        runs = [(experiment, method) for experiment in EXPERIMENTS.values() for method in experiment.methods.values()]
        return [
            Row(experiment.backbone, experiment.trained_on, experiment.trained_on, method)
            for experiment, method in runs
            if table in experiment.tables and method not in ("cot", "dapo")
        ]
    rows: dict[tuple[str, str, str, str], Row] = {}
    for value in paper_values():
        if value.table == table:
            key = value.backbone, value.trained_on, value.evaluated_on, value.method
            rows.setdefault(key, Row(*key)).values.setdefault(value.column, []).append(value)
    return list(rows.values())


def runs_for(table: str, row: Row) -> list[tuple[str, str]]:
    """(experiment, arm) of each run that measures the row; of ``Overall``, of the runs that it is the mean of."""
    elsewhere = row.evaluated_on in (OVERALL, *OUT_OF_DISTRIBUTION)
    return [
        (name, arm)
        for name, experiment in EXPERIMENTS.items()
        for arm, method in experiment.methods.items()
        if table in experiment.tables
        and (experiment.backbone, experiment.trained_on) == (row.backbone, row.trained_on)
        and experiment.elsewhere == elsewhere
        and method == ("cot" if row.method == "searchllm" else row.method)
    ]
