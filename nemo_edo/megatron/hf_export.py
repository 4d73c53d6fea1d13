"""A Megatron-core model as a Hugging Face folder, or its adapters as a PEFT folder, through Megatron-Bridge."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_edo.data.model_folder import BUFFERS, INDEX, LAYER, StoredTensor, usual_modes, write_files
from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from nemo_edo.megatron.bridge import BuiltModel

logger = logging.getLogger(__name__)


def export_hf_folder(
    model: BuiltModel, out: Path, max_shard_bytes: int = 5 * 10**9, *, merge_adapters: bool = True
) -> None:
    """Writes the weights with config and tokenizer as a folder that ``transformers`` loads. All ranks call it.

    Each weight is gathered from the ranks that share it, and written with others in files of at most
    ``max_shard_bytes``: the first rank's host has one of them at a time, and the others' have none. Adapters are merged
    into what is written: W + alpha / rank * B A; without ``merge_adapters`` it is W.
    """
    first, source = torch.distributed.get_rank() == 0, Path(model.bridge.hf_pretrained.model_name_or_path)
    config = model.bridge.hf_pretrained.config
    if first:
        write_files(source, out, config, str(config.dtype).removeprefix("torch."))
    weights = streamed(model, merge_adapters=merge_adapters)
    stored = model.bridge.hf_pretrained.state.source.tensors  # what was loaded (folder_weights.CheckedSource)
    write_shards(with_untrained(weights, stored, config) if first else weights, out, max_shard_bytes)
    if first:
        usual_modes(out)


def write_shards(weights: Iterable[tuple[str, Tensor]], out: Path, max_bytes: int) -> None:
    """Writes ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with their index, in the order of
    the weights; one file is in memory at a time. A tensor larger than ``max_bytes`` gets a separate file. All ranks
    take the weights, which makes them gather each one; the first rank writes."""
    writes, total = torch.distributed.get_rank() == 0, 0
    shards: list[list[str]] = []  # the names of each file's tensors
    shard: dict[str, Tensor] = {}

    def written(number: int) -> Path:  # how many there will be, and so their names, is not known
        return out / f"shard-{number:05d}.safetensors"

    def write() -> None:
        path = written(len(shards))
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{path} cannot be written: {error}") from error
        shards.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        if writes:
            if shard and sum(one.nbytes for one in shard.values()) + tensor.nbytes > max_bytes:
                write()
            shard[name] = tensor.cpu().contiguous()
            total += tensor.nbytes
    if writes:
        write()
        places: dict[str, str] = {}
        for number, tensors in enumerate(shards):
            of_all = f"-{number + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            final = written(number).replace(out / f"model{of_all}.safetensors")
            places |= dict.fromkeys(tensors, final.name)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    torch.distributed.barrier()


def with_untrained(
    weights: Iterable[tuple[str, Tensor]], stored: Mapping[str, StoredTensor], config: Any
) -> Iterator[tuple[str, Tensor]]:
    """The weights, followed by the ``stored`` tensors of the source that no training changes: buffers, and layers that
    predict further tokens. Raises UserError where it has more."""
    exported = set()
    for name, weight in weights:
        exported.add(name)
        yield name, weight
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(stored.keys() - exported - tied):
        file = stored[name].file
        if not _is_beyond(name, config) and not BUFFERS.search(name):
            raise UserError(f"{file}: {name} is in no weight of Megatron's, and would be lost in an export")
        with safe_open(file, framework="pt") as tensors:
            yield name, tensors.get_tensor(name)


def _is_beyond(name: str, config: Any) -> bool:
    """Whether a tensor is of a layer after the model's last one: ``CheckedSource`` has found which predict tokens."""
    layer = LAYER.search(name)
    return layer is not None and int(layer[1]) >= config.num_hidden_layers


def streamed(model: BuiltModel, *, merge_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The weights by Hugging Face's names, one at a time, in the same order each time. All ranks iterate together."""
    with contextlib.redirect_stdout(io.StringIO()):  # Bridge prints its progress
        for name, weight in model.bridge.export_hf_weights(
            model.chunks, cpu=False, show_progress=False, merge_adapter_weights=merge_adapters
        ):
            # Bridge makes tensors of layers that predict further tokens from the embedding (GLM-4.7-Flash).
            if not _is_beyond(name, model.bridge.hf_pretrained.config):
                yield name.replace(".base_layer.", "."), weight  # what it leaves of adapters around a layer


def export_adapter_folder(model: BuiltModel, out: Path, base: str | None = None) -> None:
    """Writes the adapters alone, as PEFT has them: adapter_model.safetensors and adapter_config.json, which names the
    folder of the weights under them: ``base``, or the folder that the model was built from. All ranks call it."""
    from megatron.bridge.peft.lora import LoRA

    settings = LoRA(dim=model.lora.rank, alpha=model.lora.alpha, dropout=0.0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.bridge.save_hf_adapter(model.chunks, out, settings, base_model_name_or_path=base, show_progress=False)
    if torch.distributed.get_rank() == 0:
        usual_modes(out)
    logger.debug("Megatron-Bridge: %s", said.getvalue())
