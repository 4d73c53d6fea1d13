"""A Megatron-core model as a Hugging Face folder, or its adapters as a PEFT folder, through Megatron-Bridge."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_edo.megatron.hf_shards import write_shards

if TYPE_CHECKING:
    from nemo_edo.megatron.bridge import BuiltModel

logger = logging.getLogger(__name__)


def export_hf_folder(
    model: BuiltModel, out: Path, max_shard_bytes: int = 5 * 10**9, *, merge_adapters: bool = True
) -> None:
    """Writes the weights with config and tokenizer as a folder that ``transformers`` loads. All ranks call it.

    Each weight is gathered from the ranks that share it, and written with others in files of at most
    ``max_shard_bytes``: no process holds more of the whole model than one of them. Adapters are merged into what is
    written: W + alpha / rank * B A; without ``merge_adapters`` it is W.
    """
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if torch.distributed.get_rank() == 0:
            model.bridge.hf_pretrained.save_artifacts(out)
        weights = model.bridge.export_hf_weights(
            model.chunks, cpu=True, show_progress=False, merge_adapter_weights=merge_adapters
        )
        # Bridge leaves in the names where adapters are wrapped around a layer.
        write_shards(((name.replace(".base_layer.", "."), weight) for name, weight in weights), out, max_shard_bytes)
    logger.debug("Megatron-Bridge: %s", said.getvalue())


def streamed(model: BuiltModel) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names, adapters merged, one at a time and in the same order each time. All ranks
    iterate it together."""
    with contextlib.redirect_stdout(io.StringIO()):  # Bridge prints its progress
        yield from model.bridge.export_hf_weights(model.chunks, cpu=False, show_progress=False)


def export_adapter_folder(model: BuiltModel, out: Path, base: str | None = None) -> None:
    """Writes the adapters alone, as PEFT has them: adapter_model.safetensors and adapter_config.json, which names the
    folder of the weights under them: ``base``, or the folder that the model was built from. All ranks call it."""
    from megatron.bridge.peft.lora import LoRA

    settings = LoRA(dim=model.lora.rank, alpha=model.lora.alpha, dropout=0.0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.bridge.save_hf_adapter(model.chunks, out, settings, base_model_name_or_path=base, show_progress=False)
    logger.debug("Megatron-Bridge: %s", said.getvalue())
