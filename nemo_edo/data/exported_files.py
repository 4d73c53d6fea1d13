"""Model folders that are written: the files of an export other than its weights (one configuration, and the source's
other files), and a folder's first and last layers, for a comparison where the whole has no room."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_edo.data.model_folder import INDEX, WEIGHTS, read_headers, weight_files
from nemo_edo.utils.files import read_object

COPIED = re.compile(r".*\.(json|jinja|model|txt|tiktoken|py)|(licen[cs]e|notice|copying|use_policy).*", re.IGNORECASE)
"""Names of files that come along: tokenizer, template, generation config, licence, code."""
NOT_COPIED = re.compile(r"config\.json|.*\.index\.json|adapter_.*")
TEMPLATES = "additional_chat_templates"
LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")
"""Where a tensor's name has its layer's number."""


def write_files(source: Path, out: Path, config: Any, dtype: str) -> None:
    """Writes into ``out`` what is not weights. config: transformers' of ``source``; dtype: of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and COPIED.fullmatch(file.name) and not NOT_COPIED.fullmatch(file.name):
            shutil.copyfile(file, out / file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, out / TEMPLATES, copy_function=shutil.copyfile, dirs_exist_ok=True)
    _write(out / "config.json", {**_both_versions(read_object(source / "config.json", ()), config), "dtype": dtype})
    if (out / "tokenizer_config.json").is_file():  # under the names of version 4, which version 5 reads too
        fields = read_object(out / "tokenizer_config.json", ())
        if fields.get("tokenizer_class") == "TokenizersBackend":
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(fields.get("extra_special_tokens"), list):
            fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
        _write(out / "tokenizer_config.json", fields)


def _both_versions(source: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of a config.json that versions 4 and 5 of transformers read alike: version 5's, and those of the
    source and under other names that say the same."""
    now = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    aliases = {alias: now[name] for alias, name in config.attribute_map.items() if name in now}
    same = {name: value for name, value in source.items() if getattr(config, name, None) == value}
    fields = {**aliases, **same, **now}
    for name in ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"):
        fields.pop(name, None)
    if positions := now.get("rope_parameters"):
        if "sliding_attention" in positions:  # of models that have two kinds, as Gemma 3's config has them
            fields["rope_local_base_freq"] = positions["sliding_attention"]["rope_theta"]
            positions = positions["full_attention"]
        elsewhere = {name: positions[name] for name in ("rope_theta", "partial_rotary_factor") if name in positions}
        fields |= elsewhere
        if positions.get("rope_type", "default") != "default":
            fields["rope_scaling"] = {name: value for name, value in positions.items() if name not in elsewhere}
    return fields


def usual_modes(folder: Path) -> None:
    """Gives files the modes that a new one gets: safetensors lets nobody but the owner read."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
    # Lists with an entry for each layer, lists of layers, and numbers of the first layers that are of another kind.
    changed = {**fields, "num_hidden_layers": len(kept)}
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
    (out / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    return kept
