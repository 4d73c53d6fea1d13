from math import gcd, lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.data.preferences import preference_pairs
from nemo_edo.types import PreferencePair, Rollout, ScoredRollout

few = settings(max_examples=40, deadline=None, derandomize=True)
REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12)


def response(sample: int, reward: float, problem: str = "p-1", prompt=(1, 2)) -> ScoredRollout:
    rollout = Rollout(problem, sample, prompt, (3,), (-0.1,), "text", True, 0, 7)
    return ScoredRollout(rollout, reward, "1", True, "because")


def group(rewards) -> list[ScoredRollout]:
    return [response(sample, reward) for sample, reward in enumerate(rewards)]


def keys(pairs) -> list[tuple[int, int]]:
    return [(pair.chosen.rollout.sample_index, pair.rejected.rollout.sample_index) for pair in pairs]


@few
@given(REWARDS, st.integers(1, 50), st.integers(0, 5))
def test_pairs_are_distinct_at_most_the_count_and_chosen_is_right(rewards, count, seed):
    pairs = preference_pairs(group(rewards), count, seed)
    right, wrong = rewards.count(1), rewards.count(0)
    assert len(pairs) == min(count, right * wrong)
    assert len(set(keys(pairs))) == len(pairs)
    assert all((pair.chosen.reward, pair.rejected.reward) == (1, 0) for pair in pairs)


@few
@given(REWARDS, st.integers(0, 5))
def test_every_response_is_paired_before_the_larger_set_begins_anew(rewards, seed):
    right, wrong = rewards.count(1), rewards.count(0)
    pairs = preference_pairs(group(rewards), max(right, wrong), seed)
    if right and wrong:
        assert {sample for pair in keys(pairs) for sample in pair} == set(range(len(rewards)))
        assert lcm(right, wrong) * gcd(right, wrong) == len(preference_pairs(group(rewards), 10**6, seed))


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0], []])
def test_an_empty_side_gives_no_pair(rewards):
    assert preference_pairs(group(rewards), 4, 0) == []


def test_the_seed_fixes_the_pairs_and_another_gives_others():
    responses = group([1, 0, 1, 0, 0, 1, 0, 1])
    drawn = [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert drawn == [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert len({tuple(pairs) for pairs in drawn}) > 4


def test_responses_to_several_prompts_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"2 prompts \(p-1, p-2\)"):
        preference_pairs([response(0, 1.0), response(0, 0.0, problem="p-2")], 1, 0)


def test_a_reward_between_is_an_error_that_names_the_response():
    with pytest.raises(ValueError, match="response 1 to p-1 has reward 0.5, expected 0 or 1"):
        preference_pairs(group([1.0, 0.5]), 1, 0)


@pytest.mark.parametrize("other", [{"problem": "p-2"}, {"prompt": (1, 2, 3)}])
def test_a_pair_of_two_prompts_is_an_error_that_names_both(other):
    with pytest.raises(ValueError, match=r"the chosen response answers p-1 \(2 prompt tokens\), the rejected one p-"):
        PreferencePair(response(0, 1.0), response(1, 0.0, **other))
