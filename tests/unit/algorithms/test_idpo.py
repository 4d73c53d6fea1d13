"""From samples to pairs: which rows a batch of ED-iDPO has, in what roles, and which of them explore."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.algorithms.idpo import IDPO
from nemo_edo.config import IDPOConfig
from nemo_edo.errors import UserError
from nemo_edo.types import Rollout, ScoredRollout


def group(name: str, rewards, version: int = 0) -> list[ScoredRollout]:
    """Responses to one problem. Sample i is the tokens (30 + i,) * (1 + i), so that a row tells whose it is."""
    prompt = (10 + ord(name) - ord("a"), 5)
    return [
        ScoredRollout(Rollout(name, i, prompt, (30 + i,) * (1 + i), (-0.7,) * (1 + i), "text", True, version, i),
                      float(reward), None, True, "")
        for i, reward in enumerate(rewards)
    ]


class StepPolicy:
    """Log-probabilities that tell their place: pi_old's are -(row + position / 100), the reference's one lower."""

    def log_probs(self, batch):
        rows, positions = (torch.arange(size, dtype=torch.float32) for size in batch.mask.shape)
        old = -(rows[:, None] + positions / 100)
        return old, torch.ones_like(old)

    def reference_log_probs(self, batch):
        return self.log_probs(batch)[0] - 1


def collect(samples, *, seed: int = 0, **given):
    return IDPO(IDPOConfig(**given), pad_id=0, seed=seed).build(samples, StepPolicy())


def row_keys(collected) -> list[tuple[str, int] | None]:
    """(problem, sample) of each row; None for a row that counts nowhere."""
    batch = collected.batch
    return [(chr(ord("a") + int(tokens[0]) - 10), int(tokens[2]) - 30) if mask.any() else None
            for tokens, mask in zip(batch.tokens, batch.mask, strict=True)]


def roles(collected) -> list[int]:
    return collected.batch.pair_role.tolist()


def explored(collected) -> Counter:
    """How often each response explores."""
    weights = collected.batch.exploration_weights.tolist()
    assert set(weights) <= {0.0, 1.0}
    return Counter(key for key, weight in zip(row_keys(collected), weights, strict=True) if weight)


def pairs(collected) -> list[tuple]:
    keys, batch_roles = row_keys(collected), roles(collected)
    return [(keys[row], keys[row + 1]) for row, role in enumerate(batch_roles) if role == 1]


MIXED = [*group("a", [1, 0, 0, 1, 0]), *group("b", [0, 0, 0]), *group("c", [1, 1]), *group("d", [0, 1, 1])]
REWARDS = st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6), min_size=1, max_size=5)


# --- rows ---------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(REWARDS, st.integers(1, 4), st.sampled_from(["all", "paired", "1", "3"]))
def test_rows_come_in_twos_that_are_a_pair_of_one_problem_or_both_outside_pairs(rewards, count, samples):
    scored = [item for name, group_rewards in zip("abcde", rewards, strict=False)
              for item in group(name, [*group_rewards, 0, 1])]
    collected = collect(scored, pairs_per_prompt=count, exploration_samples=samples)
    keys, batch_roles = row_keys(collected), roles(collected)
    reward_of = {(item.rollout.problem_id, item.rollout.sample_index): item.reward for item in scored}
    for row in range(0, len(keys), 2):
        assert (batch_roles[row], batch_roles[row + 1]) in [(1, -1), (0, 0)]
        present = [key for key in keys[row : row + 2] if key is not None]
        assert len({problem for problem, _ in present}) == 1
        if batch_roles[row] == 1:
            assert [reward_of[key] for key in keys[row : row + 2]] == [1, 0]
    assert sorted(row for item in collected.items for row in item) == list(range(len(keys)))
    for item in collected.items:
        assert len({keys[row][0] for row in item if keys[row] is not None}) == 1


def test_every_row_carries_its_own_responses_tokens_and_log_probs():
    collected = collect(MIXED)
    batch, keys = collected.batch, row_keys(collected)
    place_of = {(item.rollout.problem_id, item.rollout.sample_index): row for row, item in enumerate(MIXED)}
    for row, key in enumerate(keys):
        if key is None:
            continue
        own = batch.mask[row].bool()
        assert batch.tokens[row, 1:][own].tolist() == [30 + key[1]] * (1 + key[1])
        expected = -(place_of[key] + torch.arange(batch.mask.shape[1]) / 100)
        torch.testing.assert_close(batch.old_logprobs[row], expected)
        torch.testing.assert_close(batch.ref_logprobs[row], expected - 1)
        torch.testing.assert_close(batch.sampler_logprobs[row][own], torch.full((1 + key[1],), -0.7))


def test_a_single_response_outside_pairs_is_followed_by_a_row_that_counts_nowhere():
    collected = collect(group("a", [0, 0, 0]))
    assert row_keys(collected) == [("a", 0), ("a", 1), ("a", 2), None]
    assert not collected.batch.mask[3].any()
    assert roles(collected) == [0, 0, 0, 0]
    assert collected.batch.exploration_weights.tolist() == [1, 1, 1, 0]
    assert collected.batch.unit == 2


# --- pairs --------------------------------------------------------------------------------------------------------


def test_a_prompt_has_at_most_s_pairs_and_never_the_same_twice():
    for count, of_a, of_d in ((1, 1, 1), (2, 2, 2), (4, 4, 2), (99, 6, 2)):
        found = pairs(collect(MIXED, pairs_per_prompt=count))
        assert Counter(chosen[0] for chosen, _ in found) == {"a": of_a, "d": of_d}
        assert len(set(found)) == len(found)


def test_prompts_whose_rewards_are_all_equal_give_no_pair_but_explore():
    collected = collect(MIXED)
    assert {problem for (problem, _), _ in pairs(collected)} == {"a", "d"}
    assert explored(collected) == {(i.rollout.problem_id, i.rollout.sample_index): 1 for i in MIXED}
    assert len(collected.items) == 4


def test_statistics_count_pairs_and_prompts_without_them():
    statistics = collect(MIXED, pairs_per_prompt=4).statistics
    assert (statistics["pairs"], statistics["prompts_without_pairs"]) == (6.0, 2.0)
    assert statistics["reward"] == pytest.approx(6 / 13)
    assert statistics["kl"] > 0 and statistics["entropy"] == pytest.approx(1.0)


def test_the_seed_and_the_policys_version_fix_the_pairs_and_another_one_gives_others():
    def drawn(seed: int, version: int) -> list[tuple]:
        return pairs(collect(group("a", [1, 0] * 4, version), seed=seed, pairs_per_prompt=4))

    assert drawn(0, 0) == drawn(0, 0)
    assert len({tuple(drawn(seed, version)) for seed in range(3) for version in range(3)}) > 6


def test_prompts_of_the_same_rewards_are_paired_in_orders_of_their_own():
    collected = collect([item for name in "abcdef" for item in group(name, [1, 0] * 4)], pairs_per_prompt=4)
    orders = {tuple((chosen[1], rejected[1]) for chosen, rejected in pairs(collected) if chosen[0] == name)
              for name in "abcdef"}
    assert len(orders) > 3


@pytest.mark.parametrize("reward", [0.5, float("nan")])
def test_a_reward_between_right_and_wrong_is_an_error(reward):
    with pytest.raises(ValueError, match=f"has reward {reward}, expected 0 or 1"):
        collect([*group("a", [1, 0]), replace(group("b", [1])[0], reward=reward)])


# --- exploration --------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(REWARDS, st.integers(1, 9))
def test_with_all_every_response_explores_exactly_once_however_many_pairs_it_is_in(rewards, count):
    scored = [item for name, rewards_of in zip("abcde", rewards, strict=False) for item in group(name, rewards_of)]
    collected = collect(scored, pairs_per_prompt=count, exploration_samples="all")
    assert explored(collected) == {(item.rollout.problem_id, item.rollout.sample_index): 1 for item in scored}


def test_with_paired_only_the_responses_of_pairs_explore_once_each():
    collected = collect(MIXED, exploration_samples="paired", pairs_per_prompt=4)
    in_pairs = {key for pair in pairs(collected) for key in pair}
    assert explored(collected) == dict.fromkeys(in_pairs, 1)
    assert len(collected.items) == 2 and 0 not in roles(collected)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_with_a_number_the_first_so_many_of_each_prompt_explore(number: int):
    collected = collect(MIXED, exploration_samples=str(number))
    expected = {(i.rollout.problem_id, i.rollout.sample_index): 1 for i in MIXED if i.rollout.sample_index < number}
    assert explored(collected) == expected


@pytest.mark.parametrize("off", [{"alpha": 0.0}, {"exploration_coefficient": 0.0}])
def test_without_a_weight_nothing_explores_and_only_pairs_are_rows(off: dict):
    collected = collect(MIXED, **off)
    assert not explored(collected)
    assert set(roles(collected)) == {1, -1} and None not in row_keys(collected)
    assert len(collected.items) == 2
    assert pairs(collected) == pairs(collect(MIXED))  # ETO's pairs are ED-iDPO's


@pytest.mark.parametrize("nothing", [{"alpha": 0.0}, {"exploration_samples": "paired"}])
def test_nothing_to_train_on_is_an_error_that_says_what_to_do(nothing: dict):
    with pytest.raises(UserError, match="no pairs: the rewards of each of the 2 prompts are all equal.*sample more"):
        collect([*group("a", [1, 1]), *group("b", [0, 0])], **nothing)


# --- items and minibatches ----------------------------------------------------------------------------------------


def test_items_are_the_prompts_in_order_of_first_appearance_pairs_before_single_responses():
    a, b, c = group("a", [1, 0, 0]), group("b", [0, 0]), group("c", [0, 1])
    interleaved = [b[0], a[0], c[0], a[1], b[1], a[2], c[1]]
    collected = collect(interleaved, pairs_per_prompt=1)
    keys = row_keys(collected)
    assert [[keys[row] for row in item] for item in collected.items][0] == [("b", 0), ("b", 1)]
    assert [keys[item[0]][0] for item in collected.items] == ["b", "a", "c"]
    assert [[roles(collected)[row] for row in item] for item in collected.items] == [[0, 0], [1, -1, 0, 0], [1, -1]]
    assert collected.items == collect(interleaved, pairs_per_prompt=1).items


def test_a_minibatch_holds_whole_prompts_in_the_order_asked_for():
    objective = IDPO(IDPOConfig(pairs_per_prompt=2), pad_id=0, seed=0)
    collected = objective.build(MIXED, StepPolicy())
    batch = objective.minibatch(collected, [3, 0], "seed")
    rows = [*collected.items[3], *collected.items[0]]
    assert batch.size == len(rows) and batch.unit == 2
    for name, value in collected.batch.tensors().items():
        assert torch.equal(batch.tensors()[name], value[rows]), name
    assert set(batch.tokens[:, 0].tolist()) - {10, 13} == set()
