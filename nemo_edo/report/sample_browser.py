"""The samples browser's data, every test problem with the stored responses of every policy's final evaluation, and the
drawings of a run's search trees, ``search/*.json``.

The page unpacks the samples in the reader's browser. Where all responses would make the page too large, it has the
first of each problem; the run's folder has them all.
"""

import base64
import gzip
import itertools
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS, START
from nemo_edo.report.comparison import Comparison
from nemo_edo.report.run_set import RunRecord
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run_folder import RunFolder
from nemo_edo.test_time.search_llm import SearchResult
from nemo_edo.utils.files import read_object

MOST_CHARACTERS = 600_000
"""The most packed data in a page, which is to stay under 2 MB."""
LIKELY_RATIO = 25
"""Text is packed at most about this well: more than this times ``MOST_CHARACTERS`` is not tried."""
_COLUMNS = ("problem_id", "sample_index", "text", "reward", "answer", "finished", "success_at")
GREEDY = KINDS[0]
Response = list
"""[greedy, reward, finished, answer or None, text, right]."""


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
        store = RolloutStore(RunFolder(record.folder).evaluated(arm, kind))
        if not (Path(store.folder) / f"iter_{iteration:05d}").is_dir():
            continue
        try:
            rows = store.read_table(iteration, _COLUMNS).sort_by("sample_index").to_pylist()
        except UserError as error:
            warnings.warn(f"the report shows no responses of {arm}: {error}", stacklevel=2)
            return {}
        for row in rows:
            right = row["finished"] and row["reward"] >= row["success_at"]
            response = [kind == GREEDY, row["reward"], row["finished"], row["answer"], row["text"], right]
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


SHOWN = 6
COLUMN, ROW, MARGIN = 96, 24, 16
"""Pixels from a node to its child, between leaves, and around the tree."""
_STORED = ("parent", "finished", "samples", "reward", "width", "value", "made_at", "expanded_at")


@dataclass(frozen=True)
class SearchTree:
    name: str
    question: str
    nodes: tuple[dict[str, Any], ...]
    """The recorded nodes, each also with its place ``x`` and ``y`` in pixels, and whether it is ``chosen``, on the path
    to the answer."""
    width: int
    height: int

    @property
    def edges(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(parent, child), in the order in which they are drawn: the path to the answer on top."""
        edges = [(self.nodes[node["parent"]], node) for node in self.nodes if node["parent"] is not None]
        return sorted(edges, key=lambda edge: edge[1]["chosen"])

    @property
    def answer(self) -> list[dict[str, Any]]:
        return [node for node in self.nodes if node["chosen"] and node["parent"] is not None]


def tree_record(result: SearchResult) -> dict[str, Any]:
    """The content of ``search/NAME.json``, a question's search."""
    totals = {name: getattr(result, name) for name in ("best", "finished", "iterations", "samples", "tokens")}
    nodes = [
        {"step": node.path.steps[-1] if node.path.steps else "", **{name: getattr(node, name) for name in _STORED}}
        for node in result.nodes
    ]
    return {"question": result.nodes[0].path.question, **totals, "nodes": nodes}


def read_trees(run_folder: Path) -> list[SearchTree]:
    """The run's first ``SHOWN`` trees; none where nothing was searched. Raises UserError naming a malformed file."""
    found = []
    for path in sorted((run_folder / "search").glob("*.json"))[:SHOWN]:
        record = read_object(path, ("question", "best", "nodes"))
        try:
            found.append(_drawn(path.stem, record))
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"{path}: not the record of a search ({error!r})") from error
    return found


def _drawn(name: str, record: dict[str, Any]) -> SearchTree:
    """Gives each node its place: to the right by depth, leaves one below the other, a parent in the middle of its
    children. Parents come before their children."""
    nodes = record["nodes"]
    chosen, place = set(), record["best"]
    while place is not None:
        chosen.add(place)
        place = nodes[place]["parent"]
    children: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes[1:], start=1):
        children[node["parent"]].append(place)
    leaves, places = itertools.count(), {}

    def put(place: int, depth: int) -> float:
        rows = [put(child, depth + 1) for child in children[place]] or [float(next(leaves))]
        row = (rows[0] + rows[-1]) / 2
        places[place] = MARGIN + depth * COLUMN, round(MARGIN + row * ROW)
        return row

    put(0, 0)
    drawn = []
    for place, node in enumerate(nodes):
        x, y = places[place]
        drawn.append({**{key: node[key] for key in ("step", *_STORED)}, "x": x, "y": y, "chosen": place in chosen})
    width, height = (max(ends) for ends in zip(*places.values(), strict=True))
    return SearchTree(name, record["question"], tuple(drawn), width + COLUMN, height + MARGIN)
