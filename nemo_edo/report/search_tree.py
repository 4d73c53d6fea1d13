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
_STORED = ("parent", "finished", "samples", *_NUMBERS, "made_at", "expanded_at")


@dataclass
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
    x: int = 0
    """Pixels."""
    y: int = 0
    chosen: bool = False
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

    @property
    def width(self) -> int:
        """Pixels of the drawing."""
        return max(node.x for node in self.nodes) + COLUMN

    @property
    def height(self) -> int:
        return max(node.y for node in self.nodes) + MARGIN

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
    totals = {name: getattr(result, name) for name in ("best", "finished", "iterations", "samples", "tokens")}
    nodes = [
        {"step": node.path.steps[-1] if node.path.steps else "", **{name: getattr(node, name) for name in _STORED}}
        for node in result.nodes
    ]
    return {"question": result.nodes[0].path.question, **totals, "nodes": nodes}


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
        fields = [name for name in (*_STORED, "step") if name != "samples"]
        tree = SearchTree(path.stem, question, tuple(TreeNode(**{name: n[name] for name in fields}) for n in nodes))
        _lay_out(tree.nodes, best)
        return tree
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the record of a search ({error})") from error


def _check(node: dict[str, Any], place: int) -> None:
    """Raises ValueError where a node is malformed, or comes before its parent."""
    parent = node["parent"]
    if (parent is None) != (place == 0) or not (parent is None or (isinstance(parent, int) and 0 <= parent < place)):
        raise ValueError(f"node {place} has the parent {parent!r}, expected one before it, and none for node 0")
    for name in _NUMBERS:
        if isinstance(node[name], bool) or not isinstance(node[name], int | float):
            raise ValueError(f"node {place}: {name} is {node[name]!r}, expected a number")
    if not isinstance(node["step"], str):
        raise ValueError(f"node {place}: step is {node['step']!r}, expected a text")


def _lay_out(nodes: Sequence[TreeNode], best: int) -> None:
    """Gives each node its place: to the right by depth, leaves one below the other, a parent in the middle of its
    children. Parents come before their children."""
    place: int | None = best
    while place is not None:
        nodes[place].chosen = True
        place = nodes[place].parent
    children: list[list[int]] = [[] for _ in nodes]
    leaves = [0] * len(nodes)
    for place in reversed(range(len(nodes))):
        leaves[place] = leaves[place] or 1
        if (parent := nodes[place].parent) is not None:
            leaves[parent] += leaves[place]
            children[parent].insert(0, place)
    rows, depths = [0.0] * len(nodes), [0] * len(nodes)  # rows: first that of a node's first leaf
    for place, own in enumerate(children):
        row = rows[place]
        for child in own:
            rows[child], depths[child] = row, depths[place] + 1
            row += leaves[child]
    for place in reversed(range(len(nodes))):
        if children[place]:
            rows[place] = (rows[children[place][0]] + rows[children[place][-1]]) / 2
        nodes[place].x, nodes[place].y = round(MARGIN + depths[place] * COLUMN), round(MARGIN + rows[place] * ROW)
