"""Converts a Skywork-o1-Open-PRM folder to one that vLLM can serve, with exactly the same scores.

vLLM knows a reward model whose head is ``score.2(relu(score.0(h)))``, but not Skywork's, which is v h + b. Two rows of
``score.0`` are (v, b) and (-v, -b), the others zero, and ``score.2`` subtracts the second's output from the first's:
relu(x) - relu(-x) = x. One of the two is zero, so that nothing is rounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_edo.errors import UserError

SERVED = "Qwen2ForRewardModel"
"""vLLM's name for a head of two layers with one output."""
_HEAD = "v_head."
_WEIGHT, _BIAS = f"{_HEAD}summary.weight", f"{_HEAD}summary.bias"
_ADDED = "model-score.safetensors"


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
            # The scores do not use the language model's output layer.
            tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("lm_head.")}
        head |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
        if tensors:
            save_file(tensors, out / shard.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, shard.name)
    if set(head) != {_WEIGHT, _BIAS}:
        raise UserError(f"{folder}: its weights {sorted(head)} are not those of Skywork's head, {_WEIGHT} and {_BIAS}")
    weight, bias = head[_WEIGHT], head[_BIAS]  # v [1, D] and b [1]
    width = weight.shape[1]
    first, offset, second = (torch.zeros(shape, dtype=weight.dtype) for shape in ((width, width), width, (1, width)))
    first[0], first[1] = weight[0], -weight[0]
    offset[0], offset[1] = bias[0], -bias[0]
    second[0, 0], second[0, 1] = 1.0, -1.0
    scores = {"score.0.weight": first, "score.0.bias": offset, "score.2.weight": second,
              "score.2.bias": torch.zeros(1, dtype=weight.dtype)}  # fmt: skip
    save_file(scores, out / _ADDED, metadata={"format": "pt"})
    places |= dict.fromkeys(scores, _ADDED)
    index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # names code in the folder, which is not copied
    config["architectures"] = [SERVED]
    for name, value in (("model.safetensors.index.json", index), ("config.json", config)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".jinja", ".model") and not (out / path.name).exists():
            shutil.copy(path, out / path.name)  # the tokenizer's
    return out
