"""Converts a Skywork-o1-Open-PRM folder to one that vLLM can serve, with exactly the same scores.

vLLM knows a reward model whose head is ``score.2(relu(score.0(h)))``, but not Skywork's, which is v h + b. Two rows of
``score.0`` are (v, b) and (-v, -b), the others zero, and ``score.2`` subtracts the second's output from the first's:
relu(x) - relu(-x) = x. One of the two is zero, so that nothing is rounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_edo.errors import UserError
from nemo_edo.utils.files import replacing

SERVED = "Qwen2ForRewardModel"
"""vLLM's name for a head of two layers with one output."""
_HEAD = "v_head."
_WEIGHT, _BIAS = f"{_HEAD}summary.weight", f"{_HEAD}summary.bias"
_ADDED = "model-score.safetensors"
_INDEX = "model.safetensors.index.json"
_UNUSED = ("lm_head.",)
"""The scores do not use the language model's output layer."""
_DROPPED = ("auto_map",)
"""Config keys that name code in the folder, which is not copied."""


def write_servable(folder: Path, out: Path) -> Path:
    """Writes the folder (of safetensors), in the form that vLLM serves, to ``out``, which it replaces; returns ``out``.

    Copies all weights except the output layer's. Raises UserError for a folder without the head's weights.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise UserError(f"{folder} has no *.safetensors to convert for vLLM; save the model in that format")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    places: dict[str, str] = {}
    head: dict[str, Tensor] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith(_UNUSED)}
        head |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
        if tensors:
            save_file(tensors, out / shard.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, shard.name)
    if set(head) != {_WEIGHT, _BIAS}:
        raise UserError(f"{folder}: its weights {sorted(head)} are not those of Skywork's head, {_WEIGHT} and {_BIAS}")
    scores = _score_layers(head[_WEIGHT], head[_BIAS])
    save_file(scores, out / _ADDED, metadata={"format": "pt"})
    places |= dict.fromkeys(scores, _ADDED)
    _write_json(out / _INDEX, {"metadata": {}, "weight_map": dict(sorted(places.items()))})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _DROPPED}
    _write_json(out / "config.json", {**kept, "architectures": [SERVED]})
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".jinja", ".model") and not (out / path.name).exists():
            shutil.copy(path, out / path.name)  # the tokenizer's
    return out


def _score_layers(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """score.0 and score.2 for v [1, D] and b [1], in their dtype."""
    width = weight.shape[1]
    first, offset, second = (torch.zeros(shape, dtype=weight.dtype) for shape in ((width, width), width, (1, width)))
    first[0], first[1] = weight[0], -weight[0]
    offset[0], offset[1] = bias[0], -bias[0]
    second[0, 0], second[0, 1] = 1.0, -1.0
    return {
        "score.0.weight": first,
        "score.0.bias": offset,
        "score.2.weight": second,
        "score.2.bias": torch.zeros(1, dtype=weight.dtype),
    }


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
