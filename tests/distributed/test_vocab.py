"""The vocabulary split over two gloo processes."""

import pytest
import torch
from helpers.vocab_cases import CASES, run_case

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_values_and_gradients_of_two_processes_are_those_of_the_unsplit_vocabulary(two):
    """Every process has the same values and hidden states' gradients, and its columns' gradient."""
    found = two.run("helpers.vocab_cases:split_results")
    for case, options in CASES.items():
        expected, parts = run_case(case[0], 0, None, **options), [results[case] for results in found]
        for value in expected.keys() - {"gradient"}:
            assert torch.equal(parts[0][value], parts[1][value]), f"{case}: the processes disagree on {value}"
            torch.testing.assert_close(parts[0][value], expected[value])
        torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), expected["gradient"])
