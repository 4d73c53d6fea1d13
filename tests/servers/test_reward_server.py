"""Process reward models behind real vLLM servers: the scores are those of this process."""

import pytest

MODELS = ("qwen", "skywork", "encoder")
LARGEST_GAP = 2e-3
"""Between probabilities in float32, whose kernels differ between CPUs: 2e-6 with AVX2, and 4.4e-4 has been seen. A step
that is scored at another token, or without a bias, is as far away as two scores are from each other (``spread``)."""
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def results(found_by) -> dict:
    """What tests/helpers/reward_server_worker.py has found, with three servers that are started one after the other."""
    return found_by("reward_server_worker")


@pytest.mark.parametrize("model", MODELS)
def test_served_scores_are_those_of_this_process(results: dict, model: str):
    found = results[model]
    assert max(found["gaps"]) < LARGEST_GAP < 0.05 * found["spread"], (found["instructions"], found["gaps"])
    assert found["scores"] >= 20 and found["distinct"] > 0.8 * found["scores"]


@pytest.mark.parametrize("model", MODELS)
def test_a_server_asks_for_its_key_and_ends_with_the_scoring(results: dict, model: str):
    assert results[model]["without_key"] == 401
    assert not results[model]["left_running"]


def test_code_that_comes_with_a_folder_is_not_brought_to_the_server(results: dict):
    assert [results[model]["copied_code"] for model in MODELS] == [[]] * len(MODELS)
    assert not any(results[model]["code_ran"] for model in MODELS)


def test_a_server_at_a_url_scores_like_this_process_and_outlives_its_client(results: dict):
    found = results["qwen"]
    assert max(found["gaps_by_url"]) < LARGEST_GAP, (found["instructions"], found["gaps_by_url"])
    assert found["outlives_the_client"]
