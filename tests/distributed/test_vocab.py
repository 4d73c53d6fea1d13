"""The vocabulary split over two gloo processes."""

import pytest
import torch
from helpers.vocab_cases import CASES, run_case

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def split_results(two) -> list[dict]:
    return two.run("helpers.vocab_cases:split_results")


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case[:2]))
def test_values_and_gradients_of_two_processes_are_those_of_the_unsplit_vocabulary(split_results, case):
    """Every process has the same values and hidden states' gradients, and its columns' gradient."""
    head, _, dtype = case
    expected, parts = run_case(head, dtype, 0, None, **CASES[case]), [results[case] for results in split_results]
    for value in expected.keys() - {"gradient"}:
        assert torch.equal(parts[0][value], parts[1][value]), f"the processes disagree on {value}"
        torch.testing.assert_close(parts[0][value], expected[value])
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), expected["gradient"])
