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
from megatron.core.utils import get_model_config
from safetensors.torch import save_file

from nemo_edo.config import LoRAConfig, ModelConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron import lora as adapters
from nemo_edo.megatron import platform
from nemo_edo.megatron.experts import convert_local_experts
from nemo_edo.megatron.hf_shards import write_shards
from nemo_edo.megatron.layer_spec import set_layer_spec
from nemo_edo.megatron.precision import DTYPES, check_dimensions, check_machine, dimensions, this_machine
from nemo_edo.megatron.precision import configure as configure_precision
from nemo_edo.megatron.splits import check_adapters, check_device, check_splits, check_world
from nemo_edo.model_shape import check_convertible

logger = logging.getLogger(__name__)

# Kernels that exist for CUDA only, and what stands in for them elsewhere.
WITHOUT_CUDA = {
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "deallocate_pipeline_outputs": False,  # gloo may still be sending them
}


@dataclass
class BuiltModel:
    """A Megatron model (one chunk for each virtual pipeline stage) and the bridge that it came through."""

    training_chunks: list[MegatronModule]
    """What training passes go through. With overlap_param_gather these gather the last step's weights as they go."""
    bridge: object
    vocab_size: int
    """Rows of the output layer that are tokens; further rows are padding."""
    lora: LoRAConfig | None
    """Of its adapters; None where all weights are trained."""
    seed: int
    """Of the adapters' start."""
    stale: bool = False
    """Whether an optimizer step has changed weights that other ranks may not have gathered yet."""

    @property
    def chunks(self) -> list[MegatronModule]:
        """For everything else: with the weights as the last step left them."""
        if self.stale:
            for chunk in self.training_chunks:
                chunk.start_param_sync(force_sync=True)
            self.stale = False
        return self.training_chunks

    def weights_have_changed(self) -> None:
        """To be called after an optimizer step."""
        config = getattr(self.training_chunks[0], "ddp_config", None)
        self.stale = config is not None and config.overlap_param_gather


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
    check_convertible(config, str(config_file))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the model's own there")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors weights")


def initialize_parallel_state(parallelism: ParallelismConfig, seed: int) -> None:
    """Megatron's process groups for this world, and its random-number tracker."""
    check_world(parallelism, torch.distributed.get_world_size())
    sizes = {
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "context_parallel_size": parallelism.context_parallel_size,
        "expert_model_parallel_size": parallelism.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size,
    }
    if not _is_split_so(parallelism):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
    virtual = parallelism.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if virtual is None else 0)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _is_split_so(parallelism: ParallelismConfig) -> bool:
    """Whether there are process groups of these sizes already. They serve again: torch keeps the threads and
    connections of every group to the end, also of those that Megatron has forgotten."""
    if not parallel_state.is_initialized():
        return False
    experts = parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size
    return (
        parallel_state.get_tensor_model_parallel_world_size() == parallelism.tensor_model_parallel_size
        and parallel_state.get_pipeline_model_parallel_world_size() == parallelism.pipeline_model_parallel_size
        and parallel_state.get_context_parallel_world_size() == parallelism.context_parallel_size
        and parallel_state.get_expert_model_parallel_world_size() == parallelism.expert_model_parallel_size
        and parallel_state.get_expert_tensor_parallel_world_size() == experts
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
    attention: str = ModelConfig.attention,
) -> BuiltModel:
    """The model of a Hugging Face folder with its weights, split as Megatron's process groups say.

    train: wrap it in Megatron's DistributedDataParallel, as its optimizer needs.
    lora: where its rank is not 0, weights are frozen and adapters are trained. seed: of their start.
    attention: as in ``ModelConfig``.
    """
    from megatron.bridge import AutoBridge

    machine = this_machine(device)
    check_device(parallelism, precision, machine)
    check_machine(precision, machine)
    convert_local_experts()
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    bridge.hf_pretrained.config.dtype = DTYPES[precision.dtype]  # of the weights, in memory and as exported
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.register_pre_wrap_hook(partial(_load_weights, bridge))
    check_splits(provider, parallelism, provider.vocab_size)
    check_dimensions(precision, dimensions(provider, parallelism))
    _configure(provider, parallelism, precision, device)
    set_layer_spec(provider, attention, device)
    lora = lora if lora and lora.rank else None
    if lora:
        check_adapters(lora, provider, parallelism.tensor_model_parallel_size)
        provider.register_pre_wrap_hook(partial(adapters.add_adapters, config=lora, seed=seed))
    provider.finalize()
    with contextlib.redirect_stdout(io.StringIO()) as said:  # Bridge prints its progress
        chunks = provider.provide_distributed_model(
            ddp_config=_ddp_config(parallelism, precision),
            wrap_with_ddp=train,
            bf16=precision.dtype == "bf16",
            use_cpu_initialization=device.type == "cpu",
            data_parallel_random_init=False,
        )
    logger.debug("Megatron-Bridge: %s", said.getvalue())
    if train:
        _let_schedules_reduce(chunks, parallelism)
    return BuiltModel(chunks, bridge, vocab_size=bridge.hf_pretrained.config.vocab_size, lora=lora, seed=seed)


def _load_weights(bridge, chunks: list[MegatronModule]) -> list[MegatronModule]:
    """Bridge 0.3 looks for the weights that the embedding and the output layer share in a process's first chunk; of
    several virtual stages, the last pipeline stage has them in its last."""
    loader = bridge._model_bridge
    share = loader._broadcast_shared_embeddings
    holding = chunks[-1:] if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else chunks[:1]
    loader._broadcast_shared_embeddings = lambda _: share(holding)
    return loader.load_weights_hf_to_megatron(bridge.hf_pretrained, chunks)


def _configure(provider, parallelism: ParallelismConfig, precision: PrecisionConfig, device: torch.device) -> None:
    configure_precision(provider, precision)
    _configure_parallelism(provider, parallelism)
    provider.attention_dropout = provider.hidden_dropout = 0.0
    # Without it, Megatron leaves split weights unmarked, and the gradient norm counts those of one rank only.
    provider.perform_initialization = True
    # Losses divide by global counts themselves (forward_backward.py): with this, Megatron sums gradients over
    # micro-batches and data-parallel ranks, and divides by nothing.
    provider.calculate_per_token_loss = True
    # Its loss is a mean over a micro-batch: it would depend on how a batch is cut.
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    if parallelism.recompute_granularity is not None:
        provider.recompute_granularity = parallelism.recompute_granularity
        if parallelism.recompute_granularity == "full":
            provider.recompute_method = parallelism.recompute_method
            provider.recompute_num_layers = parallelism.recompute_num_layers
    if device.type == "cpu":
        for name, value in WITHOUT_CUDA.items():
            setattr(provider, name, value)


def _configure_parallelism(provider, parallelism: ParallelismConfig) -> None:
    for name in (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ):
        setattr(provider, name, getattr(parallelism, name))
    interleaved = parallelism.virtual_pipeline_model_parallel_size is not None
    if interleaved:
        # A batch of sends and receives pairs them by order, which two stages that are each other's neighbours on both
        # sides do not share; these are sent over groups of their own.
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    elif parallelism.pipeline_model_parallel_size > 1:
        provider.variable_seq_lengths = True  # micro-batches have their own widths
        if provider.moe_token_dispatcher_type == "allgather":  # it cannot, which is checked without experts too
            provider.moe_token_dispatcher_type = "alltoall"


def _ddp_config(parallelism: ParallelismConfig, precision: PrecisionConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallelism.use_distributed_optimizer,
        overlap_grad_reduce=parallelism.overlap_grad_reduce,
        overlap_param_gather=parallelism.overlap_param_gather,
        fp8_param_gather=precision.fp8_param_gather,
        reuse_grad_buf_for_mxfp8_param_ag=_shares_mxfp8_buffer(precision),
        check_for_nan_in_grad=False,  # its check reads a CUDA flag; policy.py checks loss and norm instead
    )


def optimizer_storage(parallelism: ParallelismConfig, precision: PrecisionConfig) -> dict[str, object]:
    """In which numbers and where the optimizer keeps its state: fields of Megatron's OptimizerConfig."""
    offload = parallelism.optimizer_offload_fraction
    return {
        "bf16": precision.dtype == "bf16",
        "params_dtype": DTYPES[precision.dtype],
        "use_distributed_optimizer": parallelism.use_distributed_optimizer,
        "overlap_param_gather": parallelism.overlap_param_gather,
        "fp8_recipe": precision.fp8_recipe if precision.fp8 else None,
        "reuse_grad_buf_for_mxfp8_param_ag": _shares_mxfp8_buffer(precision),
        "optimizer_cpu_offload": offload > 0,
        "optimizer_offload_fraction": offload,
        "use_precision_aware_optimizer": offload > 0,  # Megatron offloads along its path only
    }


def _shares_mxfp8_buffer(precision: PrecisionConfig) -> bool:
    """Gathered MXFP8 weights arrive in the gradients' memory: Megatron asks for it."""
    return precision.fp8_param_gather and precision.fp8_recipe == "mxfp8"


def _let_schedules_reduce(chunks: list[MegatronModule], parallelism: ParallelismConfig) -> None:
    """Tells Megatron's schedules how to hold back the overlapped reduction until the last micro-batch, of which a step
    may have another number than the step before."""
    if not parallelism.overlap_grad_reduce:
        return
    config = get_model_config(chunks[0])
    held_back = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = held_back if len(chunks) > 1 else held_back[0]


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


def export_adapter_folder(model: BuiltModel, out: Path) -> None:
    """Writes the adapters alone, as PEFT has them: adapter_model.safetensors and adapter_config.json. All ranks call
    it."""
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
        }
        (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        # Layers that are one to Megatron share a factor, which the file holds for each of them.
        save_file({name: weight.clone() for name, weight in weights.items()}, out / "adapter_model.safetensors")
    torch.distributed.barrier()


def device_and_groups(parallelism: ParallelismConfig, seed: int, threads: int | None) -> torch.device:
    """Everything between a fresh process and ``build_model``."""
    device = platform.enter(threads)
    platform.init_process_group(device)
    initialize_parallel_state(parallelism, seed)
    return device
