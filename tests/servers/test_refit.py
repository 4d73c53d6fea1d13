"""Trained weights in a real vLLM server: the same numbers as the trainer's after each push, and one step off."""

import functools
import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
ADAPTERS = ["lora.rank=4", "generation.refit.lora=adapter"]


@pytest.fixture(scope="module")
def found(found_by):
    """found(overrides): what tests/helpers/refit_worker.py has found, with its own server."""
    return functools.cache(functools.partial(found_by, "refit_worker"))


@pytest.fixture(scope="module")
def results(found) -> dict:
    return found()


@pytest.mark.parametrize("overrides", [[], ADAPTERS], ids=["whole weights", "adapters alone"])
def test_after_each_refit_greedy_texts_and_log_probabilities_are_the_trainers(found, overrides: list[str]):
    results = found(*overrides)
    for version, push in enumerate(results["pushes"]):
        assert push["greedy_same"] == 200
        assert push["largest_gap"] < 1e-3
        assert push["versions"] == [version]
    texts = [push["greedy"] for push in results["pushes"]]
    assert all(one != other for one, other in zip(texts, texts[1:], strict=False))


def test_a_refit_leaves_one_folder_and_the_same_version_is_not_sent_again(results: dict):
    assert [push["folders"] for push in results["pushes"]] == [[f"version_{v:05d}"] for v in range(4)]
    assert results["again_s"] < 0.01


@pytest.mark.parametrize("overrides", [[], ADAPTERS], ids=["whole weights", "adapters alone"])
def test_a_server_that_was_killed_comes_back_with_the_weights_of_the_last_refit(found, overrides: list[str]):
    results = found(*overrides)
    assert results["killed"]["starts"] == 1 and results["killed"]["samples"] == 1200
    assert results["killed"]["largest_gap"] < 1e-3


def test_responses_of_weights_that_are_not_the_runs_are_refused(results: dict):
    assert "has the weights \"somebody's\" where" in results["tampered"]


AHEAD = [
    "generation=vllm", "generation.one_step_off=true", "grpo.sampler_correction=tis", "~arms",
    "replicate_baseline=false", "grpo.iterations=3",
    "grpo.problems_per_iteration=16", "grpo.minibatch_size=40", "sft.steps=20", "sft.optimizer.warmup_steps=2",
    "data.arithmetic.train_problems=64", "data.arithmetic.test_problems=16", "evaluation.rollouts=1",
    "evaluation.samples=2", "guards.truncated.ceiling=null",
]  # fmt: skip


def test_a_run_one_step_off_trains_on_samples_of_the_policy_before_with_its_weights(vllm_environment, tmp_path):
    train = [sys.executable, "-m", "nemo_edo", "train", "--config-name", "quickstart", f"output_dir={tmp_path}"]
    done = subprocess.run([*train, *AHEAD], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    collections = [line for line in lines if line["kind"] == "collection"]
    assert [(line["policy_version"], line["staleness"]) for line in collections] == [(0, 0), (0, 1), (1, 1)]
    fresh, *stale = [line["sampler_gap"] for line in collections]
    assert fresh < 1e-4 < min(stale)  # the policy has moved since
    assert sum(line["kind"] == "train_step" for line in lines if line.get("arm") == "policy") == 3 * 4
