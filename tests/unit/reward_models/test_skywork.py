"""A Skywork folder as vLLM serves it: the same numbers from a head of two layers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nemo_edo.errors import UserError
from nemo_edo.reward_models.vllm_pooling import write_servable


@pytest.fixture
def folder(folders):
    return folders["skywork"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_head_gives_the_values_of_skyworks(folder, tmp_path, dtype):
    converted = load_file(write_servable(folder, tmp_path / "out") / "model-score.safetensors")
    original = load_file(folder / "model.safetensors")
    hidden = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = {name: tensor.to(dtype) for name, tensor in {**original, **converted}.items()}
    expected = F.linear(hidden, w["v_head.summary.weight"], w["v_head.summary.bias"])
    inner = F.relu(F.linear(hidden, w["score.0.weight"], w["score.0.bias"]))
    found = F.linear(inner, w["score.2.weight"], w["score.2.bias"])
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    assert (expected < 0).any() and (expected > 0).any()


def test_converted_folder_holds_every_weight_but_the_heads_and_the_output_layers_of_two_files(folder, tmp_path):
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


def test_folder_without_skyworks_head_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="Skywork.s head"):
        write_servable(folders["qwen"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no .*safetensors"):
        write_servable(tmp_path / "empty", tmp_path / "out")
