"""Whether each tensor of a model folder's files is a weight of its model, and each weight of the model is in a file.
transformers' model on the meta device tells the names and shapes, Bridge's mappings what the conversion reads."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from nemo_edo.data.model_folder import BUFFERS, LAYER, StoredTensor, read_headers
from nemo_edo.errors import UserError
from nemo_edo.megatron.folder_fields import FURTHER, MADE_ERRORS, not_taken
from nemo_edo.parallel.main_rank import gathered

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights as they are. Others are quantised, and need scales that Bridge would not apply."""
SHOWN = 3


class CheckedSource(SafeTensorsStateSource):
    """Bridge's source of a folder's tensors, from the files that transformers reads: left to itself, Bridge prefers an
    index to model.safetensors and, without one, reads every file.

    Names are those that model files and Bridge have. transformers 5 computes with a layer's experts in one tensor, and
    loads them from one as well: its parts are in its place. Raises UserError for such a tensor of another shape."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        super().__init__(folder)
        with torch.device("meta"):
            try:
                self._model = AutoModelForCausalLM.from_config(config)
            except MADE_ERRORS as error:
                raise not_taken(folder / "config.json", "transformers", error) from error
        state = self._model.state_dict()
        saved = revert_weight_conversion(self._model, state)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self.tied: dict[str, str] = dict(self._model.all_tied_weights_keys)  # the source of each tied tensor
        self.tensors: dict[str, StoredTensor] = read_headers(folder)
        self._fused: dict[str, str] = {}  # the tensor of the file that each part is in
        for name in sorted(self.tensors.keys() & (state.keys() - saved.keys())):
            stored, shape = self.tensors.pop(name), tuple(state[name].shape)
            if stored.shape != shape:
                raise UserError(_wrong_shape(name, stored, shape))
            for part in revert_weight_conversion(self._model, {name: state[name]}):
                if part in self.tensors:
                    raise UserError(f"{self.tensors[part].file}: {part} is in {name}, too; remove one of the two")
                self.tensors[part], self._fused[part] = replace(stored, shape=self.shapes[part]), name
        self.further = {name for name in self.tensors.keys() - self.shapes.keys() if self._is_further(name, config)}
        """Tensors of layers that predict further tokens: transformers leaves them out, and an export copies them."""
        self._key_to_filename_map_cache = {name: tensor.file.name for name, tensor in self.tensors.items()}
        self.not_finite: set[str] = set()
        self.last_split: tuple[str, dict[str, Tensor]] = ("", {})  # the fused tensor that was read last, its parts

    def _is_further(self, name: str, config: PretrainedConfig) -> bool:
        layer, count = LAYER.search(name), getattr(config, FURTHER, None) or 0
        first = config.num_hidden_layers
        if layer is None or int(layer[1]) not in range(first, first + count):
            return False
        return f"{name[: layer.end()]}eh_proj.weight" in self.tensors

    def load_tensors(self, keys_to_load: list[str]) -> dict[str, Tensor]:
        loaded = super().load_tensors([key for key in keys_to_load if key not in self._fused])
        for part in (key for key in keys_to_load if key in self._fused):
            if self.last_split[0] != (name := self._fused[part]):
                with safe_open(self.tensors[part].file, framework="pt") as file:
                    self.last_split = name, revert_weight_conversion(self._model, {name: file.get_tensor(name)})
            loaded[part] = self.last_split[1][part]
        for name, tensor in loaded.items():
            # The fastest pass over a tensor: both are NaN where one number is.
            if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
                self.not_finite.add(name)
        return loaded


def check_weights(folder: Path, config: PretrainedConfig, mappings) -> CheckedSource:
    """The folder's weights. Raises UserError for tensors that are missing, surplus, quantised or of another shape.
    config: the folder's, as transformers reads it. mappings: Bridge's registry of the tensors that it converts."""
    checked = CheckedSource(folder, config)
    tensors, shapes, tied = checked.tensors, checked.shapes, checked.tied
    quantised = [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS and not BUFFERS.search(name)]
    if quantised:
        dtype = tensors[quantised[0]].dtype
        raise UserError(
            f"{_named(quantised, tensors)} {dtype}: quantised weights are not trained; expected {', '.join(FLOATS)}"
        )
    weights = {name for name in tensors.keys() - checked.further if not BUFFERS.search(name)}
    missing = sorted(shapes.keys() - weights - {copy for copy, source in tied.items() if source in weights})
    if missing:
        files = _listed(sorted({tensor.file.name for tensor in tensors.values()}))
        raise UserError(f"{folder}: {files}: no tensor {_listed(missing)}, which the model of config.json has")
    if surplus := sorted(weights - shapes.keys()):
        raise UserError(f"{_named(surplus, tensors)} not in the model of config.json; correct config.json or the file")
    for name in sorted(weights):
        if tensors[name].shape != shapes[name]:
            raise UserError(_wrong_shape(name, tensors[name], shapes[name]))
    unread = sorted(name for name in weights - tied.keys() if mappings.hf_to_megatron_lookup(name) is None)
    if unread:
        raise UserError(f"{_named(unread, tensors)} not read by Megatron-Bridge for model_type {config.model_type!r}")
    for copy, source in tied.items():
        if copy in weights and source in weights:
            loaded = []
            for name in (copy, source):
                with safe_open(tensors[name].file, framework="pt") as file:
                    loaded.append(file.get_tensor(name))
            if not torch.equal(*loaded):
                raise UserError(
                    f"{tensors[copy].file}: {copy} differs from {source}, with which config.json ties it "
                    "(tie_word_embeddings); correct the one that is wrong"
                )
    return checked


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
    if names := _of_all_ranks(own):
        raise UserError(f"{source.path}: no tensor for Megatron's {_listed(names)}")
    return chunks


def check_finite(source: CheckedSource) -> None:
    """Raises UserError, on every rank, for a tensor that a rank has loaded and that is not finite."""
    source.last_split = "", {}
    if names := _of_all_ranks(source.not_finite):
        raise UserError(f"{_named(names, source.tensors)} not finite (NaN or infinite); the model is damaged")


def _of_all_ranks(names: Iterable[str]) -> list[str]:
    return sorted(set().union(*gathered(list(names))))


def _wrong_shape(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> str:
    found, needed = list(stored.shape), list(shape)
    return f"{stored.file}: {name} has the shape {found}; the model of config.json needs {needed}"


def _named(names: list[str], tensors: Mapping[str, StoredTensor]) -> str:
    return f"{tensors[names[0]].file}: {_listed(names)} {'is' if len(names) == 1 else 'are'}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
