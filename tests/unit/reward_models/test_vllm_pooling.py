"""How pooling servers are started, and how their answers are read."""

import json
import math

import pytest
import torch

from nemo_edo.config import ServersConfig
from nemo_edo.reward_models.formats import Encoded, read_reward_folder
from nemo_edo.reward_models.vllm_pooling import build_reward_replicas, read_scores
from nemo_edo.utils.http import Fault

PART = Encoded((5, 6, 7, 8), (1, 3))


def answer(rows) -> dict:
    return {"data": [{"index": 0, "data": rows}]}


@pytest.mark.parametrize(("rows", "part", "whole", "logits"), [
    ([[0.0], [1.0], [2.0], [-3.0]], PART, False, (1, -3)),  # a row for each token, read at the steps
    ([[0.5, 1.0], [2.0, -1.0]], PART, False, (0.5, -3)),  # a row for each step: the softmax over (wrong, right)
    ([2.0], Encoded((5, 6), (1,)), True, (2,)),  # an encoder's one row for the sequence
    ([[900.0], [-900.0]], PART, False, (math.inf, -math.inf)),
])
def test_scores_are_read_from_rows_of_tokens_of_steps_and_of_a_sequence(rows, part: Encoded, whole: bool, logits):
    expected = torch.tensor(logits, dtype=torch.float64).sigmoid().tolist()
    assert read_scores(answer(rows), part, whole=whole) == pytest.approx(expected)


@pytest.mark.parametrize("body", [
    None, {}, {"data": []}, answer(None), answer([[0.0]]), answer([[0.0], [1.0], [2.0]]), answer([[math.nan], [0.0]]),
    answer([["1"], [0.0]]), answer([[1, 2, 3], [1, 2, 3]]), answer([0.0, 1.0]),
    {"data": [{"data": [[0.0], [1.0]]}] * 2},
])  # fmt: skip
def test_any_other_answer_is_a_fault(body):
    with pytest.raises(Fault, match="/pooling"):
        read_scores(body, PART, whole=False)


def started(folder, settings: ServersConfig, work, gpus: int = 0) -> list:
    return build_reward_replicas(read_reward_folder(folder), settings, work, gpus)


def command_of(replica) -> list[str]:
    return replica.api.command(replica.model_folder, 8000)


def test_a_server_pools_this_model_on_this_machine_with_the_configs_python_and_arguments(folders, tmp_path):
    settings = ServersConfig(python="/x/python", tensor_parallel_size=2, arguments=["--seed", "7"])
    for gpus, of_machine in ((0, "--dtype float32 --enforce-eager"), (2, "--dtype bfloat16 --tensor-parallel-size 2")):
        [replica] = started(folders["decoder"], settings, tmp_path, gpus)
        command = " ".join(command_of(replica))
        assert command.startswith("/x/python -m vllm.entrypoints.openai.api_server")
        assert command.endswith('--pooler-config {"task": "token_classify"} --seed 7')
        for part in (f"--model {folders['decoder']}", "--runner pooling", "--host 127.0.0.1", "--port 8000",
                     "--middleware require_key.RequireKey", *of_machine.split(" --")):
            assert part in command


def test_a_qwen_server_pools_at_its_tokenizers_step_token_and_a_skywork_server_loads_a_converted_copy(
        folders, tmp_path):
    [replica] = started(folders["qwen"], ServersConfig(), tmp_path)
    command = command_of(replica)
    pooler = json.loads(command[command.index("--pooler-config") + 1])
    tokenizer = json.loads((folders["qwen"] / "tokenizer.json").read_text())
    [step_id] = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<extra_0>"]
    assert pooler == {"tok_pooling_type": "STEP", "step_tag_id": step_id}
    [replica] = started(folders["skywork"], ServersConfig(), tmp_path)
    served = json.loads((replica.model_folder / "config.json").read_text())
    assert replica.model_folder == tmp_path / "served" and served["architectures"] == ["Qwen2ForRewardModel"]
