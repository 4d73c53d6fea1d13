import hashlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import SearchConfig, SearchLLM, Step, StepPath, StepScore

few = settings(max_examples=20, deadline=None, derandomize=True)


def digest(*parts):
    """An integer that depends on the parts alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


class RandomProposer:
    """Samples a few step texts, so that siblings repeat, by the path's seed; counts its calls."""

    def __init__(self, end_one_in=4):
        self.calls, self.end_one_in = [], end_one_in

    def propose(self, paths, count, seeds):
        self.calls.append(list(zip(paths, seeds, strict=True)))
        return [[self.step(path, seed, i) for i in range(count)] for path, seed in zip(paths, seeds, strict=True)]

    def step(self, path, seed, i):
        number = digest(seed, i) % 6
        return Step(f"step {number}", digest(path, number) % self.end_one_in == 0, tokens=1 + number)


class RandomScorer:
    """A reward and an embedding [4] for every path, by its text."""

    def __init__(self):
        self.calls = []

    def score(self, paths):
        self.calls.append(list(paths))
        return [StepScore(reward(p), torch.tensor([digest(p, i) % 7 - 3.0 for i in range(4)])) for p in paths]


def reward(path):
    return digest(path) % 1000 / 1000


class Script:
    """A known tree: {path of letters: (reward, embedding)}; a letter in upper case ends the solution."""

    def __init__(self, tree):
        self.tree = tree

    def propose(self, paths, count, seeds):
        return [[Step(path[-1], path[-1].isupper()) for path in self.tree if path and path[:-1] == parent]
                for parent in ("".join(path.steps) for path in paths)]

    def score(self, paths):
        return [StepScore(r, torch.tensor(phi)) for r, phi in (self.tree["".join(path.steps)] for path in paths)]


def run(tree, **settings):
    script = Script(tree)
    (result,) = SearchLLM(script, script, SearchConfig(**settings)).search(["?"], 0)
    return result


def expanded(result):
    """Paths in the order of their expansion."""
    nodes = sorted((n for n in result.nodes if n.expanded_at is not None), key=lambda n: (n.expanded_at, n.made_at))
    return ["".join(node.path.steps) for node in nodes]


def best_first(question, seeds, config):
    """Beam search by reward over RandomProposer's tree, with lists of steps and nothing else."""
    proposer, beam, everything, opened = RandomProposer(), [()], {}, set()

    def score(steps):
        return reward(StepPath(question, steps))

    for _ in range(config.steps):
        made = {}
        for steps in beam:
            path = StepPath(question, steps)
            for step in (proposer.step(path, seeds[path], i) for i in range(config.branches)):
                made[(*steps, step.text)] = step.finished
        opened.update(beam)
        everything |= made
        beam = [steps for steps in sorted(made, key=score, reverse=True)[: config.width] if not made[steps]]
    finished = [steps for steps in everything if everything[steps]]
    return max(finished or [steps for steps in everything if steps not in opened], key=score), opened


@few
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 6), branches=st.integers(1, 4), width=st.integers(1, 3))
def test_without_exploration_it_is_best_first_search(seed, steps, branches, width):
    config = SearchConfig(steps, branches, width, exploration=0.0)
    proposer = RandomProposer()
    (result,) = SearchLLM(proposer, RandomScorer(), config).search(["q"], seed)
    seeds = {path: node_seed for call in proposer.calls for path, node_seed in call}
    best, opened = best_first("q", seeds, config)
    assert result.path.steps == best
    assert {node.path.steps for node in result.nodes if node.expanded_at is not None} == opened


# N is in a direction that nobody has looked into, so that f puts it first; O's reward is higher.
BONUS = {"": (0.0, [1.0, 0.0]), "O": (0.6, [1.0, 0.0]), "N": (0.5, [0.0, 1.0])}
UNLIKE = {"": (0.0, [1.0, 0.0]), "a": (0.6, [1.0, 0.0]), "b": (0.5, [0.0, 1.0]),
          **dict.fromkeys(("ac", "ad", "be", "bf"), (0.1, [0.0, 0.0]))}


@pytest.mark.parametrize(("tree", "steps", "exploration", "order", "chosen"), [
    (BONUS, 1, 10.0, [""], "O"),  # the reward and not the bonus decides the answer
    (UNLIKE, 2, 0.0, ["", "a"], "b"), (UNLIKE, 2, 1.0, ["", "b"], "a"),
])
def test_exploration_turns_the_search_to_new_embeddings_and_not_the_answer(tree, steps, exploration, order, chosen):
    result = run(tree, steps=steps, branches=2, width=1, exploration=exploration)
    assert (expanded(result), result.path.steps) == (order, (chosen,))
    if tree is BONUS:
        assert result.nodes[2].value > result.nodes[1].value


def test_the_linear_mean_replaces_the_reward_in_the_value_only():
    # Prior 1, noise 1: after reward 1 at [1, 0] the model's mean is 1/2 there and 0 across, whatever the reward model
    # says of the children; the answer is still the reward model's.
    tree = {"": (1.0, [1.0, 0.0]), "a": (-1.0, [1.0, 0.0]), "b": (0.75, [0.0, 1.0]), "ac": (-2.0, [1.0, 0.0]),
            "ad": (-2.0, [0.0, 1.0])}
    result = run(tree, steps=2, branches=2, width=1, exploration=0.0, mean="linear")
    assert [node.value for node in result.nodes[1:3]] == pytest.approx([0.5, 0.0])
    assert expanded(result) == ["", "a"]
    assert [node.value for node in result.nodes[3:]] == pytest.approx([0.0, 0.0])  # rewards 1 and -1 at [1, 0]
    assert result.path.steps == ("b",)


def test_nodes_that_are_expanded_together_are_all_observed_before_their_children_are_valued():
    tree = {"": (0.0, [0.0, 0.0]), "a": (0.9, [1.0, 0.0]), "b": (0.8, [0.0, 1.0]), "ac": (0.0, [0.0, 1.0]),
            "ad": (0.0, [1.0, 0.0]), "be": (0.0, [0.0, 1.0]), "bf": (0.0, [1.0, 1.0])}
    nodes = run(tree, steps=2, branches=2, width=2, exploration=1.0, width_kind="variance").nodes
    assert [node.width for node in nodes] == pytest.approx([0.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0])


def test_a_step_sampled_twice_is_one_node_that_counts_both():
    proposer, scorer = RandomProposer(), RandomScorer()
    proposer.step = lambda path, seed, i: Step("AAB"[i], finished=i == 2, tokens=i)
    (result,) = SearchLLM(proposer, scorer, SearchConfig(1, 3, 2, 0.5)).search(["q"], 0)
    assert [(node.path.steps, node.samples) for node in result.nodes] == [((), 0), (("A",), 2), (("B",), 1)]
    assert (result.samples, result.tokens) == (3, 3)
    assert len(scorer.calls[1]) == 2  # and it is scored once


@few
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 6), branches=st.integers(1, 4), width=st.integers(1, 3),
       exploration=st.sampled_from([0.0, 0.3, 3.0]), kind=st.sampled_from(["sd", "variance"]),
       mean=st.sampled_from(["reward", "linear"]), ends=st.sampled_from([1, 3, 10**9]))
def test_every_search_keeps_the_bound_expands_no_node_twice_and_returns_a_leaf(
    seed, steps, branches, width, exploration, kind, mean, ends
):
    config = SearchConfig(steps, branches, width, exploration, width_kind=kind, mean=mean)
    proposer = RandomProposer(end_one_in=ends)
    (result,) = SearchLLM(proposer, RandomScorer(), config).search(["q"], seed)
    asked = [path for call in proposer.calls for path, _ in call]
    assert max(Counter(asked).values()) == 1
    assert result.samples == branches * len(asked) <= branches * (1 + width * (steps - 1))
    assert result.iterations == len(proposer.calls) <= steps
    best = result.nodes[result.best]
    assert best.path == result.path and best.expanded_at is None and best.finished == result.finished
    assert result.finished == any(node.finished for node in result.nodes)
    assert not any(node.finished and node.expanded_at for node in result.nodes)
    assert {node.path for node in result.nodes if node.expanded_at} == set(asked)
    for node in result.nodes[1:]:
        parent = result.nodes[node.parent]
        assert node.path.steps[:-1] == parent.path.steps and node.made_at == parent.expanded_at
    if ends == 1:
        assert result.iterations == 1 and result.finished


def test_an_iteration_is_one_call_of_each_for_all_questions_that_are_not_done():
    proposer, scorer = RandomProposer(), RandomScorer()
    proposer.step = lambda path, seed, i: Step(f"step {i}", finished=path.question == "short")
    results = SearchLLM(proposer, scorer, SearchConfig(4, 3, 2, 0.5)).search(["long", "short", "longer"], 0)
    assert [result.iterations for result in results] == [4, 1, 4]
    assert [[path.question for path, _ in call] for call in proposer.calls] == [
        ["long", "short", "longer"], *[["long", "long", "longer", "longer"]] * 3,
    ]
    assert [len(call) for call in scorer.calls] == [3, 9, 12, 12, 12]
    assert [result.path.question for result in results] == ["long", "short", "longer"]
