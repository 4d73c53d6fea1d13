import math
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo import losses

few = settings(max_examples=30, deadline=None, derandomize=True)
KINDS = {"scale": ("std", "none"), "baseline": ("mean", "leave-one-out"), "deviation": ("population", "sample")}
every_kind = pytest.mark.parametrize(
    "kind", [dict(zip(KINDS, values, strict=True)) for values in product(*KINDS.values())], ids=str)


@st.composite
def rewards_in_groups(draw):
    """Rewards and ids of 1 to 4 groups of 2 to 5 responses, shuffled; ids are any integers."""
    ids = draw(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=4, unique=True))
    rows = [group for group in ids for _ in range(draw(st.integers(2, 5)))]
    rows = draw(st.permutations(rows))
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3, width=32))
    rewards = draw(st.lists(reward, min_size=len(rows), max_size=len(rows)))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(rows)


@every_kind
@few
@given(data=rewards_in_groups(), eighths=st.integers(-40, 40))
def test_each_group_agrees_with_the_formula_sums_to_zero_and_ignores_a_shift(kind, data, eighths):
    rewards, ids = (data[0] * 8).round() / 8, data[1]  # so that the shift rounds nothing
    found = losses.group_advantages(rewards, ids, **kind)
    for group in ids.unique():
        r = rewards[ids == group]
        others = torch.stack([torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(len(r))])
        expected = r - (r.mean() if kind["baseline"] == "mean" else others)
        if kind["scale"] == "std":
            expected = expected / (r.std(correction=int(kind["deviation"] == "sample")) + 1e-6)
        torch.testing.assert_close(found[ids == group], expected, rtol=1e-9, atol=1e-9)
        assert found[ids == group].sum().item() == pytest.approx(0, abs=1e-9)
    shifted = losses.group_advantages(rewards + eighths / 8, ids, **kind)
    torch.testing.assert_close(shifted, found, rtol=0, atol=1e-9)


def test_ids_may_be_anything_hashable():
    rewards, numbers = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0]), [7, 3, 7, 3, 7]
    found = losses.group_advantages(rewards, torch.tensor(numbers))
    names = {7: "b", 3: ("a", None)}
    for ids in ([names[n] for n in numbers], np.array(["x" * n for n in numbers], dtype=object), np.array(numbers),
                [torch.tensor(n) for n in numbers], list(np.array(numbers))):
        assert torch.equal(losses.group_advantages(rewards, ids), found)
    assert torch.equal(losses.informative_groups(rewards, [names[n] for n in numbers]), torch.tensor([True] * 5))


@every_kind
def test_a_group_of_one_may_have_advantage_zero_and_changes_no_other(kind):
    rewards, ids = [1.0, 5.0, 0.0], ["p", "alone", "p"]
    found = losses.group_advantages(rewards, ids, singletons="zero", **kind)
    assert found[1] == 0 and torch.equal(found[[0, 2]], losses.group_advantages([1.0, 0.0], ["p", "p"], **kind))
    with pytest.raises(ValueError, match=r"groups \['alone'\] have one response each"):
        losses.group_advantages(rewards, ids, **kind)


@every_kind
@few
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 12))
def test_equal_rewards_give_exact_zeros(kind, reward, size):
    rewards = torch.full((size,), reward, dtype=torch.float32)
    assert torch.equal(losses.group_advantages(rewards, [4] * size, **kind), torch.zeros(size))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=rewards_in_groups(), low=st.sampled_from([None, 0.0, 0.5]), high=st.sampled_from([None, 0.5, 0.625, 1.0]))
def test_informative_groups_are_whole_groups_whose_rewards_differ_and_whose_mean_is_in_bounds(data, low, high):
    rewards, ids = (data[0] * 8).round() / 8, data[1]  # so that means are at the bounds, which are included
    kept, bounded = losses.informative_groups(rewards, ids), losses.informative_groups(rewards, ids, low=low, high=high)
    for group in ids.unique():
        r = rewards[ids == group].tolist()
        differ, mean = len(set(r)) > 1, math.fsum(r) / len(r)
        within = (low is None or low <= mean) and (high is None or mean <= high)
        assert kept[ids == group].tolist() == [differ] * len(r)
        assert bounded[ids == group].tolist() == [differ and within] * len(r)


def best_of_subsets_advantages(rewards: list[int], k: int) -> list[float]:
    """By enumeration: the best reward of each k-subset, standardised over the subsets, averaged over those that hold
    a response."""
    subsets = list(combinations(range(len(rewards)), k))
    best = {subset: max(rewards[i] for i in subset) for subset in subsets}
    mean = sum(best.values()) / len(subsets)
    std = math.sqrt(sum((b - mean) ** 2 for b in best.values()) / len(subsets))
    if std == 0:
        return [0.0] * len(rewards)
    holding = [[best[subset] for subset in subsets if i in subset] for i in range(len(rewards))]
    return [(sum(bests) / len(bests) - mean) / std for bests in holding]


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_pass_at_k_advantages_are_the_mean_over_all_k_subsets_of_each_group(size):
    ids = torch.tensor([5] * size + [-3] * (size + 1))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(size))
    for k, correct in product(range(1, size + 1), range(size + 1)):
        groups = [[0] * (size - correct) + [1] * correct, [1] * (size + 1 - correct) + [0] * correct]
        found = losses.pass_at_k_advantages(torch.tensor(sum(groups, []), dtype=torch.float64)[order], ids[order], k)
        expected = [x for group in groups for x in best_of_subsets_advantages(group, k)]
        expected = torch.tensor(expected, dtype=torch.float64)[order]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_pass_at_k_advantages_of_a_large_group_do_not_overflow():
    size, k, wrong = 3000, 500, 2999
    found = losses.pass_at_k_advantages(torch.tensor([1.0] + [0.0] * wrong, dtype=torch.float64), [0] * size, k)
    rate = k / size  # one correct response: the share of the subsets that hold it
    assert found[0].item() == pytest.approx(math.sqrt((1 - rate) / rate), rel=1e-12)
    assert found[1].item() == pytest.approx(-math.sqrt((1 - rate) / rate) / wrong, rel=1e-12)


pass_at_2 = partial(losses.pass_at_k_advantages, k=2)


@pytest.mark.parametrize("function", [losses.group_advantages, losses.informative_groups, pass_at_2])
@pytest.mark.parametrize(("rewards", "ids", "message"), [
    ([1.0, 0.0, 1.0], [1, 1, 2], r"groups \[2\] have one response each"),
    ([1.0, torch.nan], [1, 1], r"not finite at rows \[1\]"), ([torch.inf, 0.0], [1, 1], r"not finite at rows \[0\]"),
    ([1.0, 0.0], [1, 1, 1], r"rewards \(2,\) and group_ids \(3,\)"), ([[1.0, 0.0]], [[1, 1]], r"rewards \(1, 2\)"),
    ([0.0, 1.0], [0.5, 0.5], "group_ids are of type torch.float32"),
])
def test_groups_that_do_not_fit_are_errors(function, rewards, ids, message):
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(rewards), torch.tensor(ids))


@pytest.mark.parametrize(("call", "message"), [
    (partial(losses.group_advantages, scale="max"), "scale is 'max'"),
    (partial(losses.group_advantages, singletons="skip"), "singletons is 'skip'"),
    (lambda r, _: losses.group_advantages(r, ["a", "a", {}, "a", "a"]), "group_ids has a dict at row 2"),
    (partial(losses.informative_groups, low=0.8, high=0.2), "low is 0.8 and high is 0.2"),
    (partial(losses.pass_at_k_advantages, k=0), "k is 0"),
    (lambda r, ids: losses.pass_at_k_advantages(r, [4, 4, 9, 9, 9], 3), r"k is 3, but groups \[4\] have fewer"),
    (lambda r, ids: pass_at_2(r - 0.5, ids), r"rewards has values \[0.5, -0.5, .*\] at rows \[0, 1, 2, 3, 4\]"),
    (lambda r, _: losses.positive_downweighted_advantages(r / 2), r"values \[0.5, .*\] at rows \[0, 2, 3\]"),
    (lambda r, _: losses.positive_downweighted_advantages(r, negative=-1.0), "negative is -1.0"),
])
def test_settings_of_advantages_that_do_not_fit_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), [0] * 5)


@few
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20), sizes=st.tuples(*[st.integers(1, 40)] * 2))
def test_the_penalty_is_the_three_cases_of_its_equation(lengths, sizes):
    cache_length, max_length = sorted(sizes)
    found = losses.soft_overlong_penalty(torch.tensor(lengths), max_length=max_length, cache_length=cache_length)
    expected = torch.tensor([0.0 if length <= max_length - cache_length else -1.0 if length > max_length else
                             (max_length - cache_length - length) / cache_length for length in lengths])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
