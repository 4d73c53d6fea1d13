"""Whether each tensor of a model folder's files is a weight of its model, and each weight of the model is in a file.

transformers' model on the meta device tells the names and shapes, Bridge's mappings what the conversion reads, and
``CheckedSource`` what it has read: there, where each tensor is in memory, numbers that are not finite are found, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from nemo_edo.data.model_weights import StoredTensor, read_headers
from nemo_edo.errors import UserError

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights as they are. Others are quantised, and need scales that Bridge would not apply."""
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias|position_ids)$")
"""What older versions of transformers saved and models compute themselves."""
SHOWN = 3


def check_weights(folder: Path, config: PretrainedConfig, mappings) -> None:
    """Raises UserError for tensors of the folder's files that are missing, surplus, quantised or of another shape.

    config: the folder's, as transformers reads it. mappings: Bridge's registry of the tensors that it converts.
    """
    tensors, (shapes, tied) = read_headers(folder), _expected(config)
    quantised = [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]
    if quantised:
        dtype = tensors[quantised[0]].dtype
        raise UserError(
            f"{_named(quantised, tensors)} {dtype}: quantised weights are not trained; expected {', '.join(FLOATS)}"
        )
    weights = {name for name in tensors if not BUFFERS.search(name)}
    missing = sorted(shapes.keys() - weights - {copy for copy, source in tied.items() if source in weights})
    if missing:
        files = _listed(sorted({tensor.file.name for tensor in tensors.values()}))
        raise UserError(f"{folder}: {files}: no tensor {_listed(missing)}, which the model of config.json has")
    if surplus := sorted(weights - shapes.keys()):
        raise UserError(f"{_named(surplus, tensors)} not in the model of config.json; correct config.json or the file")
    for name in sorted(weights):
        if tensors[name].shape != shapes[name]:
            raise UserError(
                f"{tensors[name].file}: {name} has the shape {list(tensors[name].shape)}; the model of config.json "
                f"needs {list(shapes[name])}"
            )
    unread = sorted(name for name in weights - tied.keys() if mappings.hf_to_megatron_lookup(name) is None)
    if unread:
        raise UserError(f"{_named(unread, tensors)} not read by Megatron-Bridge for model_type {config.model_type!r}")
    for copy, source in tied.items():
        if copy in weights and source in weights and not _equal(tensors, copy, source):
            raise UserError(
                f"{tensors[copy].file}: {copy} differs from {source}, with which config.json ties it "
                "(tie_word_embeddings); correct the one that is wrong"
            )


def _expected(config: PretrainedConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the tensors that transformers saves of the config's model, and, of tied ones, the source."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = dict(model.all_tied_weights_keys)
    saved = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}, tied


def _equal(tensors: Mapping[str, StoredTensor], *names: str) -> bool:
    from safetensors import safe_open

    loaded = []
    for name in names:
        with safe_open(tensors[name].file, framework="pt") as file:
            loaded.append(file.get_tensor(name))
    return torch.equal(*loaded)


def _named(names: list[str], tensors: Mapping[str, StoredTensor]) -> str:
    return f"{tensors[names[0]].file}: {_listed(names)} {'is' if len(names) == 1 else 'are'}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class CheckedSource(SafeTensorsStateSource):
    """Bridge's source of a folder's tensors, from the files that transformers reads: left to itself, Bridge prefers an
    index to model.safetensors and, without one, reads every file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tensors = read_headers(folder)
        self._key_to_filename_map_cache = {name: tensor.file.name for name, tensor in self.tensors.items()}
        self.read: set[str] = set()
        self.not_finite: set[str] = set()

    def load_tensors(self, keys_to_load: list[str]) -> dict[str, torch.Tensor]:
        loaded = super().load_tensors(keys_to_load)
        self.read |= loaded.keys()
        for name, tensor in loaded.items():
            # The fastest pass over a tensor: both are NaN where one number is.
            if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
                self.not_finite.add(name)
        return loaded


def check_mapped(source: CheckedSource, bridge, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The chunks, before their weights are loaded. Raises UserError, on every rank, for a parameter that Bridge has no
    tensor for: it would keep its random numbers."""
    tasks = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, chunks)
    mapped = {id(task.param_weight) for task in tasks if task is not None and task.param_weight is not None}
    own = [
        name
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if id(parameter) not in mapped
        # A tied output layer is a copy of the embedding, which the first pipeline stage has.
        and not (name.startswith("output_layer.") and chunk.share_embeddings_and_output_weights)
    ]
    if names := sorted(_on_any_rank(own)):
        raise UserError(f"{source.path}: no tensor for Megatron's {_listed(names)}")
    return chunks


def check_loaded(source: CheckedSource, config: PretrainedConfig) -> None:
    """Raises UserError, on every rank, for a tensor that is not finite, or that no rank has read."""
    if not_finite := sorted(_on_any_rank(source.not_finite)):
        raise UserError(f"{_named(not_finite, source.tensors)} not finite (NaN or infinite); the model is damaged")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unread = {name for name in source.tensors if not BUFFERS.search(name)} - _on_any_rank(source.read) - tied
    if unread:
        raise UserError(f"{_named(sorted(unread), source.tensors)} not read by Megatron-Bridge")


def _on_any_rank(names: Iterable[str]) -> set[str]:
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, list(names))
    return set().union(*ranks)
