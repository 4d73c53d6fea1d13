"""From samples to pairs: which rows a batch of ED-iDPO has, in what roles, and which of them explore."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers.responses import scored
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.algorithms.idpo import IDPO
from nemo_edo.config import IDPOConfig
from nemo_edo.errors import UserError
from nemo_edo.types import ScoredRollout
from nemo_edo.utils.phases import PhaseClock


def group(name: str, rewards, version: int = 0) -> list[ScoredRollout]:
    """Responses to one problem. Sample i is the tokens (30 + i,) * (1 + i), so that a row tells whose it is."""
    prompt = (10 + ord(name) - ord("a"), 5)
    return [scored(name, i, (30 + i,) * (1 + i), float(reward), prompt_ids=prompt, policy_version=version)
            for i, reward in enumerate(rewards)]


def key_of(item: ScoredRollout) -> tuple[str, int]:
    return item.rollout.problem_id, item.rollout.sample_index


def logprobs_of_places(batch):
    """Of row and position: -(row + position / 100). The entropies are 1."""
    rows, positions = (torch.arange(size, dtype=torch.float32) for size in batch.mask.shape)
    old = -(rows[:, None] + positions / 100)
    return old, torch.ones_like(old)


def collect(samples, *, seed: int = 0, **given):
    policy = SimpleNamespace(logprobs=logprobs_of_places,
                             reference_logprobs=lambda batch: logprobs_of_places(batch)[0] - 1)
    return IDPO(IDPOConfig(**given), pad_id=0, seed=seed).build(samples, policy, PhaseClock())


def row_keys(collected) -> list[tuple[str, int] | None]:
    """(problem, sample) of each row; None for a row that counts nowhere."""
    batch = collected.batch
    return [(chr(ord("a") + int(tokens[0]) - 10), int(tokens[2]) - 30) if mask.any() else None
            for tokens, mask in zip(batch.tokens, batch.mask, strict=True)]


def explored(collected) -> Counter:
    """How often each response explores."""
    weights = collected.batch.exploration_factors.tolist()
    assert set(weights) <= {0.0, 1.0}
    return Counter(key for key, weight in zip(row_keys(collected), weights, strict=True) if weight)


def pairs(collected) -> list[tuple]:
    keys = row_keys(collected)
    return [(keys[row], keys[row + 1]) for row, role in enumerate(collected.batch.pair_role.tolist()) if role == 1]


MIXED = [*group("a", [1, 0, 0, 1, 0]), *group("b", [0, 0, 0]), *group("c", [1, 1]), *group("d", [0, 1, 1])]


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 4),
       st.sampled_from(["all", "paired", "1", "3"]))
def test_rows_come_in_twos_that_are_a_pair_of_one_problem_or_both_outside_pairs(rewards, count, samples):
    responses = [item for name, group_rewards in zip("abcde", rewards, strict=False)
                 for item in group(name, [*group_rewards, 0, 1])]
    collected = collect(responses, pairs_per_prompt=count, exploration_samples=samples)
    keys, batch_roles = row_keys(collected), collected.batch.pair_role.tolist()
    reward_of = {key_of(item): item.reward for item in responses}
    for row in range(0, len(keys), 2):
        assert (batch_roles[row], batch_roles[row + 1]) in [(1, -1), (0, 0)]
        present = [key for key in keys[row : row + 2] if key is not None]
        assert len({problem for problem, _ in present}) == 1
        if batch_roles[row] == 1:
            assert [reward_of[key] for key in keys[row : row + 2]] == [1, 0]
    assert sorted(row for item in collected.items for row in item) == list(range(len(keys)))
    for item in collected.items:
        assert len({keys[row][0] for row in item if keys[row] is not None}) == 1


def test_every_row_carries_its_own_responses_tokens_and_logprobs():
    collected = collect(MIXED, old_logprobs="trainer")
    batch, keys = collected.batch, row_keys(collected)
    place_of = {key_of(item): row for row, item in enumerate(MIXED)}
    for row, key in enumerate(keys):
        if key is None:
            continue
        own = batch.mask[row].bool()
        assert batch.tokens[row, 1:][own].tolist() == [30 + key[1]] * (1 + key[1])
        expected = -(place_of[key] + torch.arange(batch.mask.shape[1]) / 100)
        torch.testing.assert_close(batch.old_logprobs[row], expected)
        torch.testing.assert_close(batch.ref_logprobs[row], expected - 1)
        torch.testing.assert_close(batch.sampler_logprobs[row][own], torch.full((1 + key[1],), -0.5))


def test_prompts_whose_rewards_are_all_equal_give_no_pair_but_explore():
    collected = collect(MIXED, pairs_per_prompt=4)
    assert {problem for (problem, _), _ in pairs(collected)} == {"a", "d"}
    assert explored(collected) == {key_of(item): 1 for item in MIXED}
    assert len(collected.items) == 4
    statistics = collected.statistics
    assert (statistics["pairs"], statistics["prompts_without_pairs"]) == (6.0, 2.0)
    assert statistics["reward"] == pytest.approx(6 / 13)
    assert statistics["kl"] > 0 and statistics["entropy"] == pytest.approx(1.0)


def test_seed_version_and_prompt_fix_the_pairs_and_others_give_others():
    def orders(seed: int, version: int) -> list[tuple]:
        """The samples that are paired, of each of six prompts with the same rewards."""
        responses = [item for name in "abcdef" for item in group(name, [1, 0] * 4, version)]
        found = pairs(collect(responses, seed=seed, pairs_per_prompt=4))
        return [tuple((chosen[1], rejected[1]) for chosen, rejected in found if chosen[0] == name) for name in "abcdef"]

    assert orders(0, 0) == orders(0, 0) and len(set(orders(0, 0))) > 3
    assert len({orders(seed, version)[0] for seed in range(3) for version in range(3)}) > 6


@pytest.mark.parametrize("samples", ["paired", "1", "2", "4"])
def test_only_the_responses_of_pairs_or_the_first_so_many_of_each_prompt_explore_where_that_is_asked_for(samples: str):
    collected = collect(MIXED, exploration_samples=samples, pairs_per_prompt=4)
    if samples == "paired":
        exploring = {key for pair in pairs(collected) for key in pair}
        assert len(collected.items) == 2 and 0 not in collected.batch.pair_role.tolist()
    else:
        exploring = {key_of(item) for item in MIXED if item.rollout.sample_index < int(samples)}
    assert explored(collected) == dict.fromkeys(exploring, 1)


@pytest.mark.parametrize("off", [{"alpha": 0.0}, {"exploration_coefficient": 0.0}])
def test_without_a_weight_nothing_explores_and_only_pairs_are_rows(off: dict):
    collected = collect(MIXED, **off)
    assert not explored(collected)
    assert set(collected.batch.pair_role.tolist()) == {1, -1} and None not in row_keys(collected)
    assert len(collected.items) == 2
    assert pairs(collected) == pairs(collect(MIXED))  # ETO's pairs are ED-iDPO's


@pytest.mark.parametrize("nothing", [{"alpha": 0.0}, {"exploration_samples": "paired"}])
def test_nothing_to_train_on_is_an_error(nothing: dict):
    with pytest.raises(UserError, match="no pairs: .* 2 prompts"):
        collect([*group("a", [1, 1]), *group("b", [0, 0])], **nothing)


def test_items_are_the_prompts_in_order_of_first_appearance_and_minibatches_are_whole_items():
    a, b, c = group("a", [1, 0, 0]), group("b", [0, 0]), group("c", [0, 1])
    collected = collect([b[0], a[0], c[0], a[1], b[1], a[2], c[1]], pairs_per_prompt=1)
    keys = row_keys(collected)
    assert [keys[row] for row in collected.items[0]] == [("b", 0), ("b", 1)]
    assert [keys[item[0]][0] for item in collected.items] == ["b", "a", "c"]
    roles = [collected.batch.pair_role[item].tolist() for item in collected.items]
    assert roles == [[0, 0], [1, -1, 0, 0], [1, -1]]
    batch = IDPO(IDPOConfig(), pad_id=0, seed=0).minibatch(collected, [2, 0], "seed")
    rows = [*collected.items[2], *collected.items[0]]
    assert batch.size == len(rows) and batch.unit == 2
    for name, value in collected.batch.tensors().items():
        assert torch.equal(batch.tensors()[name], value[rows]), name
