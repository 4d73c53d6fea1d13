import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import group_advantages

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
