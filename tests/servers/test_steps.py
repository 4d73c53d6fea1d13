"""Steps that a real vLLM server draws with stop strings are those of the policy, token by token."""

from __future__ import annotations

import pytest

SEPARATORS = ("1", "\n", "21")
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def results(found_by) -> dict:
    """What tests/helpers/step_server_worker.py has found, with a server that is started once."""
    return found_by("step_server_worker")


@pytest.mark.parametrize("separator", SEPARATORS)
def test_greedy_steps_are_those_of_the_in_process_engine(results: dict, separator: str):
    assert results[separator]["greedy_same"] == 40


@pytest.mark.parametrize("separator", SEPARATORS)
def test_tokens_and_log_probabilities_of_solutions_drawn_by_steps_agree(results: dict, separator: str):
    found = results[separator]
    assert found["drawn"] > 100 and found["with_every_logprob"] == found["drawn"]
    assert found["largest_gap"] < 1e-3


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_stop_string_ends_a_response_with_its_last_token_and_changes_nothing_before(results: dict, separator: str):
    found = results[separator]
    assert found["beginnings"] == found["asked"] and found["contained"] == found["met"]
    assert found["met"] > 10
