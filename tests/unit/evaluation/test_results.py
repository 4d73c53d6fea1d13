"""The record of an evaluation, and its metrics' names and order."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.one_run import evaluation

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import (
    Evaluation,
    load_evaluation,
    newly_solved_and_lost,
)


def test_means_are_of_what_was_measured_with_their_intervals():
    found = Evaluation("a", ("x", "y"), {"response_length": (np.array([1.0, 5.0]), np.array([2.0, 2.0])),
                                         "entropy": (np.zeros(2), np.zeros(2))})  # fmt: skip
    assert found.means(resamples=400, seed=0) == {"response_length": {"mean": 1.5, "low": 0.5, "high": 2.5}}
    assert (found.has("entropy"), found.mean("response_length")) == (False, 1.5)
    assert np.isnan(found.mean("entropy")) and np.isnan(found.mean("kl"))


def written(folder: Path, record: dict) -> Path:
    (folder / "a.json").write_text(json.dumps(record))
    return folder / "a.json"


@pytest.mark.parametrize("change", [
    {"sum": [1.0]}, {"sum": [None] * 2}, {"sum": ["x"] * 2}, {"count": [-1] * 2}, {"sum": [float("nan"), 1.0]}])
def test_an_evaluation_is_read_back_as_written_and_malformed_numbers_of_problems_are_named(tmp_path, change):
    record = evaluation("a", 2, accuracy=[0, 1]).record()
    assert load_evaluation(written(tmp_path, record)).record() == record
    record["metrics"]["accuracy"] |= change
    with pytest.raises(UserError, match="a.json: "):
        load_evaluation(written(tmp_path, record))


def test_newly_solved_and_lost_count_full_rewards_that_came_and_went_problem_by_problem():
    before = evaluation("start", "abcd", greedy_accuracy=[1.0, 1.0, 0.0, 0.5])
    after = evaluation("grpo", "dcba", greedy_accuracy=[1.0, 1.0, 0.9, 1.0])
    assert newly_solved_and_lost(before, after) == {"newly_solved": 2.0, "lost": 1.0}
    assert newly_solved_and_lost(after, before) == {"newly_solved": 1.0, "lost": 2.0}
    with pytest.raises(ValueError, match="2 problems .*'d', 'e'"):
        newly_solved_and_lost(before, evaluation("other", "abce", greedy_accuracy=[1.0] * 4))
