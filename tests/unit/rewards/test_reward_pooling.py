"""What is asked of a pooling server, and what is made of its answers."""

from __future__ import annotations

import json
import math

import pytest

from nemo_edo.config import ServersConfig
from nemo_edo.http_client import Fault
from nemo_edo.rewards.pooling_server import MODEL_NAME, VLLMPooling, build_reward_replicas, read_scores
from nemo_edo.rewards.reward_formats import Encoded, read_reward_folder
from tests.helpers.reward_models import write_own_reward_model, write_qwen_prm, write_skywork_prm

PART = Encoded((5, 6, 7, 8), (1, 3))


def answer(rows) -> dict:
    return {"data": [{"index": 0, "data": rows}]}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_row_for_each_token_is_read_at_the_steps_and_one_for_each_step_as_it_is():
    tokens = read_scores(answer([[0.0], [1.0], [2.0], [-3.0]]), PART, whole=False)
    assert tokens == pytest.approx((sigmoid(1), sigmoid(-3)))
    steps = read_scores(answer([[0.5, 1.0], [2.0, -1.0]]), PART, whole=False)
    assert steps == pytest.approx((sigmoid(0.5), sigmoid(-3)))  # the softmax over (wrong, right)


def test_an_encoders_answer_is_one_row_for_the_sequence():
    assert read_scores(answer([2.0]), Encoded((5, 6), (1,)), whole=True) == pytest.approx((sigmoid(2),))


def test_scores_of_large_logits_are_the_ends_of_the_interval():
    assert read_scores(answer([[900.0], [-900.0]]), PART, whole=False) == (1.0, 0.0)


@pytest.mark.parametrize("body", [
    None, {}, {"data": []}, answer(None), answer([[0.0]]), answer([[0.0], [1.0], [2.0]]), answer([[math.nan], [0.0]]),
    answer([["1"], [0.0]]), answer([[True], [False]]), answer([[1, 2, 3], [1, 2, 3]]), answer([0.0, 1.0]),
    {"data": [{"data": [[0.0], [1.0]]}] * 2},
])  # fmt: skip
def test_an_answer_that_is_none_is_a_fault(body):
    with pytest.raises(Fault, match="/pooling"):
        read_scores(body, PART, whole=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"qwen": write_qwen_prm(root / "qwen"), "skywork": write_skywork_prm(root / "skywork"),
            "own": write_own_reward_model(root / "own")}


def command_of(replica) -> list[str]:
    return VLLMPooling().command(replica._launch, replica.model_folder, 8000)


def test_servers_that_are_started_pool_behind_their_key_which_no_command_line_holds(folders, tmp_path):
    replicas = build_reward_replicas(read_reward_folder(folders["own"]), ServersConfig(replicas=2), tmp_path, gpus=0)
    for replica in replicas:
        command = command_of(replica)
        options = dict(zip(command[3:], command[4:], strict=False))
        assert options["--runner"] == "pooling" and options["--served-model-name"] == MODEL_NAME
        assert options["--middleware"] == "require_key.RequireKey"
        assert options["--dtype"] == "float32" and options["--model"] == str(folders["own"])
        assert json.loads(options["--pooler-config"]) == {"task": "token_classify"}
        assert not any(replica._key in part for part in command)
        environment = VLLMPooling().environment(replica._launch, replica._key)
        assert environment["VLLM_API_KEY"] == replica._key and environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert len({replica._launch.log for replica in replicas}) == 2


def test_the_command_line_of_a_reward_models_server_is_this_one(folders, tmp_path):
    settings = ServersConfig(python="/x/python", tensor_parallel_size=2, arguments=["--seed", "7"])
    machine = {
        0: ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"],
        2: ["--dtype", "bfloat16", "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85"],
    }
    for gpus, of_machine in machine.items():
        [replica] = build_reward_replicas(read_reward_folder(folders["own"]), settings, tmp_path, gpus)
        common = ["--model", str(folders["own"]), "--served-model-name", "reward_model", "--runner", "pooling",
                  "--host", "127.0.0.1", "--port", "8000", "--max-num-seqs", "256", "--middleware",
                  "require_key.RequireKey", "--disable-uvicorn-access-log"]  # fmt: skip
        command, given = command_of(replica), ["--pooler-config", '{"task": "token_classify"}', "--seed", "7"]
        assert command[:3] == ["/x/python", "-m", "vllm.entrypoints.openai.api_server"] and command[-4:] == given
        assert sorted(command[3:-4]) == sorted(common + of_machine)


def test_gpus_are_dealt_out_among_the_replicas(folders, tmp_path):
    settings = ServersConfig(replicas=2, tensor_parallel_size=2, first_gpu=1)
    replicas = build_reward_replicas(read_reward_folder(folders["own"]), settings, tmp_path, gpus=8)
    assert [replica._launch.gpus for replica in replicas] == [(1, 2), (3, 4)]
    assert "bfloat16" in command_of(replicas[0])


def test_a_qwen_server_is_told_the_step_token_of_the_folders_own_tokenizer(folders, tmp_path):
    [replica] = build_reward_replicas(read_reward_folder(folders["qwen"]), ServersConfig(), tmp_path, gpus=0)
    command = command_of(replica)
    pooler = json.loads(command[command.index("--pooler-config") + 1])
    tokenizer = json.loads((folders["qwen"] / "tokenizer.json").read_text())
    [step_id] = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<extra_0>"]
    assert pooler == {"tok_pooling_type": "STEP", "step_tag_id": step_id}


def test_a_skywork_server_loads_a_converted_copy(folders, tmp_path):
    [replica] = build_reward_replicas(read_reward_folder(folders["skywork"]), ServersConfig(), tmp_path, gpus=0)
    assert replica.model_folder == tmp_path / "served"
    assert json.loads((tmp_path / "served" / "config.json").read_text())["architectures"] == ["Qwen2ForRewardModel"]


def test_servers_at_urls_get_the_environments_key(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "secret")
    settings = ServersConfig(urls=["http://node7:8000"], api_key_variable="REWARD_KEY")
    [replica] = build_reward_replicas(read_reward_folder(folders["skywork"]), settings, tmp_path, gpus=0)
    assert (replica.url, replica.headers) == ("http://node7:8000", {"Authorization": "Bearer secret"})
    assert not replica.is_local and not list(tmp_path.iterdir())
