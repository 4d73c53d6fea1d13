"""Trained weights in a real vLLM server: the same numbers as the trainer's after each push, and one step off."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
NCCL = pytest.param(
    ("nccl",), id="nccl", marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
)
WHOLE = pytest.param(("disk",), id="whole weights")
ADAPTERS = pytest.param(("disk", "lora.rank=4", "generation.refit.lora=adapter"), id="adapters alone")


@pytest.fixture(scope="module")
def found(found_by):
    """found(how): what tests/helpers/refit_worker.py has found, with its own server."""
    return functools.cache(lambda how: found_by("refit_worker", *how))


@pytest.mark.parametrize("how", [WHOLE, ADAPTERS, NCCL])
def test_after_each_refit_greedy_texts_and_log_probabilities_are_the_trainers(found, how: tuple):
    """Over a stub of NCCL: vLLM's routes, worker, transfer engine and loading against our sender."""
    pushes = found(how)["pushes"]
    for version, push in enumerate(pushes):
        assert push["greedy_same"] == 200
        assert push["largest_gap"] < 1e-3
        assert push["versions"] == [version]
    texts = [push["greedy"] for push in pushes]
    assert all(one != other for one, other in zip(texts, texts[1:], strict=False))


@pytest.mark.parametrize("how", [NCCL])
def test_a_server_killed_in_the_middle_of_a_broadcast_is_restarted_and_gets_the_weights(found, how: tuple):
    pushes = found(how)["pushes"]
    assert [push["starts"] for push in pushes] == [1, 1, 1, 2]
    assert [push["name"] for push in pushes] == [f"run/{version}" for version in range(4)]


@pytest.mark.parametrize("how", [WHOLE])
def test_a_refit_leaves_one_folder_and_the_same_version_is_not_sent_again(found, how: tuple):
    results = found(how)
    assert [push["folders"] for push in results["pushes"]] == [[f"version_{v:05d}"] for v in range(3)]
    assert "has the weights \"somebody's\" where" in results["tampered"]  # its responses are refused
    assert results["again_s"] < 0.01


@pytest.mark.parametrize("how", [WHOLE, ADAPTERS])
def test_a_server_that_was_killed_comes_back_with_the_weights_of_the_last_refit(found, how: tuple):
    killed = found(how)["killed"]
    assert killed["starts"] == 1 and killed["samples"] == 1200 and killed["largest_gap"] < 1e-3


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
