from dataclasses import replace
from math import gcd, lcm

from helpers.responses import scored
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.preferences import preference_pairs
from nemo_edo.types import ScoredRollout

REWARDS = st.lists(st.sampled_from([0.0, 1.0]), max_size=12)


def group(rewards) -> list[ScoredRollout]:
    return [scored("p-1", sample, reward=reward) for sample, reward in enumerate(rewards)]


def keys(pairs) -> list[tuple[int, int]]:
    return [(pair.chosen.rollout.sample_index, pair.rejected.rollout.sample_index) for pair in pairs]


@given(REWARDS, st.integers(1, 50), st.integers(0, 5))
def test_pairs_are_distinct_at_most_the_count_and_chosen_is_right(rewards, count, seed):
    pairs = preference_pairs(group(rewards), count, seed)
    right, wrong = rewards.count(1), rewards.count(0)
    assert len(pairs) == min(count, right * wrong)
    assert len(set(keys(pairs))) == len(pairs)
    assert all((pair.chosen.reward, pair.rejected.reward) == (1, 0) for pair in pairs)


@given(REWARDS, st.integers(0, 5))
def test_every_response_is_paired_before_the_larger_set_begins_anew(rewards, seed):
    right, wrong = rewards.count(1), rewards.count(0)
    pairs = preference_pairs(group(rewards), max(right, wrong), seed)
    if right and wrong:
        assert {sample for pair in keys(pairs) for sample in pair} == set(range(len(rewards)))
        assert lcm(right, wrong) * gcd(right, wrong) == len(preference_pairs(group(rewards), 10**6, seed))


def test_the_seed_fixes_the_pairs_and_another_gives_others():
    responses = group([1, 0, 1, 0, 0, 1, 0, 1])
    found = [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert found == [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert len({tuple(pairs) for pairs in found}) > 4


def test_graded_rewards_pair_successes_with_failures():
    graded = [replace(one, success_at=0.7) for one in group([0.7, 0.6, -3.0, 2.0])]
    found = {(pair.chosen.reward, pair.rejected.reward) for pair in preference_pairs(graded, 4, 0)}
    assert found == {(0.7, 0.6), (0.7, -3.0), (2.0, 0.6), (2.0, -3.0)}
