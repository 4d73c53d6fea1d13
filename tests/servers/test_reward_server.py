"""Process reward models behind real vLLM servers: the scores are those of this process."""

import pytest

LARGEST_GAP = 2e-3
"""Between probabilities in float32, whose kernels differ between CPUs: 2e-6 with AVX2, and 4.4e-4 has been seen. A step
that is scored at another token, or without a bias, is as far away as two scores are from each other (``spread``)."""
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def results(found_by) -> dict:
    """What tests/helpers/reward_server_worker.py has found, with three servers that are started one after the other."""
    return found_by("reward_server_worker")


@pytest.mark.parametrize("model", ["qwen", "skywork", "encoder"])
def test_served_scores_are_those_of_this_process(results: dict, model: str):
    """And the server asks for its key, ends with the scoring, and gets no code that comes with the folder."""
    found = results[model]
    assert max(found["gaps"]) < LARGEST_GAP < 0.05 * found["spread"], (found["instructions"], found["gaps"])
    assert found["scores"] >= 20 and found["distinct"] > 0.8 * found["scores"]
    assert found["without_key"] == 401 and not found["left_running"]
    assert found["copied_code"] == [] and not found["code_ran"]


def test_a_server_at_a_url_scores_like_this_process_and_outlives_its_client(results: dict):
    found = results["qwen"]
    assert max(found["gaps_by_url"]) < LARGEST_GAP, (found["instructions"], found["gaps_by_url"])
    assert found["outlives_the_client"]
