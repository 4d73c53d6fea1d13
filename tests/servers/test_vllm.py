"""Real vLLM servers: their responses are the policy's, after each push of weights, whatever happens to a server."""

import functools
import json
import shutil
from itertools import pairwise

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
WHOLE = ("disk", "generation.servers.replicas=2")
HOW = {
    "whole weights": pytest.param(WHOLE, id="whole weights"),
    "adapters": pytest.param(("disk", "lora.rank=4", "generation.refit.lora=adapter"), id="adapters alone"),
    "nccl": pytest.param(
        ("nccl",), id="nccl", marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")),
}


@pytest.fixture(scope="module")
def found(found_by):
    """found(how): what tests/helpers/vllm_worker.py has found, with its own servers, which are started once."""
    return functools.cache(lambda how: found_by("vllm_worker", *how))


@pytest.fixture
def results(found) -> dict:
    """Of two servers that get whole weights by disk."""
    return found(WHOLE)


def test_a_requests_seed_fixes_its_response_whatever_is_generated_with_it(results: dict):
    assert results["seeds"]["same"] == 256 and results["seeds"]["distinct"] > 200


def test_nothing_but_a_servers_health_is_told_without_its_key(results: dict):
    exposed = results["exposure"]
    statuses = exposed["statuses"].copy()
    assert statuses.pop("/health") == 200
    assert set(statuses.values()) == {401} and exposed["wrong_key"] == 401
    assert exposed["listening"] == ["127.0.0.1"]
    assert not exposed["key_in_arguments"] and not exposed["key_in_log"] and exposed["key_length"] > 40
    assert exposed["insecure_serialization"] == "0"


def test_a_stop_string_ends_a_response_with_its_last_token_and_changes_nothing_before(results: dict):
    for stopped in results["stopped"]:
        assert stopped["beginnings"] == stopped["asked"] and stopped["contained"] == stopped["met"] > 10
        assert stopped["largest_gap"] < 1e-3


@pytest.mark.parametrize("how", HOW.values())
def test_after_each_refit_greedy_texts_and_log_probabilities_are_the_trainers(found, how: tuple):
    """Over a stub of NCCL: vLLM's routes, worker, transfer engine and loading against our sender."""
    pushes = found(how)["pushes"]
    for version, push in enumerate(pushes):
        assert push["greedy_same"] == 200 and len(set(push["greedy"])) > 20
        assert push["largest_gap"] < 1e-3
        assert push["versions"] == [version]
    texts = [push["greedy"] for push in pushes]
    assert all(one != other for one, other in pairwise(texts))
    assert found(how)["left_running"] == 0  # no process of a server outlives the engine


def test_a_refit_leaves_one_folder_and_the_same_version_is_not_sent_again(results: dict):
    assert [push["folders"] for push in results["pushes"]] == [[f"version_{v:05d}"] for v in range(2)]
    assert "has the weights \"somebody's\" where" in results["tampered"]  # its responses are refused
    assert results["again_s"] < 0.01


def test_a_killed_server_comes_back_with_the_last_weights_and_no_sample_is_lost_or_generated_twice(results: dict):
    killed = results["killed"]
    assert killed["starts"] == 1 and killed["largest_gap"] < 1e-3
    assert killed["whole"] and killed["with_every_logprob"] == 1000


@pytest.mark.parametrize("how", [HOW["nccl"]])
def test_a_server_killed_in_the_middle_of_a_broadcast_is_restarted_and_gets_the_weights(found, how: tuple):
    pushes = found(how)["pushes"]
    assert [push["starts"] for push in pushes] == [1, 1, 2]
    assert [push["name"] for push in pushes] == [f"run/{version}" for version in range(3)]


AHEAD = [
    "generation=vllm", "generation.one_step_off=true", "grpo.sampler_correction=tis", "~arms",
    "replicate_baseline=false", "grpo.iterations=3",
    "grpo.problems_per_iteration=16", "grpo.minibatch_size=40", "sft.steps=20", "sft.optimizer.warmup_steps=2",
    "data.arithmetic.train_problems=64", "data.arithmetic.test_problems=16", "evaluation.rollouts=1",
    "evaluation.samples=2", "guards.truncated.ceiling=null",
]  # fmt: skip


def test_a_run_one_step_off_trains_on_samples_of_the_policy_before_with_its_weights(
    vllm_environment, nemo_edo, tmp_path
):
    nemo_edo.succeed("train", "--config-name", "quickstart", f"output_dir={tmp_path}", *AHEAD, limit_s=3000.0)
    lines = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    collections = [line for line in lines if line["kind"] == "collection"]
    assert [(line["policy_version"], line["staleness"]) for line in collections] == [(0, 0), (0, 1), (1, 1)]
    fresh, *stale = [line["sampler_gap"] for line in collections]
    assert fresh < 1e-4 < min(stale)  # the policy has moved since
    assert sum(line["kind"] == "train_step" for line in lines if line.get("arm") == "policy") == 3 * 4
