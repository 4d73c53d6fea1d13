"""The samples browser's data: every test problem with the stored responses of every policy's final evaluation.

The page unpacks it in the reader's browser. Where all responses would make the page too large, it has the first of each
problem; the run's folder has them all.
"""

from __future__ import annotations

import base64
import gzip
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.evaluation.results import KINDS, START
from nemo_edo.report.comparison import Comparison
from nemo_edo.report.run_record import RunRecord
from nemo_edo.rollouts.store import RolloutStore

MOST_CHARACTERS = 600_000
"""The most packed data in a page, which is to stay under 2 MB."""
LIKELY_RATIO = 25
"""Text is packed at most about this well: more than this times ``MOST_CHARACTERS`` is not tried."""
_COLUMNS = ("problem_id", "sample_index", "text", "reward", "answer", "finished")
GREEDY = KINDS[0]
Response = list
"""[greedy, reward, finished, answer or None, text]."""


@dataclass(frozen=True)
class BrowsedSamples:
    policies: list[str]
    packed: str
    """gzip as base64 of JSON: ``policies``, each with its label and whether it was ``trained``, and ``problems``, each
    with ``id``, ``question``, ``answer`` and the ``responses`` of each policy."""
    problems: int
    """The number of test problems in the page, the first ones."""
    each: int
    """Sampled responses of a policy to a problem in the page, at most."""
    complete: bool


def sample_browser(comparison: Comparison) -> BrowsedSamples | None:
    """The responses of each policy's first seed; None where none are stored. A policy with damaged ones is left out,
    with a warning."""
    runs, first, found = comparison.runs, comparison.runs.records[0], {}
    for name in comparison.labels:
        by_seed = runs.policies[name]
        trained = by_seed[min(by_seed)]
        if responses := _responses(first if name == START else trained.record, trained.name):
            found[name] = responses
    if not found:
        return None
    ids = next(iter(first.evaluations.values())).problems
    problems = [
        {
            **{"id": name, "question": sample["question"], "answer": str(sample["answer"])},
            "responses": [by_problem[name] for by_problem in found.values()],
        }
        for name, sample in zip(ids, first.samples, strict=False)
        if all(name in by_problem for by_problem in found.values())
    ]
    policies = [{"label": comparison.labels[name], "trained": name != START} for name in found]
    most = max((sum(not r[0] for r in one) for problem in problems for one in problem["responses"]), default=0)
    packed, shown, each = _packed(policies, problems, most)
    complete = (shown, each) == (len(ids), most)
    return BrowsedSamples([policy["label"] for policy in policies], packed, shown, each, complete)


def _responses(record: RunRecord, arm: str) -> dict[str, list[Response]]:
    """The responses of the policy's final evaluation by problem, the greedy one first; none where some are lost."""
    iteration = record.arms[arm].iterations if arm in record.arms else 0
    found: dict[str, list[Response]] = {}
    for kind in KINDS:
        store = RolloutStore(record.folder / "evaluations" / arm / kind)
        if not (Path(store.folder) / f"iter_{iteration:05d}").is_dir():
            continue
        if lost := store.lost([iteration]):
            warnings.warn(
                f"{lost[0]} is missing or damaged, so the report shows no responses of {arm}; restore it from a copy, "
                "or evaluate the run again",
                stacklevel=2,
            )
            return {}
        for row in store.read_table(iteration, _COLUMNS).sort_by("sample_index").to_pylist():
            response = [kind == GREEDY, row["reward"], row["finished"], row["answer"], row["text"]]
            found.setdefault(row["problem_id"], []).append(response)
    return found


def _packed(policies: list[dict], problems: list[dict[str, Any]], each: int) -> tuple[str, int, int]:
    """The data with as many responses to each problem as fit, or of as many problems with one, and their numbers."""
    while True:
        shown = []
        for problem in problems:
            kept = [
                [r for r in one if r[0]] + [r for r in one if not r[0]][:each]  # the greedy one, and the first sampled
                for one in problem["responses"]
            ]
            shown.append({**problem, "responses": kept})
        text = json.dumps({"policies": policies, "problems": shown}, ensure_ascii=False, separators=(",", ":"))
        if len(text) <= LIKELY_RATIO * MOST_CHARACTERS:
            packed = base64.b64encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode()
            if len(packed) <= MOST_CHARACTERS or len(problems) == 1:
                return packed, len(problems), each
        if each > 1:
            each //= 2
        else:
            problems = problems[: len(problems) // 2]
