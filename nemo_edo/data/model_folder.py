"""Hugging Face model folders: the one that ``model.path`` names, what can be checked of its files without loading a
model, the files of an export other than its weights, and a folder's first and last layers."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.data.tokenizer import check_tokenizer_file
from nemo_edo.errors import UserError
from nemo_edo.utils.files import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.safetensors", INDEX, "pytorch_model*", "*.bin", "*.pth", "*.gguf")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""OWNER/NAME. A relative path of two parts has the same form, and a folder that exists comes first."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
"""One of them has the vocabulary. From tokenizer_config.json alone, transformers 5 makes an empty one."""
READ = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
"""The files of a hub's model that a folder needs, and no second copy of the weights in another format."""
ABOUT = ["README.md", "LICENSE*", "NOTICE*"]  # what an export's card takes the licence from
COPIED = re.compile(r".*\.(json|jinja|model|txt|tiktoken|py)|(licen[cs]e|notice|copying|use_policy).*", re.IGNORECASE)
"""Names of files that come along: tokenizer, template, generation config, licence, code."""
NOT_COPIED = re.compile(r"config\.json|.*\.index\.json|adapter_.*")
TEMPLATES = "additional_chat_templates"
LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")  # where a tensor's name has its layer's number
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias|position_ids)$")
"""Tensors that older versions of transformers saved, and that models compute themselves."""


def is_hub_name(path: str) -> bool:
    """Whether ``model.path`` names a model of the Hugging Face hub; a folder of that name comes first."""
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def find_model(path: str, *, download: bool = True) -> Path:
    """The folder of ``path``: a path, returned as it is whether or not there is a folder, or OWNER/NAME on the Hugging
    Face hub: the snapshot in huggingface_hub's cache, or where it has none or only a part, a download. Raises UserError
    for a hub's model that is not in the cache and cannot be downloaded, or may not (``download``)."""
    if not is_hub_name(path):
        return Path(path)
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    lacks = f"huggingface_hub's cache ({constants.HF_HUB_CACHE}) has no complete model of that name"
    for local in (True, False) if download else (True,):
        try:
            snapshot = Path(
                snapshot_download(path, local_files_only=local, allow_patterns=[*READ, *ABOUT], ignore_patterns=["*/*"])
            )
        except (OSError, HFValidationError, httpx.HTTPError) as error:
            why = f"a download fails ({type(error.__cause__ or error).__name__})"
        else:
            missing = _what_is_missing(snapshot, weights=True)  # without a network, the hub's client returns a part
            if missing is None:
                return snapshot
            why = missing
    why = "HF_HUB_OFFLINE forbids a download" if constants.HF_HUB_OFFLINE else why
    raise UserError(
        f"model.path is {path!r}: there is no such folder, {lacks}, and {why}; check the name, or copy the model's "
        "folder here"
    )


def check_files(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """The fields of a model folder's config.json. Raises UserError where a file is missing or damaged; of weights, the
    headers are read. weights: whether there have to be any."""
    missing = _what_is_missing(folder, weights=weights)
    if missing is not None:
        raise UserError(missing)
    fields = read_fields(folder)
    check_tokenizer_file(folder)
    if weights:
        read_headers(folder)
    return fields


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a model folder's config.json. Raises UserError where they cannot be read."""
    return read_object(folder / "config.json", ())


def check_context(folder: Path, fields: dict[str, Any], seq_length: int, *, given: bool) -> None:
    """Raises UserError where sequences would exceed the model's positions. given: whether the length is a setting."""
    context = fields.get("max_position_embeddings")
    if context is None or context >= seq_length:
        return
    has = f"{folder / 'config.json'} has max_position_embeddings {context}"
    if given:
        raise UserError(f"model.seq_length is {seq_length}, but {has}: set model.seq_length to at most that")
    raise UserError(
        f"the longest prompt and sampling.max_new_tokens need {seq_length} tokens, but {has}: lower "
        "sampling.max_new_tokens, or leave out the longest problems"
    )


def _what_is_missing(folder: Path, *, weights: bool) -> str | None:
    if not folder.is_dir():
        return f"{folder} is not a Hugging Face model folder: there is no such folder"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a Hugging Face model folder: it has no config.json"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the model's own there"
    if not weights:
        return None
    files = weight_files(folder)
    if not files:
        others = unread_files(folder)
        has = f"; it has {', '.join(others)}, which is not read" if others else ""
        return f"{folder} has neither {WEIGHTS} nor {INDEX}{has}"
    absent = [path for path in files if not path.is_file()]
    return f"{absent[0]} cannot be read (No such file or directory); download it again" if absent else None


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: F32, BF16, F8_E4M3


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors where there is one, otherwise those that the index names;
    none without either. Raises UserError for an index that names no file of the folder."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    names = read_object(index, ("weight_map",))["weight_map"]
    if not isinstance(names, dict) or not names:
        raise UserError(f"{index}: weight_map names no files; download it again")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: weight_map names {name!r}, expected a file of this folder; download it again")
    return [folder / name for name in sorted(set(names.values()))]


def unread_files(folder: Path) -> list[str]:
    """The names of weight files, or of an index, that ``weight_files`` leaves out."""
    read = {path.name for path in weight_files(folder)}
    if WEIGHTS not in read:
        read.add(INDEX)
    present = {path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern) if path.is_file()}
    return sorted(present - read - {"training_args.bin"})


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that transformers reads, by name. Raises UserError for a file that cannot be read (an
    incomplete download, a Git LFS pointer), and for a tensor that is in two files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}
                stored = {
                    name: StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
                    for name, header in headers.items()
                }
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); download it again") from error
        if twice := sorted(stored.keys() & tensors.keys()):
            raise UserError(f"{twice[0]} is in {tensors[twice[0]].file} and in {path.name}; remove one of the files")
        tensors |= stored
    return tensors


# --- folders that are written ----------------------------------------------------------------------------------------


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
    """Gives what is in a folder new files' modes: safetensors lets only the owner read, copies have the source's."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parameters(folder: Path) -> int:
    """Numbers in the folder's weights, by the headers of its files."""
    return sum(math.prod(tensor.shape) for tensor in read_headers(folder).values())


def write_truncated(folder: Path, out: Path, multiple: int) -> list[int]:
    """Writes config and weights of the first and the last layers, as many in all as the multiple of ``multiple`` that
    is at least four; returns their numbers. Layers beyond the config's (of multi-token prediction) are left out."""
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
