"""How pooling servers are started, how their answers are read, and a Skywork folder in the form that vLLM serves."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nemo_edo.config import ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.reward_models.formats import Encoded, read_reward_folder
from nemo_edo.reward_models.vllm_pooling import build_reward_replicas, read_scores, write_servable
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


def served(folder: Path, work: Path, gpus: int = 0, **settings) -> tuple[Path, list[str]]:
    """The model's folder and the command line of its only server."""
    [replica] = build_reward_replicas(read_reward_folder(folder), ServersConfig(**settings), work, gpus)
    return replica.model_folder, replica.api.command(replica.model_folder, 8000)


def test_a_server_pools_this_model_on_this_machine_with_the_configs_python_and_arguments(folders, tmp_path):
    settings = {"python": "/x/python", "tensor_parallel_size": 2, "arguments": ["--seed", "7"]}
    for gpus, of_machine in ((0, "--dtype float32 --enforce-eager"), (2, "--dtype bfloat16 --tensor-parallel-size 2")):
        command = " ".join(served(folders["decoder"], tmp_path, gpus, **settings)[1])
        assert command.startswith("/x/python -m vllm.entrypoints.openai.api_server")
        assert command.endswith('--pooler-config {"task": "token_classify"} --seed 7')
        for part in (f"--model {folders['decoder']}", "--runner pooling", "--host 127.0.0.1", "--port 8000",
                     "--middleware require_key.RequireKey", *of_machine.split(" --")):
            assert part in command


def test_a_qwen_server_pools_at_its_tokenizers_step_token_and_a_skywork_one_loads_a_converted_copy(folders, tmp_path):
    _, command = served(folders["qwen"], tmp_path)
    pooler = json.loads(command[command.index("--pooler-config") + 1])
    tokenizer = json.loads((folders["qwen"] / "tokenizer.json").read_text())
    [step_id] = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<extra_0>"]
    assert pooler == {"tok_pooling_type": "STEP", "step_tag_id": step_id}
    copy, _ = served(folders["skywork"], tmp_path)
    assert json.loads((copy / "config.json").read_text())["architectures"] == ["Qwen2ForRewardModel"]
    assert copy == tmp_path / "served"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_head_gives_the_values_of_skyworks(folders, tmp_path, dtype):
    folder = folders["skywork"]
    converted = load_file(write_servable(folder, tmp_path / "out") / "model-score.safetensors")
    original = load_file(folder / "model.safetensors")
    hidden = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = {name: tensor.to(dtype) for name, tensor in {**original, **converted}.items()}
    expected = F.linear(hidden, w["v_head.summary.weight"], w["v_head.summary.bias"])
    inner = F.relu(F.linear(hidden, w["score.0.weight"], w["score.0.bias"]))
    found = F.linear(inner, w["score.2.weight"], w["score.2.bias"])
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    assert (expected < 0).any() and (expected > 0).any()


def test_converted_folder_holds_every_weight_but_the_heads_and_the_output_layers_of_two_files(folders, tmp_path):
    folder = folders["skywork"]
    original = load_file(folder / "model.safetensors")
    sharded = Path(shutil.copytree(folder, tmp_path / "sharded"))
    (sharded / "model.safetensors").unlink()
    first = {name: value for name, value in original.items() if name.startswith(("v_head", "model.layers.0"))}
    rest = {name: value for name, value in original.items() if name not in first}
    for number, part in ((1, first), (2, rest)):
        save_file(part, sharded / f"model-0000{number}-of-00002.safetensors")
    out = write_servable(sharded, tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        assert all(index[name] == path.name for name in tensors)
        found |= tensors
    kept = {name for name in original if name.startswith("model.")}
    added = {f"score.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
    assert set(found) == set(index) == kept | added
    assert all(torch.equal(found[name], original[name]) for name in kept)
    with pytest.raises(UserError, match="v_head.summary.weight"):
        write_servable(folders["qwen"], tmp_path / "none")
