"""Drawings of a run's search trees: ``search/*.json``, one file for each question, as ``tree_record`` makes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.test_time.search_llm import SearchResult

SHOWN = 6
"""Trees on a page, the first by their files' names."""
COLUMN, ROW, MARGIN = 96, 24, 16
"""Pixels from a node to its child, between leaves, and around the tree."""
_NUMBERS = ("reward", "width", "value")


@dataclass(frozen=True)
class TreeNode:
    parent: int | None
    step: str
    """The text of its step; empty for the question."""
    finished: bool
    reward: float
    width: float
    value: float
    made_at: int
    expanded_at: int | None
    x: int
    """Pixels."""
    y: int
    chosen: bool
    """Whether it is on the path to the answer."""

    @property
    def about(self) -> str:
        """The node in words."""
        expanded = "not expanded" if self.expanded_at is None else f"expanded in iteration {self.expanded_at}"
        numbers = f"reward {self.reward:.3f}, width {self.width:.3f}, f {self.value:.3f}"
        ended = ", finished" if self.finished else ""
        return f"{self.step or 'the question'} ({numbers}; made in iteration {self.made_at}, {expanded}{ended})"


@dataclass(frozen=True)
class SearchTree:
    name: str
    question: str
    nodes: tuple[TreeNode, ...]
    width: int
    """Pixels of the drawing."""
    height: int

    @property
    def edges(self) -> list[tuple[TreeNode, TreeNode]]:
        """(parent, child), in the order in which they are drawn: the path to the answer on top."""
        edges = [(self.nodes[node.parent], node) for node in self.nodes if node.parent is not None]
        return sorted(edges, key=lambda edge: edge[1].chosen)

    @property
    def answer(self) -> list[TreeNode]:
        """The steps to the answer, in order."""
        return [node for node in self.nodes if node.chosen and node.parent is not None]


def tree_record(result: SearchResult) -> dict[str, Any]:
    """The content of ``search/NAME.json``, a question's search."""
    return {
        "question": result.nodes[0].path.question,
        "best": result.best,
        "finished": result.finished,
        "iterations": result.iterations,
        "samples": result.samples,
        "tokens": result.tokens,
        "nodes": [
            {
                "parent": node.parent,
                "step": node.path.steps[-1] if node.path.steps else "",
                "finished": node.finished,
                "samples": node.samples,
                "reward": node.reward,
                "width": node.width,
                "value": node.value,
                "made_at": node.made_at,
                "expanded_at": node.expanded_at,
            }
            for node in result.nodes
        ],
    }


def read_trees(run_folder: Path) -> list[SearchTree]:
    """The run's first ``SHOWN`` trees; none where nothing was searched. Raises UserError naming a malformed file."""
    return [_read(path) for path in sorted((run_folder / "search").glob("*.json"))[:SHOWN]]


def _read(path: Path) -> SearchTree:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        question, best, nodes = record["question"], record["best"], record["nodes"]
        for place, node in enumerate(nodes):
            _check(node, place)
        if not isinstance(question, str) or not 0 <= best < len(nodes):
            raise ValueError(
                f"best is {best!r}, expected the place of one of {len(nodes)} nodes, and a question's text"
            )
        return laid_out(path.stem, question, best, nodes)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the record of a search ({error})") from error


def _check(node: dict[str, Any], place: int) -> None:
    """Raises ValueError where a node is malformed, or comes before its parent."""
    parent = node["parent"]
    is_root = parent is None
    if is_root != (place == 0) or not (is_root or (isinstance(parent, int) and 0 <= parent < place)):
        raise ValueError(f"node {place} has the parent {parent!r}, expected one before it, and none for node 0")
    for name in _NUMBERS:
        if isinstance(node[name], bool) or not isinstance(node[name], int | float):
            raise ValueError(f"node {place}: {name} is {node[name]!r}, expected a number")
    if not isinstance(node["step"], str):
        raise ValueError(f"node {place}: step is {node['step']!r}, expected a text")


def laid_out(name: str, question: str, best: int, nodes: Sequence[dict[str, Any]]) -> SearchTree:
    """The tree with a place for each node: to the right by depth, leaves one below the other, a parent in the middle
    of its children."""
    children: list[list[int]] = [[] for _ in nodes]
    depth = [0] * len(nodes)
    for place, node in enumerate(nodes):
        if node["parent"] is not None:
            children[node["parent"]].append(place)
            depth[place] = depth[node["parent"]] + 1
    row = _rows(children)
    chosen, place = set(), best
    while place is not None:
        chosen.add(place)
        place = nodes[place]["parent"]
    drawn = tuple(
        TreeNode(
            node["parent"],
            node["step"],
            bool(node["finished"]),
            *(float(node[key]) for key in _NUMBERS),
            node["made_at"],
            node["expanded_at"],
            round(MARGIN + depth[place] * COLUMN),
            round(MARGIN + row[place] * ROW),
            place in chosen,
        )
        for place, node in enumerate(nodes)
    )
    right, bottom = max(node.x for node in drawn), max(node.y for node in drawn)
    return SearchTree(name, question, drawn, right + COLUMN, bottom + MARGIN)


def _rows(children: Sequence[Sequence[int]]) -> list[float]:
    """Each node's row: a leaf's is the next one free, a parent's the mean of its first and its last child's."""
    rows, free = [0.0] * len(children), 0
    waiting: list[tuple[int, bool]] = [(0, False)]
    while waiting:  # children before their parents, in their order
        place, visited = waiting.pop()
        if not children[place]:
            rows[place], free = float(free), free + 1
        elif visited:
            rows[place] = (rows[children[place][0]] + rows[children[place][-1]]) / 2
        else:
            waiting.append((place, True))
            waiting.extend((child, False) for child in reversed(children[place]))
    return rows
