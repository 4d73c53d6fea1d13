"""The samples browser's data: what is in the page of what a run has stored."""

import base64
import gzip
import json

import pytest
from helpers.run_folder import write_run_folder

from nemo_edo.report import sample_browser as module
from nemo_edo.report.comparison import compare
from nemo_edo.report.run_set import one_run
from nemo_edo.report.sample_browser import sample_browser
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, ScoredRollout

SAMPLED = 8


def store(folder, arm: str, iteration: int, kind: str, each: int, text: str) -> None:
    scored = [ScoredRollout(Rollout(f"test-{p}", s, (1,), (2,), (-1.0,), f"{text} p{p} s{s}", s % 3 > 0, 0, s),
                            float(s % 2), str(s) if s else None, True, "") for p in range(3) for s in range(each)]
    RolloutStore(folder / "evaluations" / arm / kind).write(iteration, scored)


@pytest.fixture
def folder(tmp_path):
    """Three problems; one arm of four iterations, with responses of its final and of an earlier evaluation."""
    path = write_run_folder(tmp_path / "run", arms=("grpo",), iterations=4, problems=3)
    store(path, "warmup", 0, "sampled", 2, "start")
    store(path, "grpo", 4, "greedy", 1, "best")
    store(path, "grpo", 4, "sampled", SAMPLED, "final")
    store(path, "grpo", 2, "sampled", SAMPLED, "earlier")
    return path


def unpacked(found) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(found.packed)))


def test_every_problem_has_every_response_of_the_final_evaluations(folder):
    found = sample_browser(compare(one_run(folder)))
    data = unpacked(found)
    assert data["policies"] == [
        {"label": "Start (before RL)", "trained": False}, {"label": "GRPO", "trained": True}]
    assert [problem["id"] for problem in data["problems"]] == ["test-0", "test-1", "test-2"]
    start, grpo = data["problems"][1]["responses"]
    assert grpo == [[True, 0.0, False, None, "best p1 s0"], *(
        [False, float(s % 2), s % 3 > 0, str(s) if s else None, f"final p1 s{s}"] for s in range(SAMPLED))]
    assert len(start) == 2
    assert (found.problems, found.each, found.complete) == (3, SAMPLED, True)


def test_what_does_not_fit_is_left_out_evenly_and_the_greedy_response_stays(folder, monkeypatch):
    comparison, kept = compare(one_run(folder)), []
    while not kept or kept[-1] != (1, 1):
        found = sample_browser(comparison)
        assert len(found.packed) <= module.MOST_CHARACTERS
        kept.append((found.problems, found.each))
        for problem in unpacked(found)["problems"]:
            assert [one[4].split()[0] for one in problem["responses"][1]] == ["best", *["final"] * found.each]
        assert found.complete == (len(kept) == 1)
        monkeypatch.setattr(module, "MOST_CHARACTERS", len(found.packed) - 1)
    assert kept == [(3, 8), (3, 4), (3, 2), (3, 1), (1, 1)]


def test_a_run_without_stored_responses_has_none_and_a_policy_with_damaged_ones_is_left_out_and_named(folder, tmp_path):
    assert sample_browser(compare(one_run(write_run_folder(tmp_path / "other", arms=("grpo",), problems=3)))) is None
    shard = folder / "evaluations" / "grpo" / "sampled" / "iter_00004" / "rank_0_of_1.parquet"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.warns(UserWarning, match=f"{shard} is missing or damaged"):
        found = sample_browser(compare(one_run(folder)))
    assert [one["trained"] for one in unpacked(found)["policies"]] == [False]
