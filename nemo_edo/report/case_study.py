"""One test problem: every policy's stored responses side by side, grouped by their answers.

The problem is the one, of those whose questions the run keeps (``samples.json``), on which the policies' sampled
accuracies differ most. It shows how they differ, not how often.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from nemo_edo.report.run_record import RunRecord
from nemo_edo.rollouts.store import RolloutStore

SHOWN = 3
"""Responses of a group that the page shows."""
_COLUMNS = ("problem_id", "sample_index", "text", "reward", "answer")


@dataclass(frozen=True)
class Solution:
    sample: int
    shared: str
    """The longest beginning that another response of the same policy has as well, up to the end of a word."""
    own: str
    """The rest."""


@dataclass(frozen=True)
class Group:
    """A policy's responses with one answer."""

    answer: str | None
    """None: no answer was found in them."""
    reward: float
    size: int
    solutions: tuple[Solution, ...]
    """The first ``SHOWN`` of them."""


@dataclass(frozen=True)
class CaseStudy:
    question: str
    answer: str
    policies: dict[str, tuple[Group, ...]]
    """Groups by arm, the largest first."""

    def size(self, arm: str) -> int:
        """Responses of the policy."""
        return sum(group.size for group in self.policies[arm])

    def right(self, arm: str) -> int:
        """Responses of the policy with the full reward."""
        return sum(group.size for group in self.policies[arm] if group.reward >= 1)


def case_study(record: RunRecord) -> CaseStudy | None:
    """None where the run keeps no question, or no policy's sampled responses. Raises UserError for damaged files."""
    stores = {arm: RolloutStore(record.folder / "evaluations" / arm / "sampled") for arm in record.evaluations}
    last = {arm: record.arms[arm].iterations if arm in record.arms else 0 for arm in stores}
    stores = {arm: store for arm, store in stores.items() if (store.folder / f"iter_{last[arm]:05d}").is_dir()}
    if not stores or not record.samples:
        return None
    place = most_telling(record)
    sample = record.samples[place]
    problem = next(iter(record.evaluations.values())).problems[place]
    policies = {}
    for arm, store in stores.items():
        table = store.read_table(last[arm], _COLUMNS)
        rows = table.filter(pc.equal(table["problem_id"], problem)).sort_by("sample_index").to_pylist()
        policies[arm] = grouped(rows)
    return CaseStudy(sample["question"], str(sample["answer"]), policies)


def most_telling(record: RunRecord) -> int:
    """The place of the problem, among those with a question, on which sampled accuracies differ most; ties: the
    first."""
    ratios = [found.metrics["accuracy"] for found in record.evaluations.values() if found.has("accuracy")]
    known = len(record.samples)
    if len(ratios) < 2:
        return 0
    accuracies = np.array([sums_P[:known] / np.maximum(counts_P[:known], 1) for sums_P, counts_P in ratios])
    return int(np.argmax(accuracies.max(axis=0) - accuracies.min(axis=0)))


def grouped(rows: Sequence[dict]) -> tuple[Group, ...]:
    """Responses (``text``, ``reward``, ``answer``, ``sample_index``) by answer and reward, the largest group first."""
    shared = shared_beginnings([row["text"] for row in rows])
    groups: dict[tuple[str | None, float], list[Solution]] = {}
    for row, length in zip(rows, shared, strict=True):
        solution = Solution(row["sample_index"], row["text"][:length], row["text"][length:])
        groups.setdefault((row["answer"], row["reward"]), []).append(solution)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return tuple(Group(answer, reward, len(found), tuple(found[:SHOWN])) for (answer, reward), found in ordered)


def shared_beginnings(texts: Sequence[str]) -> list[int]:
    """The length of each text's longest beginning that another one has too, up to the end of a word."""
    order = sorted(range(len(texts)), key=lambda place: texts[place])
    lengths = [0] * len(texts)
    for one, other in zip(order, order[1:], strict=False):  # the text most alike is next to it in the sorted order
        common = len(os.path.commonprefix([texts[one], texts[other]]))
        for place in (one, other):
            lengths[place] = max(lengths[place], _whole_words(texts[one], texts[other], texts[place], common))
    return lengths


def _whole_words(one: str, other: str, text: str, common: int) -> int:
    """``common`` characters, less a word that one of the texts continues."""
    is_cut = any(common < len(t) and not t[common].isspace() for t in (one, other))
    if not is_cut:
        return common
    return max((place + 1 for place, sign in enumerate(text[:common]) if sign.isspace()), default=0)
