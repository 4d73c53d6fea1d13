"""A Megatron-core model as a Hugging Face folder, or its adapters as a PEFT folder, through Megatron-Bridge."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
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
    folder of the weights under them (``base``), if it is given. All ranks call it."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exported = model.bridge.export_adapter_weights(model.chunks, cpu=True, show_progress=False)
        weights = {f"base_model.model.{name}": weight.contiguous() for name, weight in exported}
    logger.debug("Megatron-Bridge: %s", said.getvalue())
    if torch.distributed.get_rank() == 0:
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": model.lora.rank,
            "lora_alpha": model.lora.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in weights}),
            "base_model_name_or_path": base,
            "inference_mode": True,
        }
        (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        # Layers that are one to Megatron share a factor, which the file holds for each of them.
        save_file({name: weight.clone() for name, weight in weights.items()}, out / "adapter_model.safetensors")
    torch.distributed.barrier()
