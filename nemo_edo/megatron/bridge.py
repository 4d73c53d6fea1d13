"""A Hugging Face folder to a Megatron-core model, through Megatron-Bridge (``hf_export.py`` goes back)."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_model_config, get_te_version

from nemo_edo.config import LoRAConfig, ModelConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.data.model_folder import check_files, read_fields, unread_files
from nemo_edo.errors import UserError
from nemo_edo.megatron import lora as adapters
from nemo_edo.megatron.layer_spec import check_family, check_tensor_parallel, correct_layers, set_layer_spec
from nemo_edo.megatron.precision import DTYPES, check_dimensions, check_fp8_support
from nemo_edo.megatron.precision import configure as configure_precision
from nemo_edo.megatron.splits import check_adapters, check_context_parallel, check_device, check_splits

if TYPE_CHECKING:
    from nemo_edo.megatron.folder_weights import CheckedSource

logger = logging.getLogger(__name__)


@dataclass
class BuiltModel:
    """A Megatron model (one chunk for each virtual pipeline stage) and the bridge that it came through."""

    training_chunks: list[MegatronModule]
    """What training passes go through. With overlap_param_gather these gather the last step's weights as they go."""
    bridge: Any
    vocab_size: int  # rows of the output layer that are tokens; further rows are padding
    lora: LoRAConfig | None  # of its adapters; None where all weights are trained
    seed: int  # of the adapters' initial weights
    stale: bool = False  # whether an optimizer step has changed weights that other ranks may not have gathered yet

    @property
    def chunks(self) -> list[MegatronModule]:
        """The chunks for all other uses: their weights are up to date."""
        if self.stale:
            for chunk in self.training_chunks:
                chunk.start_param_sync(force_sync=True)
            self.stale = False
        return self.training_chunks


def check_model_folder(folder: Path, parallelism: ParallelismConfig | None = None) -> dict[str, Any]:
    """The fields of a Hugging Face folder's config.json. Raises UserError where it cannot be trained as what it is to
    transformers, before any time is spent on it: every command that loads a model's weights goes through it."""
    fields = check_files(folder)
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'}: model_type is {fields.get('model_type')!r}, expected a text")
    check_family(fields["model_type"], str(folder / "config.json"))
    if _check_conversion(folder, fields, parallelism or ParallelismConfig()).further:
        logger.warning("%s: its layers that predict further tokens stay as they are: they are not trained", folder)
    if others := unread_files(folder):
        logger.warning("%s: not read, as transformers does not read it: %s", folder, ", ".join(others))
    return fields


def _check_conversion(folder: Path, fields: dict[str, Any], parallelism: ParallelismConfig) -> CheckedSource:
    from megatron.bridge import AutoBridge

    from nemo_edo.megatron.folder_fields import check_fields, load_config
    from nemo_edo.megatron.folder_weights import check_weights

    source = str(folder / "config.json")
    if fields.get("quantization_config"):
        raise UserError(f"{source} has a quantization_config: quantised weights are not trained; take the original")
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} has an adapter_config.json: merge the adapter into the weights, or remove it")
    supported = AutoBridge.list_supported_models()
    architectures = fields.get("architectures") or []
    if not set(architectures) & set(supported):
        raise UserError(
            f"{source}: architectures {architectures} are not supported by Megatron-Bridge; "
            f"supported are {', '.join(supported)}"
        )
    config = load_config(fields, source)
    if unwritten := next((name for name in ("vocab_size", "num_hidden_layers") if name not in fields), None):
        taken = getattr(config, unwritten)
        raise UserError(f"{source}: has no {unwritten}, for which transformers takes {taken}; write it into the file")
    bridge = AutoBridge.from_hf_config(config)._model_bridge
    provider = check_fields(fields, config, lambda one: bridge.provider_bridge(SimpleNamespace(config=one)), source)
    check_context_parallel(provider, parallelism)
    check_tensor_parallel(fields["model_type"], provider, parallelism)
    return check_weights(folder, config, bridge.mapping_registry())


def build_model(
    folder: Path,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
    device: torch.device,
    *,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    attention: str = ModelConfig.attention,
) -> BuiltModel:
    """The model of a Hugging Face folder with its weights, split as Megatron's process groups say, and wrapped in
    Megatron's DistributedDataParallel, as its optimizer needs. lora: where its rank is not 0, weights are frozen and
    adapters are trained. seed: of their initial weights. attention: as in ``ModelConfig``."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.hf_pretrained.state import StateDict

    from nemo_edo.megatron.folder_fields import not_taken
    from nemo_edo.megatron.folder_weights import check_finite, check_mapped

    engine = get_te_version() if device.type == "cuda" else None
    check_device(parallelism, precision, engine)
    check_fp8_support(precision, engine)
    source = _check_conversion(folder, read_fields(folder), parallelism)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    bridge.hf_pretrained._state_dict_accessor = StateDict(source)
    bridge.hf_pretrained.config.dtype = DTYPES[precision.dtype]  # of the weights, in memory and as exported
    provider = _provider(bridge, parallelism, precision)
    set_layer_spec(provider, attention, device)
    provider.register_pre_wrap_hook(partial(check_mapped, source, bridge), prepend=True)
    provider.register_pre_wrap_hook(correct_layers)
    lora = lora if lora and lora.rank else None
    if lora:
        check_adapters(lora, provider, parallelism.tensor_model_parallel_size)
        provider.register_pre_wrap_hook(partial(adapters.add_adapters, config=lora, seed=seed))
    RouterReplay.clear_global_router_replay_instances()  # Megatron keeps those of all models
    try:
        provider.finalize()
        with contextlib.redirect_stdout(io.StringIO()) as said:  # Bridge prints its progress
            chunks = provider.provide_distributed_model(
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=parallelism.use_distributed_optimizer,
                    overlap_grad_reduce=parallelism.overlap_grad_reduce,
                    overlap_param_gather=parallelism.overlap_param_gather,
                    fp8_param_gather=precision.fp8_param_gather,
                    reuse_grad_buf_for_mxfp8_param_ag=shares_mxfp8_buffer(precision),
                    check_for_nan_in_grad=False,  # its check reads a CUDA flag; policy.py checks loss and norm instead
                ),
                bf16=precision.dtype == "bf16",
                use_cpu_initialization=device.type == "cpu",
                data_parallel_random_init=False,
            )
    except UserError:
        raise
    except (AssertionError, ValueError, ArithmeticError, NotImplementedError) as error:
        raise not_taken(folder, "Megatron", error) from error
    logger.debug("Megatron-Bridge: %s", said.getvalue())
    check_finite(source)
    if parallelism.overlap_grad_reduce:
        # Schedules hold back the overlapped reduction until the last micro-batch; steps may differ in their number.
        held_back = [chunk.no_sync for chunk in chunks]
        get_model_config(chunks[0]).no_sync_func = held_back if len(chunks) > 1 else held_back[0]
    return BuiltModel(chunks, bridge, vocab_size=bridge.hf_pretrained.config.vocab_size, lora=lora, seed=seed)


def _provider(bridge, parallelism: ParallelismConfig, precision: PrecisionConfig):
    """Bridge's provider of the model, that is Megatron's config of it and a recipe to make it, checked and set up."""
    provider = bridge.to_megatron_provider()
    # Some of Bridge's families are never tied, and their folders' models may be.
    tied = provider.share_embeddings_and_output_weights = bool(bridge.hf_pretrained.config.tie_word_embeddings)
    if not tied and bridge._model_bridge.mapping_registry().megatron_to_hf_lookup("output_layer.weight") is None:
        raise UserError("tie_word_embeddings is false, and Megatron-Bridge knows this family with tied ones only")
    if provider.position_embedding_type == "yarn":
        # What transformers takes for numbers of YaRN that config.json does not have: Bridge leaves them None.
        usual = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True}
        for name, value in usual.items():
            if getattr(provider, name) is None:
                setattr(provider, name, value)
        if not (provider.yarn_mscale and provider.yarn_mscale_all_dim):  # transformers takes both or neither
            provider.yarn_mscale = provider.yarn_mscale_all_dim = None
    check_splits(provider, parallelism, provider.vocab_size)
    check_dimensions(precision, provider, parallelism)
    configure_precision(provider, precision)
    _configure_training(provider, parallelism)
    return provider


def _configure_training(provider, parallelism: ParallelismConfig) -> None:
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
    if parallelism.virtual_pipeline_model_parallel_size is not None:
        # A batch of sends and receives pairs them by order, which two stages that are each other's neighbours on both
        # sides do not share; these are sent over separate groups.
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    elif parallelism.pipeline_model_parallel_size > 1:
        provider.variable_seq_lengths = True  # micro-batches differ in width
        if provider.moe_token_dispatcher_type == "allgather":  # it cannot, which is checked without experts too
            provider.moe_token_dispatcher_type = "alltoall"
    provider.attention_dropout = provider.hidden_dropout = 0.0
    # Without it, Megatron leaves split weights unmarked, and the gradient norm counts those of one rank only.
    provider.perform_initialization = True
    # Losses divide by global counts themselves (forward_backward.py): with this, Megatron sums and divides by nothing.
    provider.calculate_per_token_loss = True
    # Bridge adds weight gradients up in the matrix product where Transformer Engine can. Megatron's output layer, which
    # is not Transformer Engine's, raises unless it has apex's kernel for it.
    if provider.gradient_accumulation_fusion and find_spec("fused_weight_gradient_mlp_cuda") is None:
        provider.gradient_accumulation_fusion = False
        logger.warning(
            "apex's fused_weight_gradient_mlp_cuda is absent: weight gradients are added up in separate kernels, in "
            "Transformer Engine's layers too"
        )
    # The router's losses are means over a micro-batch, padding included: they would depend on how a batch is cut.
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    provider.moe_z_loss_coeff = provider.moe_input_jitter_eps = None
    # Rollouts may carry the experts that their sampler chose (routing.py), which the fused router would not replay.
    provider.moe_enable_routing_replay, provider.moe_router_fusion = bool(provider.num_moe_experts), False
    # Megatron moves it by the sign of each expert's load: by no gradient, and away from the sampler's.
    provider.moe_router_bias_update_rate = 0.0
    # Layers that predict further tokens are no part of what transformers computes.
    provider.mtp_num_layers = None
    if parallelism.recompute_granularity is not None:
        provider.recompute_granularity = parallelism.recompute_granularity
        provider.recompute_modules = list(parallelism.recompute_modules)
        if parallelism.recompute_granularity == "full":
            provider.recompute_method = parallelism.recompute_method
            provider.recompute_num_layers = parallelism.recompute_num_layers


def shares_mxfp8_buffer(precision: PrecisionConfig) -> bool:
    """Gathered MXFP8 weights arrive in the gradients' memory: Megatron asks for it."""
    return precision.fp8_param_gather and precision.fp8_recipe == "mxfp8"
