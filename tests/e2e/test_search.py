"""``nemo-edo search`` solves a run's test problems with any of its policies, stores what it found, and resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HELPER = Path(__file__).parents[1] / "helpers" / "search_worker.py"
ENDED, STOPPED, USER_ERROR = 0, 75, 2


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What tests/helpers/search_worker.py has found."""
    folder = tmp_path_factory.mktemp("search")
    command = [sys.executable, str(HELPER), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def error_of(result: dict) -> str:
    assert result["status"] == USER_ERROR, result
    return result["err"]


def test_a_model_is_evaluated_and_searched_and_every_problem_has_a_result(results: dict):
    assert results["model"]["status"] == ENDED, results["model"]
    assert [row["problem_id"] for row in results["first"]] == [f"test-{number}" for number in range(1, 7)]
    assert "6 problems searched" in results["model"]["out"]
    for row in results["first"]:
        assert 0 < row["response_tokens"] <= 12 and row["response_tokens"] <= row["tokens"]
        assert row["samples"] <= 3 * (1 + 2 * 2) and row["nodes"] <= 1 + row["samples"] and row["iterations"] <= 3
        assert 0 < row["score"] < 1 and row["reward"] in (0, 1)


def test_tokens_of_a_search_are_all_that_the_engine_sampled(results: dict):
    assert results["one_part"]["tokens"] == sum(row["tokens"] for row in results["first"])
    assert results["one_part"]["requests"] >= sum(row["samples"] for row in results["first"])


def test_the_means_are_those_of_the_results(results: dict):
    metrics, rows = results["summary"]["metrics"], results["first"]
    for name, column in (("accuracy", "reward"), ("tokens", "tokens"), ("nodes", "nodes")):
        mean = sum(row[column] for row in rows) / len(rows)
        assert metrics[name]["mean"] == pytest.approx(mean) and metrics[name]["low"] <= mean <= metrics[name]["high"]


def test_trees_of_the_first_problems_are_stored_and_shown_in_the_report(results: dict):
    assert sorted(results["trees"]) == ["warmup.search.test-1.json", "warmup.search.test-2.json"]
    for number, row in zip((1, 2), results["first"], strict=False):
        tree = results["trees"][f"warmup.search.test-{number}.json"]
        assert len(tree["nodes"]) == row["nodes"] and tree["tokens"] == row["tokens"]
        assert tree["nodes"][tree["best"]]["reward"] == row["score"]
    assert results["in_report"] == 6  # of this search and the others of the run, the first ones


def test_what_is_there_is_not_searched_again(results: dict):
    assert (results["again"]["status"], results["again"]["calls"], results["again"]["same"]) == (ENDED, 0, True)


def test_a_search_that_was_stopped_resumes_to_the_same_results(results: dict):
    stopped, went_on = results["stopped"], results["went_on"]
    assert (stopped["status"], stopped["parts"]) == (STOPPED, ["part_00000.parquet"])
    assert "4 of 6 problems have been searched" in stopped["err"]
    assert went_on["status"] == ENDED and went_on["same"]
    assert stopped["tokens"] + went_on["tokens"] == sum(row["tokens"] for row in results["first"])


def test_results_do_not_depend_on_how_many_problems_are_searched_together_but_on_the_seed(results: dict):
    assert results["one_part"]["same"] and not results["other_seed"]["same"]


def test_each_policy_of_a_trained_run_can_be_searched_with(results: dict):
    assert results["train"]["status"] == results["arm"]["status"] == results["warmup"]["status"] == ENDED
    assert len(results["arm"]["rows"]) == len(results["warmup"]["rows"]) == 6
    assert results["arm"]["rows"] != results["warmup"]["rows"]


@pytest.mark.parametrize(("name", "message"), [
    ("no_reward_model", "search.reward_model: give the folder of a process reward model"),
    ("other_settings", "made with another search.width: 2 there and 1 here"),
    ("no_such_arm", "has no arm 'idpo'; it has warmup, entropy_bonus"),
    ("strange", "search takes overrides of search.* and generation.* only, not seed=3"),
    ("no_run", "is not the folder of a run: it has no config.yaml"),
    ("no_room", "the reward model takes 16 tokens; the longest question has"),
])
def test_what_would_stop_it_is_an_error_before_anything_is_done(results: dict, name: str, message: str):
    assert message in error_of(results[name])
    assert not results["no_reward_model"]["begun"]
