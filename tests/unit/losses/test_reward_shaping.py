import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import soft_overlong_penalty


def written_out(length: int, max_length: int, cache_length: int) -> float:
    if length <= max_length - cache_length:
        return 0.0
    if length <= max_length:
        return ((max_length - cache_length) - length) / cache_length
    return -1.0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20), sizes=st.tuples(*[st.integers(1, 40)] * 2))
def test_the_penalty_is_the_three_cases_of_its_equation(lengths, sizes):
    cache_length, max_length = sorted(sizes)
    found = soft_overlong_penalty(torch.tensor(lengths), max_length=max_length, cache_length=cache_length)
    expected = torch.tensor([written_out(length, max_length, cache_length) for length in lengths])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_the_penalty_has_the_values_of_the_paper_at_the_ends_of_its_cases():
    lengths = torch.tensor([[0, 16384], [18432, 20480], [20481, 10**9]])
    found = soft_overlong_penalty(lengths, max_length=20480, cache_length=4096)
    assert found.tolist() == [[0.0, 0.0], [-0.5, -1.0], [-1.0, -1.0]]
    assert found.dtype == torch.float32


def test_floating_lengths_keep_their_type():
    found = soft_overlong_penalty(torch.tensor([7.5], dtype=torch.float64), max_length=10, cache_length=10)
    assert found.dtype == torch.float64 and found.item() == -0.75


@pytest.mark.parametrize(
    ("lengths", "max_length", "cache_length", "message"),
    [
        ([1], 10, 0, "cache_length is 0"),
        ([1], 10, -1, "cache_length is -1"),
        ([1], 10, 11, "cache_length is 11 and max_length 10"),
        ([1], float("nan"), 1, "cache_length is 1 and max_length nan"),
        ([1], float("inf"), 1, "cache_length is 1 and max_length inf"),
        ([3, -2], 10, 5, r"lengths has \[-2\]"),
        ([1.0, torch.nan], 10, 5, r"lengths has \[nan\]"),
        ([torch.inf], 10, 5, r"lengths has \[inf\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(lengths, max_length, cache_length, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        soft_overlong_penalty(torch.tensor(lengths), max_length=max_length, cache_length=cache_length)
