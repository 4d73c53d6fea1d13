"""SearchLLM: tree search over reasoning steps with an explicit value and a memory (the paper's appendix, Algorithm 2).

f(n) = r(n) + lambda * width(n): r is the process reward model's, and the width is how uncertain a reward would be at
n's embedding, given the embeddings of the nodes expanded so far (``gaussian_process``). In iteration t = 1..T the top
s nodes of the frontier by f (t = 1: the question itself) are expanded by k sampled next steps each, and the top s of
the children join the frontier; the search ends early when those s are all finished.

What the paper leaves open, and we chose:
- A node that was expanded leaves the frontier. So the frontier never holds more than the s nodes that joined it last,
  the top s of it are all of it, and the search is a beam search by f whose beam narrows as solutions finish.
- Parents are observed before their children are valued; the question is a node too, scored and observed like any other.
- A step sampled twice under one parent is one node: its score would be the same.
- A finished child is never expanded. Every finished node of the tree, in the top s or not, may be the answer.
- The answer is the finished node with the highest reward; without one, the leaf with the highest. The reward model's
  reward decides: the bonus for uncertainty says where to look, not what is right.
- Ties go to the node that was made first. Memory is for one question.

Questions advance in lockstep: after one call of the scorer for the questions themselves, an iteration is one call of
the proposer and one of the scorer for all that are not done.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_edo.config import SearchConfig
from nemo_edo.test_time.gaussian_process import PosteriorVariance


@dataclass(frozen=True)
class StepPath:
    """A partial solution: the question, and the texts of the steps so far (none: the question itself)."""

    question: str
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A sampled next step."""

    text: str
    """Empty only where the solution ends without another word."""
    finished: bool
    tokens: int | None = None
    """Sampled for it, where known: the search adds them up."""


@dataclass(frozen=True, eq=False)
class StepScore:
    """The process reward model's view of a path's newest step."""

    reward: float
    embedding: Tensor
    """[D], any float dtype."""


class StepProposer(Protocol):
    """Samples next steps from the policy."""

    def propose(self, paths: Sequence[StepPath], count: int, seeds: Sequence[int]) -> list[list[Step]]:
        """``count`` next steps for each path, in the order of the paths. Only ``seeds[i]`` (63 bits) determines the
        random numbers of ``paths[i]``, whatever shares the call."""


class StepScorer(Protocol):
    """A process reward model with an embedding."""

    def score(self, paths: Sequence[StepPath]) -> list[StepScore]:
        """One score for each path, in order, whatever shares the call; all embeddings have the same length D. A path
        without steps asks for the question's own: its embedding is the first observation, its reward only a target of
        ``mean="linear"``."""


@dataclass(frozen=True)
class SearchNode:
    parent: int | None
    """Index of the parent among the nodes; None for the question, which is node 0."""
    path: StepPath
    """The steps from the question to this node's own, the last."""
    finished: bool
    samples: int
    """How many of the parent's k samples were this step; 0 for the question."""
    reward: float
    width: float
    """The width of ``width_kind`` when the node was made."""
    value: float
    """f when the node was made."""
    made_at: int
    """Iteration, 1 to T; 0 for the question."""
    expanded_at: int | None = None
    """Iteration; None for a leaf."""


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search, its tree and what it cost."""

    path: StepPath
    """The answer."""
    finished: bool
    """False where no node finished within T iterations: the answer is only the best leaf."""
    best: int
    """The answer's index among the nodes."""
    nodes: tuple[SearchNode, ...]
    iterations: int
    samples: int
    """Steps sampled: at most k (1 + s (T - 1))."""
    tokens: int | None


class SearchLLM:
    """Runs the search with a proposer (the policy) and a scorer (the process reward model)."""

    def __init__(self, proposer: StepProposer, scorer: StepScorer, config: SearchConfig) -> None:
        self.proposer = proposer
        self.scorer = scorer
        self.config = config

    def search(self, questions: Sequence[str], seed: int) -> list[SearchResult]:
        """One result for each question, in order; it depends on the question's text and the seed, not on the others.
        Memory: 8 D^2 bytes for each unfinished question, so pass many questions in chunks where D is large. Raises
        ValueError, saying what was returned, for a proposer or scorer that does not keep to its contract."""
        if isinstance(questions, str):
            raise ValueError(f"questions is the string {questions!r}, expected a sequence of strings")
        if len(questions) == 0:
            return []
        scores = self._score([StepPath(question) for question in questions])
        trees = [_Tree(*one, self.config, seed) for one in zip(questions, scores, strict=True)]
        for _ in range(self.config.steps):
            live = [tree for tree in trees if not tree.stopped]
            if not live:
                break
            expanded = [(tree, node) for tree in live for node in tree.select()]
            paths = [tree.nodes[node].path for tree, node in expanded]
            seeds = [tree.seed(node) for tree, node in expanded]
            proposals = self.proposer.propose(paths, self.config.branches, seeds)
            if len(proposals) != len(paths):
                raise ValueError(f"the proposer returned {len(proposals)} lists of steps for {len(paths)} paths")
            for (tree, node), steps in zip(expanded, proposals, strict=True):
                if len(steps) != self.config.branches or not all(one.finished or one.text.strip() for one in steps):
                    raise ValueError(
                        f"the proposer returned {steps} for {tree.nodes[node].path}, expected {self.config.branches} "
                        "steps, of which only one that finishes may be empty"
                    )
                tree.propose(node, steps)
            found = iter(self._score([child.path for tree in live for child in tree.proposed]))
            for tree in live:
                tree.grow([next(found) for _ in tree.proposed])
        return [tree.result() for tree in trees]

    def _score(self, paths: Sequence[StepPath]) -> list[StepScore]:
        scores = self.scorer.score(paths)
        if len(scores) != len(paths):
            raise ValueError(f"the scorer returned {len(scores)} scores for {len(paths)} paths")
        dim = scores[0].embedding.shape[-1:]
        for path, score in zip(paths, scores, strict=True):
            if not math.isfinite(score.reward):
                raise ValueError(f"the scorer returned a reward of {score.reward} for {path}")
            shape = score.embedding.shape
            if len(shape) != 1 or shape != dim or not torch.isfinite(score.embedding).all():
                raise ValueError(
                    f"the scorer returned an embedding of shape {tuple(shape)} for {path}, expected [D] with the same "
                    "D for all, and only finite numbers"
                )
        return scores


class _Child(NamedTuple):
    parent: int | None
    path: StepPath
    finished: bool
    samples: int


class _Tree:
    """One question's search: its nodes, its frontier and its memory."""

    def __init__(self, question: str, score: StepScore, config: SearchConfig, seed: int) -> None:
        self.nodes: list[SearchNode] = []
        self.proposed = [_Child(None, StepPath(question), False, 0)]
        self.stopped = False
        self._config = config
        self._seed = seed
        self._iteration = 0
        self._embeddings: list[Tensor] = []
        self._tokens: list[int | None] = []
        self._memory = PosteriorVariance(
            len(score.embedding), config.prior_precision, config.noise_variance, device=score.embedding.device
        )
        self.grow([score])

    def seed(self, node: int) -> int:
        """Seed of the node's random numbers: from the search's seed, the question and the node's place in its tree."""
        parts = (self._seed, self.nodes[0].path.question, node)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1

    def select(self) -> list[int]:
        """Begins an iteration. Returns the frontier's nodes, which are observed."""
        self._iteration += 1
        for node in self._frontier:
            target = self.nodes[node].reward if self._config.mean == "linear" else None
            self._memory.observe(self._embeddings[node], target)
            self.nodes[node] = replace(self.nodes[node], expanded_at=self._iteration)
        return self._frontier

    def propose(self, parent: int, steps: Sequence[Step]) -> None:
        """Adds the distinct steps after a node, in order of first appearance, to those that need a score."""
        self._tokens += [step.tokens for step in steps]
        path = self.nodes[parent].path
        for (text, finished), samples in Counter((step.text, step.finished) for step in steps).items():
            self.proposed.append(_Child(parent, replace(path, steps=(*path.steps, text)), finished, samples))

    def result(self) -> SearchResult:
        finished = {index: node.reward for index, node in enumerate(self.nodes) if node.finished}
        leaves = {index: node.reward for index, node in enumerate(self.nodes) if node.expanded_at is None}
        (best,) = _top(finished or leaves, 1)
        tokens = [number for number in self._tokens if number is not None]
        return SearchResult(
            path=self.nodes[best].path,
            finished=self.nodes[best].finished,
            best=best,
            nodes=tuple(self.nodes),
            iterations=self._iteration,
            samples=len(self._tokens),
            tokens=sum(tokens) if len(tokens) == len(self._tokens) else None,
        )

    def grow(self, scores: Sequence[StepScore]) -> None:
        """Makes nodes of what is proposed, valued with the memory. The unfinished of the top s are the frontier."""
        embeddings = [score.embedding.detach() for score in scores]
        rewards = [float(score.reward) for score in scores]
        # Equal embeddings are valued once: batched rows can differ in their last bit, and that would break a tie.
        phi_ND, row_of_child = torch.unique(torch.stack(embeddings).double(), dim=0, return_inverse=True)
        if self._config.width_kind == "sd":
            width_N = self._memory.variance(phi_ND).sqrt()
        else:
            width_N = self._memory.variance(phi_ND, include_noise=False)
        widths = width_N[row_of_child].tolist()
        linear = self._config.mean == "linear"
        means = self._memory.mean(phi_ND)[row_of_child].tolist() if linear else rewards
        start = len(self.nodes)
        for child, reward, width, mean in zip(self.proposed, rewards, widths, means, strict=True):
            value = mean + self._config.exploration * width
            self.nodes.append(SearchNode(*child, reward, width, value, self._iteration))
        self._embeddings += embeddings
        top = _top({node: self.nodes[node].value for node in range(start, len(self.nodes))}, self._config.width)
        self._frontier = [node for node in top if not self.nodes[node].finished]
        self.stopped = not self._frontier
        self.proposed = []


def _top(values: dict[int, float], count: int) -> list[int]:
    """The nodes of the largest values, largest first; among equals the one made first."""
    return sorted(values, key=lambda node: (-values[node], node))[:count]
