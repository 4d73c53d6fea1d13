"""A Hugging Face folder to a Megatron-core model and back, through Megatron-Bridge."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.module import MegatronModule

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron import lora as adapters
from nemo_edo.megatron import platform
from nemo_edo.megatron.layer_spec import local_layer_spec

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Kernels that exist for CUDA only, and what stands in for them elsewhere.
WITHOUT_CUDA = {
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
}


@dataclass
class BuiltModel:
    """A Megatron model (one chunk for each virtual pipeline stage) and the bridge that it came through."""

    chunks: list[MegatronModule]
    bridge: object
    vocab_size: int
    """Rows of the output layer that are tokens; further rows are padding."""
    lora: LoRAConfig | None
    """Of its adapters; None where all weights are trained."""
    seed: int
    """Of the adapters' start."""


def check_model_folder(folder: Path) -> None:
    """Raises UserError where a Hugging Face folder cannot be trained: before any time is spent on it."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config_file} is not valid JSON: {error}") from error
    from megatron.bridge import AutoBridge

    supported = AutoBridge.list_supported_models()
    architectures = config.get("architectures") or []
    if not set(architectures) & set(supported):
        raise UserError(
            f"{config_file}: architectures {architectures} are not supported by Megatron-Bridge; "
            f"supported are {', '.join(supported)}"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the model's own there")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors weights")


def initialize_parallel_state(parallelism: ParallelismConfig, seed: int) -> None:
    """Megatron's process groups for this world, and its random-number tracker."""
    world = torch.distributed.get_world_size()
    model_ranks = parallelism.tensor_model_parallel_size * parallelism.pipeline_model_parallel_size
    if world % model_ranks:
        raise UserError(
            f"{world} processes cannot be split into tensor_model_parallel_size "
            f"{parallelism.tensor_model_parallel_size} x pipeline_model_parallel_size "
            f"{parallelism.pipeline_model_parallel_size}: start a multiple of {model_ranks} processes"
        )
    if not _is_split_so(parallelism):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallelism.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallelism.pipeline_model_parallel_size,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _is_split_so(parallelism: ParallelismConfig) -> bool:
    """Whether there are process groups of these sizes already. They serve again: torch keeps the threads and
    connections of every group to the end, also of those that Megatron has forgotten."""
    return (
        parallel_state.is_initialized()
        and parallel_state.get_tensor_model_parallel_world_size() == parallelism.tensor_model_parallel_size
        and parallel_state.get_pipeline_model_parallel_world_size() == parallelism.pipeline_model_parallel_size
    )


def build_model(
    folder: Path,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
    device: torch.device,
    *,
    train: bool = True,
    lora: LoRAConfig | None = None,
    seed: int = 0,
) -> BuiltModel:
    """The model of a Hugging Face folder with its weights, split as Megatron's process groups say.

    train: wrap it in Megatron's DistributedDataParallel, as its optimizer needs.
    lora: where its rank is not 0, weights are frozen and adapters are trained. seed: of their start.
    """
    from megatron.bridge import AutoBridge

    dtype = DTYPES[precision.dtype]
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    bridge.hf_pretrained.config.dtype = dtype  # of the weights, in memory and as exported
    provider = bridge.to_megatron_provider(load_weights=True)
    _configure(provider, parallelism, dtype, device)
    _check_splits(provider, parallelism)
    lora = lora if lora and lora.rank else None
    if lora:
        adapters.check_splits(lora, provider, parallelism.tensor_model_parallel_size)
        provider.register_pre_wrap_hook(partial(adapters.add_adapters, config=lora, seed=seed))
    provider.finalize()
    with contextlib.redirect_stdout(io.StringIO()) as said:  # Bridge prints its progress
        chunks = provider.provide_distributed_model(
            ddp_config=_ddp_config(parallelism),
            wrap_with_ddp=train,
            bf16=precision.dtype == "bf16",
            use_cpu_initialization=device.type == "cpu",
            data_parallel_random_init=False,
        )
    logger.debug("Megatron-Bridge: %s", said.getvalue())
    return BuiltModel(chunks, bridge, vocab_size=bridge.hf_pretrained.config.vocab_size, lora=lora, seed=seed)


def _configure(provider, parallelism: ParallelismConfig, dtype: torch.dtype, device: torch.device) -> None:
    provider.tensor_model_parallel_size = parallelism.tensor_model_parallel_size
    provider.pipeline_model_parallel_size = parallelism.pipeline_model_parallel_size
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16 = dtype is torch.bfloat16
    provider.fp16 = False
    provider.attention_dropout = provider.hidden_dropout = 0.0
    # Without it, Megatron leaves split weights unmarked, and the gradient norm counts those of one rank only.
    provider.perform_initialization = True
    # Losses divide by global counts themselves (forward_backward.py): with this, Megatron sums gradients over
    # micro-batches and data-parallel ranks, and divides by nothing.
    provider.calculate_per_token_loss = True
    if parallelism.pipeline_model_parallel_size > 1:
        provider.variable_seq_lengths = True  # micro-batches have their own widths
        if provider.moe_token_dispatcher_type == "allgather":  # it cannot, which is checked without experts too
            provider.moe_token_dispatcher_type = "alltoall"
    if device.type == "cpu":
        for name, value in WITHOUT_CUDA.items():
            setattr(provider, name, value)
        provider.transformer_layer_spec = local_layer_spec(provider)


def _check_splits(provider, parallelism: ParallelismConfig) -> None:
    tensor, pipeline = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    groups = provider.num_query_groups or provider.num_attention_heads
    split = {
        "attention heads": provider.num_attention_heads,
        "query groups": groups,
        "vocabulary entries": provider.vocab_size,  # Megatron-Bridge 0.3 cannot pad them
    }
    for what, size in split.items():
        if size % tensor:
            raise UserError(
                f"parallelism.tensor_model_parallel_size {tensor} does not divide the model's {size} {what}"
            )
    if provider.num_layers % pipeline:
        raise UserError(
            f"parallelism.pipeline_model_parallel_size {pipeline} does not divide the model's "
            f"{provider.num_layers} layers"
        )


def _ddp_config(parallelism: ParallelismConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallelism.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # its check reads a CUDA flag; forward_backward.py checks the loss instead
    )


def export_hf_folder(model: BuiltModel, out: Path) -> None:
    """Writes the weights with config and tokenizer as a folder that ``transformers`` loads. All ranks call it.

    Adapters are merged into what is written: W + alpha / rank * B A.
    """
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.bridge.save_hf_pretrained(model.chunks, str(out), show_progress=False)
    logger.debug("Megatron-Bridge: %s", said.getvalue())


def device_and_groups(parallelism: ParallelismConfig, seed: int, threads: int | None) -> torch.device:
    """Everything between a fresh process and ``build_model``."""
    device = platform.enter(threads)
    platform.init_process_group(device)
    initialize_parallel_state(parallelism, seed)
    return device
