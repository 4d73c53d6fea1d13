"""Drawings of a run's search trees: ``search/*.json``, one file for each question, as ``tree_record`` makes it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.test_time.search_llm import SearchResult
from nemo_edo.utils.files import read_object

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
