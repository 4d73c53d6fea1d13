"""Responses of a real vLLM server: those of the policy, all of them, whatever happens to the server."""

import os

import pytest

ALL_KILLS = "NEMO_EDO_KILL_SERVERS"
"""The environment variable that asks for ten kills in 2,000 samples, which take a quarter of an hour."""
SAMPLES, KILLS = (2000, 10) if os.environ.get(ALL_KILLS) else (300, 1)
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def results(found_by) -> dict:
    """What tests/helpers/server_worker.py has found, with two servers that are started once."""
    return found_by("server_worker", SAMPLES, KILLS)


def test_greedy_texts_of_200_problems_are_those_of_the_in_process_engine(results: dict):
    assert results["trainer"]["greedy_same"] == 200
    assert results["trainer"]["greedy_distinct"] > 20


def test_log_probabilities_of_samples_are_the_trainers(results: dict):
    assert results["trainer"]["largest_gap"] < 1e-3


def test_a_requests_seed_fixes_its_response_whatever_is_generated_with_it(results: dict):
    assert results["trainer"]["repeated_same"] == 256
    assert results["trainer"]["sampled_distinct"] > 200


def test_nothing_but_a_servers_health_is_told_without_its_key(results: dict):
    exposed = results["exposure"]
    statuses = exposed["statuses"]
    assert statuses.pop("/health") == 200
    assert set(statuses.values()) == {401} and exposed["wrong_key"] == 401
    assert exposed["listening"] == ["127.0.0.1"]
    assert not exposed["key_in_arguments"] and not exposed["key_in_log"] and exposed["key_length"] > 40
    assert exposed["insecure_serialization"] == "0"


def test_two_replicas_share_the_requests(results: dict):
    spread = results["spread"]
    assert spread["whole"] and sum(spread["answers"]) == 400 and min(spread["answers"]) > 100


def test_a_stop_string_ends_a_response_with_its_last_token_and_changes_nothing_before(results: dict):
    for found in results["stopped"]:
        assert found["beginnings"] == found["asked"] and found["contained"] == found["met"] > 10
        assert found["largest_gap"] < 1e-3


def test_a_killed_server_is_started_again_and_no_sample_is_lost_or_generated_twice(results: dict):
    killed = results["killed"]
    assert (killed["kills"], killed["starts"]) == (KILLS, 1 + KILLS)
    assert killed["whole"] and killed["distinct"] == killed["with_every_logprob"] == killed["samples"] == SAMPLES


def test_no_process_of_a_server_outlives_the_engine(results: dict):
    assert results["left_running"] == 0
