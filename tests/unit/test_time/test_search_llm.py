import hashlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import SearchConfig, SearchLLM, Step, StepPath, StepScore

few = settings(max_examples=20, deadline=None, derandomize=True)
BASIC = SearchConfig(steps=4, branches=3, width=2, exploration=0.5)


def digest(*parts):
    """An integer that depends on the parts alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


class RandomProposer:
    """Samples a few step texts, so that siblings repeat, by the path's seed; counts its calls."""

    def __init__(self, end_one_in=4, texts=6):
        self.calls, self.end_one_in, self.texts = [], end_one_in, texts

    def propose(self, paths, count, seeds):
        self.calls.append(list(zip(paths, seeds, strict=True)))
        return [[self.step(path, seed, i) for i in range(count)] for path, seed in zip(paths, seeds, strict=True)]

    def step(self, path, seed, i):
        number = digest(seed, i) % self.texts
        return Step(f"step {number}", digest(path, number) % self.end_one_in == 0, tokens=1 + number)


def proposing(step):
    """A proposer with the given method for one step."""
    return type("Proposer", (RandomProposer,), {"step": lambda self, path, seed, i: step(path, i)})()


class RandomScorer:
    """A reward and an embedding [4] for every path, by its text."""

    def __init__(self):
        self.calls = []

    def score(self, paths):
        self.calls.append(list(paths))
        return [StepScore(reward(path), embedding(path)) for path in paths]


def reward(path):
    return digest(path) % 1000 / 1000


def embedding(path):
    return torch.tensor([digest(path, i) % 7 - 3.0 for i in range(4)])


class Script:
    """A known tree: {path of letters: (reward, embedding)}; a letter in upper case ends the solution."""

    def __init__(self, tree, dim=2):
        self.tree = {path: value if isinstance(value, tuple) else (value, [0.0] * dim) for path, value in tree.items()}

    def propose(self, paths, count, seeds):
        return [[Step(letter, letter.isupper()) for letter in self.letters("".join(p.steps))] for p in paths]

    def letters(self, path):
        return [other[-1] for other in self.tree if other and other[:-1] == path]

    def score(self, paths):
        return [StepScore(r, torch.tensor(phi)) for r, phi in (self.tree["".join(path.steps)] for path in paths)]


def run(tree, **settings):
    script = Script(tree)
    (result,) = SearchLLM(script, script, SearchConfig(**settings)).search(["?"], 0)
    return result


def answer(result):
    return "".join(result.path.steps)


def expanded(result):
    """Paths in the order of their expansion."""
    nodes = sorted((n for n in result.nodes if n.expanded_at is not None), key=lambda n: (n.expanded_at, n.made_at))
    return ["".join(node.path.steps) for node in nodes]


def best_first(question, seeds, config):
    """Beam best-first search by reward over RandomProposer's tree, with sets of paths and nothing else."""
    proposer = RandomProposer()
    frontier, everything, opened = {(): -1.0}, [], set()
    for _ in range(config.steps):
        chosen = sorted(frontier, key=lambda steps: -frontier[steps])[: config.width]
        made = {}
        for steps in chosen:
            del frontier[steps]
            opened.add(steps)
            path = StepPath(question, steps)
            for i in range(config.branches):
                step = proposer.step(path, seeds[path], i)
                made[(*steps, step.text)] = step.finished
        scores = {steps: reward(StepPath(question, steps)) for steps in made}
        everything += [(steps, scores[steps], made[steps]) for steps in made]
        top = sorted(made, key=lambda steps: -scores[steps])[: config.width]
        if all(made[steps] for steps in top):
            break
        frontier.update({steps: scores[steps] for steps in made if steps in top and not made[steps]})
    pool = [item for item in everything if item[2]] or [item for item in everything if item[0] not in opened]
    return max(pool, key=lambda item: item[1])[0], opened


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
          "ac": 0.1, "ad": 0.1, "be": 0.1, "bf": 0.1}


@pytest.mark.parametrize(("tree", "steps", "exploration", "order", "chosen"), [
    (BONUS, 1, 10.0, [""], "O"),  # the reward and not the bonus decides the answer
    (UNLIKE, 2, 0.0, ["", "a"], "b"), (UNLIKE, 2, 1.0, ["", "b"], "a"),
])
def test_exploration_turns_the_search_and_not_the_answer_to_embeddings_unlike_those_expanded(
    tree, steps, exploration, order, chosen
):
    result = run(tree, steps=steps, branches=2, width=1, exploration=exploration)
    assert (expanded(result), answer(result)) == (order, chosen)
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
    assert answer(result) == "b"


def test_nodes_that_are_expanded_together_are_all_observed_before_their_children_are_valued():
    tree = {"": (0.0, [0.0, 0.0]), "a": (0.9, [1.0, 0.0]), "b": (0.8, [0.0, 1.0]), "ac": (0.0, [0.0, 1.0]),
            "ad": (0.0, [1.0, 0.0]), "be": (0.0, [0.0, 1.0]), "bf": (0.0, [1.0, 1.0])}
    nodes = run(tree, steps=2, branches=2, width=2, exploration=1.0, width_kind="variance").nodes
    assert [node.width for node in nodes] == pytest.approx([0.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0])


def test_a_step_sampled_twice_is_one_node_that_counts_both():
    proposer, scorer = proposing(lambda _, i: Step("AAB"[i], finished=i == 2, tokens=i)), RandomScorer()
    (result,) = SearchLLM(proposer, scorer, replace(BASIC, steps=1)).search(["q"], 0)
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
    proposer = proposing(lambda path, i: Step(f"step {i}", finished=path.question == "short"))
    scorer = RandomScorer()
    results = SearchLLM(proposer, scorer, BASIC).search(["long", "short", "longer"], 0)
    assert [result.iterations for result in results] == [4, 1, 4]
    assert [[path.question for path, _ in call] for call in proposer.calls] == [
        ["long", "short", "longer"], *[["long", "long", "longer", "longer"]] * 3,
    ]
    assert [len(call) for call in scorer.calls] == [3, 9, 12, 12, 12]
    assert [result.path.question for result in results] == ["long", "short", "longer"]
