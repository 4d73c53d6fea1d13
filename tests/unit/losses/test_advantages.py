import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import (
    exploration_term,
    group_advantages,
    informative_groups,
    pass_at_k_advantages,
    positive_downweighted_advantages,
)

few = settings(max_examples=30, deadline=None, derandomize=True)
every_kind = pytest.mark.parametrize("scale", ["std", "none"])
every_baseline = pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])


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
@every_baseline
@few
@given(data=rewards_in_groups())
def test_each_group_agrees_with_the_formula_written_out(scale, baseline, data):
    rewards, ids = data
    found = group_advantages(rewards, ids, scale=scale, baseline=baseline)
    for group in ids.unique():
        r = rewards[ids == group]
        others = torch.stack([torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(len(r))])
        expected = r - (r.mean() if baseline == "mean" else others)
        if scale == "std":
            expected = expected / (r.std(correction=0) + 1e-6)
        torch.testing.assert_close(found[ids == group], expected, rtol=1e-9, atol=1e-9)


@every_kind
@every_baseline
@few
@given(data=rewards_in_groups(), shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(scale, baseline, data, shift):
    rewards, ids = data
    found = group_advantages(rewards, ids, scale=scale, baseline=baseline)
    for group in ids.unique():
        assert found[ids == group].sum().item() == pytest.approx(0, abs=1e-9)
    rounded = (rewards * 8).round() / 8  # a group that is equal but for the shift's rounding is another matter
    shift = round(shift * 8) / 8
    torch.testing.assert_close(
        group_advantages(rounded + shift, ids, scale=scale, baseline=baseline),
        group_advantages(rounded, ids, scale=scale, baseline=baseline),
        rtol=0, atol=1e-9,
    )


@few
@given(data=rewards_in_groups(), factor=st.floats(0.1, 10))
def test_with_std_the_scale_of_the_rewards_does_not_matter(data, factor):
    rewards, ids = data
    plain, scaled = (group_advantages(r, ids, scale="std", epsilon=0.0) for r in (rewards, factor * rewards))
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-6)


@every_kind
@every_baseline
@few
@given(data=rewards_in_groups(), random=st.randoms(use_true_random=False))
def test_a_permutation_of_the_responses_permutes_their_advantages(scale, baseline, data, random):
    rewards, ids = data
    order = torch.tensor(random.sample(range(len(ids)), len(ids)))
    found = group_advantages(rewards[order], ids[order], scale=scale, baseline=baseline)
    expected = group_advantages(rewards, ids, scale=scale, baseline=baseline)[order]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@every_kind
@every_baseline
@few
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 12))
def test_equal_rewards_give_exact_zeros(scale, baseline, reward, size):
    rewards = torch.full((size,), reward, dtype=torch.float32)
    assert torch.equal(group_advantages(rewards, [4] * size, scale=scale, baseline=baseline), torch.zeros(size))


def test_binary_rewards_give_the_textbook_values():
    found = group_advantages(torch.tensor([1, 0, 0, 0]), [7, 7, 7, 7])
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0]) / 3**0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "ids", "options", "message"),
    [
        ([1.0, 0.0, 1.0], [1, 1, 2], {}, r"groups \[2\] have one response each"),
        ([1.0, torch.nan], [1, 1], {}, r"not finite at rows \[1\]"),
        ([torch.inf, 0.0], [1, 1], {}, r"not finite at rows \[0\]"),
        ([1.0, 0.0], [1, 1, 1], {}, r"rewards \(2,\) and group_ids \(3,\)"),
        ([[1.0, 0.0]], [[1, 1]], {}, r"must both be \[B\]"),
        ([1.0, 0.0], [1, 1], {"scale": "max"}, "scale is 'max'"),
        ([1.0, 0.0], [1, 1], {"baseline": "none"}, "baseline is 'none'"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(rewards, ids, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), ids, **options)


def test_ids_that_are_no_integers_are_an_error_for_every_function_of_groups():
    for function in (group_advantages, informative_groups, lambda r, ids: pass_at_k_advantages(r, ids, 2)):
        with pytest.raises(ValueError, match="group_ids are of type torch.float32, expected integers"):
            function(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]))


def test_rewards_as_a_list_give_what_a_tensor_gives_and_no_rewards_give_no_advantages():
    rewards, ids = [1.0, 0.0, 0.0], [3, 3, 3]
    assert torch.equal(group_advantages(rewards, ids), group_advantages(torch.tensor(rewards), torch.tensor(ids)))
    for found in (group_advantages([], []), pass_at_k_advantages([], [], 2), positive_downweighted_advantages([])):
        assert found.shape == (0,) and found.dtype == torch.float32
    assert informative_groups([], []).shape == (0,)


@few
@given(data=rewards_in_groups(), low=st.floats(-1, 0.5), width=st.floats(0, 2))
def test_informative_groups_keeps_whole_groups_whose_rewards_differ_and_whose_mean_is_in_bounds(data, low, width):
    rewards, ids = data
    bounded = informative_groups(rewards, ids, low=low, high=low + width)
    for group in ids.unique():
        r = rewards[ids == group].tolist()
        differ = len(set(r)) > 1
        assert informative_groups(rewards, ids)[ids == group].tolist() == [differ] * len(r)
        mean = math.fsum(r) / len(r)
        if min(abs(mean - low), abs(mean - low - width)) > 1e-9:  # else a rounding decides
            assert bounded[ids == group].tolist() == [differ and low <= mean <= low + width] * len(r)


@few
@given(data=rewards_in_groups())
def test_the_groups_left_out_are_those_without_any_advantage(data):
    rewards, ids = data
    kept, advantages = informative_groups(rewards, ids), group_advantages(rewards, ids)
    assert kept.dtype == torch.bool
    assert (advantages[~kept] == 0).all()
    for group in ids[kept].unique():
        assert (advantages[ids == group] != 0).any()


def test_the_bounds_of_the_difficulty_filter_are_included_and_each_may_be_left_out():
    rewards = torch.tensor([1.0] * 1 + [0.0] * 4 + [1.0] * 3 + [0.0] * 2 + [1.0] * 4 + [0.0])
    ids = [0] * 5 + [1] * 5 + [2] * 5

    def kept(**bounds):
        return informative_groups(rewards, ids, **bounds)[::5].tolist()

    assert kept(low=0.2, high=0.6) == [True, True, False]
    assert kept(low=0.6) == [False, True, True]
    assert kept(high=0.2) == [True, False, False]
    assert kept(low=0.21, high=0.59) == [False, False, False]


def test_informative_groups_as_exploration_weights_leave_out_equal_groups_and_keep_the_count(random_batch):
    batch = random_batch(3)
    kept = informative_groups(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), [0, 0, 1, 1, 2, 2])
    term = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-sum", weights=kept)
    alone = exploration_term(batch.logprobs[:2], batch.old[:2], batch.mask[:2], reduction="seq-sum")
    torch.testing.assert_close(term.sum, alone.sum)
    assert term.count == (batch.lengths > 0).sum()


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
def test_pass_at_k_advantages_are_the_mean_over_all_k_subsets(size):
    for k in range(1, size + 1):
        for correct in range(size + 1):
            rewards = [0] * (size - correct) + [1] * correct
            found = pass_at_k_advantages(torch.tensor(rewards, dtype=torch.float64), [5] * size, k)
            expected = torch.tensor(best_of_subsets_advantages(rewards, k), dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@few
@given(data=rewards_in_groups(), k=st.integers(1, 2))
def test_pass_at_k_advantages_of_shuffled_groups_of_any_size_are_those_of_each_group_alone(data, k):
    rewards, ids = (data[0] > 0).double(), data[1]
    found = pass_at_k_advantages(rewards, ids, k)
    assert found.sum().item() == pytest.approx(0, abs=1e-9)
    for group in ids.unique():
        expected = torch.tensor(best_of_subsets_advantages(rewards[ids == group].int().tolist(), k))
        torch.testing.assert_close(found[ids == group], expected.double(), rtol=1e-6, atol=1e-6)


@few
@given(data=rewards_in_groups())
def test_pass_at_1_advantages_are_the_group_advantages(data):
    rewards, ids = (data[0] > 0).double(), data[1]
    expected = group_advantages(rewards, ids, epsilon=0.0)
    torch.testing.assert_close(pass_at_k_advantages(rewards, ids, 1), expected, rtol=1e-12, atol=1e-12)


def test_pass_at_k_advantages_are_exact_zeros_where_every_subset_does_equally_well():
    for rewards in ([0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]):  # with k = 2 one wrong response never stands alone
        assert torch.equal(pass_at_k_advantages(torch.tensor(rewards), [0] * 4, 2), torch.zeros(4))


def test_pass_at_k_advantages_of_a_large_group_do_not_overflow():
    size, k, wrong = 3000, 500, 2999
    found = pass_at_k_advantages(torch.tensor([1.0] + [0.0] * wrong, dtype=torch.float64), [0] * size, k)
    rate = k / size  # one correct response: the share of the subsets that hold it
    assert found[0].item() == pytest.approx(math.sqrt((1 - rate) / rate), rel=1e-12)
    assert found[1].item() == pytest.approx(-math.sqrt((1 - rate) / rate) / wrong, rel=1e-12)


@pytest.mark.parametrize(
    ("rewards", "ids", "k", "message"),
    [
        ([1.0, 0.0, 1.0, 1.0, 0.0], [4, 4, 9, 9, 9], 3, r"k is 3, but groups \[4\] have fewer responses"),
        ([1.0, 0.0], [0, 0], 0, "k is 0, expected at least 1"),
        ([1.0, 0.5, -1.0], [0, 0, 0], 2, r"rewards has values \[0.5, -1.0\] at rows \[1, 2\], expected 0 or 1"),
        ([1.0, torch.nan], [0, 0], 2, r"rewards are not finite at rows \[1\]"),
        ([1.0, 0.0, 1.0], [0, 0, 1], 1, r"groups \[1\] have one response each"),
        ([1.0, 0.0], [0, 0, 0], 2, r"rewards \(2,\) and group_ids \(3,\)"),
    ],
)
def test_pass_at_k_arguments_that_do_not_fit_are_errors(rewards, ids, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k_advantages(torch.tensor(rewards), ids, k)


@pytest.mark.parametrize(
    ("rewards", "ids", "bounds", "message"),
    [
        ([1.0, 0.0, 1.0], [1, 1, 2], {}, r"groups \[2\] have one response each"),
        ([1.0, torch.inf], [1, 1], {}, r"rewards are not finite at rows \[1\]"),
        ([1.0, 0.0], [1], {}, r"rewards \(2,\) and group_ids \(1,\)"),
        ([1.0, 0.0], [1, 1], {"low": 0.8, "high": 0.2}, "low is 0.8 and high is 0.2"),
        ([1.0, 0.0], [1, 1], {"low": math.nan}, "low is nan"),
    ],
)
def test_filter_arguments_that_do_not_fit_are_errors(rewards, ids, bounds, message):
    with pytest.raises(ValueError, match=message):
        informative_groups(torch.tensor(rewards), ids, **bounds)


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_correct_responses_weigh_a_tenth_of_wrong_ones(wrong):
    rewards = torch.tensor([1.0, wrong, wrong], dtype=torch.float64)
    assert positive_downweighted_advantages(rewards).tolist() == [0.1, -1.0, -1.0]
    assert positive_downweighted_advantages(rewards, positive=1, negative=0.5).tolist() == [1.0, -0.5, -0.5]


def test_downweighted_positives_refuse_rewards_that_are_not_right_or_wrong_and_weights_below_zero():
    with pytest.raises(ValueError, match=r"rewards has values \[0.5\] at rows \[1\], expected -1 or 0 or 1"):
        positive_downweighted_advantages(torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match=r"rewards has values \[nan\] at rows \[0\]"):
        positive_downweighted_advantages(torch.tensor([torch.nan, 1.0]))
    with pytest.raises(ValueError, match=r"rewards has shape \(1, 2\), expected \[B\]"):
        positive_downweighted_advantages(torch.ones(1, 2))
    with pytest.raises(ValueError, match="negative is -1.0, expected a finite number of at least 0"):
        positive_downweighted_advantages(torch.ones(2), negative=-1.0)
    with pytest.raises(ValueError, match="positive is nan"):
        positive_downweighted_advantages(torch.ones(2), positive=math.nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_advantages_have_the_rewards_floating_type_and_no_gradient(dtype):
    rewards = torch.tensor([1, 0, 0, 1]).to(dtype)
    if rewards.is_floating_point():
        rewards.requires_grad_()
    expected = dtype if dtype.is_floating_point else torch.get_default_dtype()
    ids = [1, 1, 1, 1]
    for found in (group_advantages(rewards, ids), pass_at_k_advantages(rewards, ids, 2),
                  positive_downweighted_advantages(rewards)):
        assert found.dtype == expected and not found.requires_grad
