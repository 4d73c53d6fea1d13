"""A model folder's first and last layers as a smaller folder, for a comparison where the whole has no room."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from nemo_edo.data.model_weights import INDEX, WEIGHTS, read_headers, weight_files
from nemo_edo.utils.files import read_object

LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")
"""Where a tensor's name has its layer's number."""


def parameters(folder: Path) -> int:
    """Numbers in the folder's weights, by the headers of its files."""
    return sum(math.prod(tensor.shape) for tensor in read_headers(folder).values())


def write_truncated(folder: Path, out: Path, multiple: int) -> list[int]:
    """Writes config and weights of the first and the last layers, as many in all as the multiple of ``multiple`` that
    is at least four, and returns their numbers. Further layers than the config has (of multi-token prediction) are
    left out."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    fields = read_object(folder / "config.json", ("num_hidden_layers",))
    layers, count = fields["num_hidden_layers"], math.ceil(4 / multiple) * multiple
    kept = sorted({*range(min(count - count // 2, layers)), *range(max(layers - count // 2, 0), layers)})
    places = {layer: str(place) for place, layer in enumerate(kept)}
    weight_map: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    for file in weight_files(folder):
        chosen = {}
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                found = LAYER.search(name)
                if found is None:
                    chosen[name] = tensors.get_tensor(name)
                elif int(found[1]) in places:
                    renamed = name[: found.start(1)] + places[int(found[1])] + name[found.end(1) :]
                    chosen[renamed] = tensors.get_tensor(name)
        if chosen:
            save_file(chosen, out / file.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(chosen, file.name)
    if not (out / WEIGHTS).is_file():
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(_with_layers(fields, kept)), encoding="utf-8")
    return kept


def _with_layers(fields: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The fields of a config.json for these layers alone: lists with an entry for each layer, lists of layers, and
    numbers of the first layers that are of another kind."""
    layers, changed = fields["num_hidden_layers"], {**fields, "num_hidden_layers": len(kept)}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == layers:
            changed[name] = [value[layer] for layer in kept]
    if fields.get("mlp_only_layers"):
        changed["mlp_only_layers"] = [kept.index(layer) for layer in fields["mlp_only_layers"] if layer in kept]
    for name in ("first_k_dense_replace", "max_window_layers"):
        if name in fields:
            changed[name] = sum(layer < fields[name] for layer in kept)
    if fields.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = 0
    return changed
