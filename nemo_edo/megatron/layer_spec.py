"""Which kernels a model computes with: Transformer Engine's, or torch's and Megatron's own; and what they are called.
This is the one switch between the two: other modules ask the functions here about ``cpu/`` and do not import it."""

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import unwrap_model

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.cpu import without_cuda
from nemo_edo.megatron.cpu.attention import (
    LatentSelfAttention,
    RotatingSelfAttention,
    SDPAttention,
    rotates,
    sdpa_lacks,
)
from nemo_edo.megatron.cpu.families import TorchNorm, complete_tables, local_changes
from nemo_edo.megatron.cpu.packed import packed_weights

logger = logging.getLogger(__name__)

CORES = {"sdpa": SDPAttention, "local": DotProductAttention}  # of the attention in a local layer


def set_layer_spec(provider, attention: str, device: torch.device) -> None:
    """Gives Megatron-Bridge's ``provider`` the layers of ``model.attention``; Bridge's own are Transformer Engine's. On
    a CPU it also turns off the kernels that exist for CUDA only. Raises UserError for an attention that this machine or
    this model does not allow."""
    complete_tables()
    te = HAVE_TE and device.type == "cuda"
    change = local_changes(provider) if attention in CORES or not te else None
    attention = choose_attention(attention, provider, device, has_te=HAVE_TE)
    logger.info("attention: %s", attention)
    if attention != "te":
        provider.transformer_layer_spec = partial(local_layer_spec, core_attention=CORES[attention], change=change)
        provider.moe_grouped_gemm = False  # Bridge converts a local layer's experts one by one only
        # The environment variables that choose among Transformer Engine's kernels would be another model's, too.
        provider.attention_backend = AttnBackend.auto
    if device.type == "cpu":
        for name, value in without_cuda.CONFIG.items():
            setattr(provider, name, value)
    elif not HAVE_TE:
        logger.warning(
            "Transformer Engine is absent: torch's and Megatron's own layers replace its faster ones, and FP8 and "
            "context parallelism are not available"
        )
        # The kernels that come with it or with apex.
        provider.apply_rope_fusion = provider.moe_permute_fusion = False
        if find_spec("scaled_masked_softmax_cuda") is None:
            provider.masked_softmax_fusion = False


LINEAR = "linear attention"
NEEDS_TE = {  # by model_type: families that Bridge converts and local layers cannot compute, with what they lack
    "deepseek_v4": "compressed attention",
    "falcon_h1": "Mamba layers",
    "gemma4": "layers with two sizes of heads",
    "gemma4_text": "layers with two sizes of heads",
    "glm_moe_dsa": "sparse attention",
    "hy_v3": "layers that Megatron-Bridge has with Transformer Engine only",
    "minimax_m2": "norms over all heads",
    "nemotron_h": "Mamba layers",
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
}


def check_family(model_type: str | None, source: str) -> None:
    """Raises UserError for a family that needs Transformer Engine on a machine without, or that Bridge mistakes."""
    if model_type == "ernie4_5_moe":
        raise UserError(
            f"{source}: model_type {model_type} chooses experts by softmax, and Megatron-Bridge 0.6 by sigmoid: "
            "another model would be trained"
        )
    if model_type in NEEDS_TE and not (HAVE_TE and torch.cuda.is_available()):
        raise UserError(
            f"{source}: model_type {model_type} has {NEEDS_TE[model_type]}, which need Transformer Engine and a GPU "
            "here; docs/models.md lists the families that train without"
        )


UNSPLIT = {  # by model_type: families with weights whose gradients Bridge's layers do not add up over ranks
    "gemma4": "norms of queries and keys",
    "gemma4_text": "norms of queries and keys",
    "minimax_m2": "norms over all heads",
    "olmoe": "norms over all heads",
}


def check_tensor_parallel(model_type: str, config: TransformerConfig, parallelism: ParallelismConfig) -> None:
    """Raises UserError where each of the ranks that share layers would have a part of a weight's gradient."""
    size, key = parallelism.tensor_model_parallel_size or 1, "parallelism.tensor_model_parallel_size"
    is_split = model_type.startswith("gemma4") and config.num_moe_experts  # those with experts are other classes
    if size > 1 and model_type in UNSPLIT and not is_split:
        raise UserError(
            f"{key} {size}: Megatron-Bridge's layers of model_type {model_type} have {UNSPLIT[model_type]}, which "
            "ranks do not share; set it to 1"
        )
    if size > 1 and NEEDS_TE.get(model_type) == LINEAR and not parallelism.sequence_parallel:
        raise UserError(
            f"{key} {size} needs parallelism.sequence_parallel in a model with {LINEAR}, whose norms' "
            "gradients are added up with it alone"
        )


def choose_attention(attention: str, config: TransformerConfig, device: torch.device, *, has_te: bool) -> str:
    """te, sdpa or local; what auto means is in ``ModelConfig.attention``."""
    te, lacks = has_te and device.type == "cuda", sdpa_lacks(config)
    if attention == "te" and not te:
        raise UserError("model.attention=te needs Transformer Engine and a GPU: set model.attention=auto")
    if attention == "sdpa" and lacks:
        raise UserError(f"model.attention=sdpa, but this model needs {lacks}: set model.attention=auto")
    if attention != "auto":
        return attention
    if not te and lacks:
        logger.warning("attention: Megatron's own, which is slower than torch's, since this model needs %s", lacks)
    return "te" if te else "local" if lacks else "sdpa"


def local_layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    core_attention: type = SDPAttention,
    change: Callable[[ModuleSpec], None] = lambda layer: None,
) -> TransformerBlockSubmodules:
    """Megatron's local layers of this stage, with norms that allow sequence parallelism. change: as the family's."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention.submodules, name, None) not in (None, IdentityOp, L2Norm):
                setattr(attention.submodules, name, TorchNorm)
        attention.submodules.core_attention = core_attention
        if attention.module is SelfAttention:
            attention.module = RotatingSelfAttention
        elif attention.module is MLASelfAttention:
            attention.module = LatentSelfAttention
        change(layer)
    block.layer_norm = TorchNorm
    return block


def correct_layers(chunks: list[MegatronModule]) -> list[MegatronModule]:
    """The chunks with what Megatron lacks. Latent norms get the eps that transformers' have, whatever rms_norm_eps is;
    with Transformer Engine some norms are inside the layer that follows. Experts' output biases are reduced over the
    experts' ranks alone: its mark of sequence parallelism would add them up over tensor-parallel ranks as well. An
    attention's sinks are those of a rank's heads: without a mark, the gradient norm counts the first rank's."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            if isinstance(module, MLASelfAttention) and hasattr(part := getattr(module, name, None), "eps"):
                part.eps = 1e-6
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            module.bias.sequence_parallel = False
        sinks: Any = getattr(module, "softmax_offset", None)
        if sinks is not None:
            sinks.tensor_model_parallel = True
    return chunks


def check_packing(chunks: Iterable[torch.nn.Module], *, share_prompts: bool = False) -> None:
    """Raises UserError where a layer cannot keep packed sequences apart, or its attention support shared prompts."""
    from megatron.bridge.models.falcon_h1.modeling_falconh1.falconh1_layer import FalconH1Layer
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2DotProductAttention

    modules = [module for chunk in chunks for module in chunk.modules()]
    latent = any(isinstance(module, SDPAttention) and module.config.multi_latent_attention for module in modules)
    # Falcon-H1's does not tell its Mamba layers of the pack: a sequence would begin in the last one's final state.
    mixing = (DotProductAttention, Gemma2DotProductAttention, FalconH1Layer)
    if latent or any(isinstance(module, mixing) for module in modules):
        raise UserError(
            "packing needs layers that keep packed sequences apart; this model has Megatron's own attention, latent "
            "attention without Transformer Engine, or Megatron-Bridge's layers of Gemma 2 or Falcon-H1, which do not: "
            "set packing=false, or model.attention=auto if it was local"
        )
    layers = [module for module in modules if isinstance(module, Attention)]
    # Flash and cuDNN's attention take 16 bits only, and Transformer Engine's own no packed sequences.
    if any(not reads_by_head(layer) and layer.config.params_dtype is torch.float32 for layer in layers):
        raise UserError(
            "Transformer Engine's attention has no kernel for packing in fp32: set model.attention=sdpa, "
            "precision=bf16 or packing=false"
        )
    if share_prompts and not all(shares_prompts(layer) for layer in layers):
        raise UserError(
            "share_prompts needs torch's attention and rotary positions of whole heads, which this model is not built "
            "with: set share_prompts=false, or model.attention=sdpa if it was te or auto"
        )


def reads_by_head(attention: Attention) -> bool:
    """Whether a cache that is stored head by head suits its core: ours and Megatron's, not Transformer Engine's."""
    return isinstance(attention.core_attention, tuple(CORES.values()))


def shares_prompts(attention: Attention) -> bool:
    """Whether an attention layer can compute packs whose sequences share prompts."""
    whole = isinstance(attention, RotatingSelfAttention) and isinstance(attention.core_attention, SDPAttention)
    return whole and rotates(attention.config)


def keeps_state(module: torch.nn.Module) -> bool:
    """Whether a layer carries a state from token to token, where attention has keys and values."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer

    return isinstance(module, GatedDeltaNet | MambaMixer)


def products_of_few_rows(chunks: list[MegatronModule]) -> AbstractContextManager[None]:
    """Inside the block matrix products are made for decoding: weights do not change, and nothing is differentiated."""
    on_cpu = next(chunks[0].parameters()).device.type == "cpu"
    return packed_weights(chunks) if on_cpu and torch.backends.mkldnn.is_available() else nullcontext()


FUSED = {  # module and package of what Megatron computes with on GPUs where it is installed, else without
    "Transformer Engine": ("transformer_engine.pytorch", "transformer-engine"),
    "fused weight gradients": ("fused_weight_gradient_mlp_cuda", "apex"),
    "flash attention": ("flash_attn", "flash-attn"),
}


def fused_kernels() -> dict[str, str]:
    """The version of each of ``FUSED``, or why it is absent."""
    if not torch.cuda.is_available():
        return dict.fromkeys(FUSED, "absent: the device is a CPU")
    found = {}
    for name, (module, package) in FUSED.items():
        try:
            importlib.import_module(module)
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "of unknown version"
        except (ImportError, OSError) as error:  # OSError: a library that its compiled part needs
            found[name] = f"absent: {error}"
    return found


def kernels(chunks: list[MegatronModule]) -> dict[str, str]:
    """For each part of the computation, what this process computes it with."""

    def name(thing: type) -> str:
        return f"{thing.__module__}.{thing.__qualname__}"

    model = unwrap_model(chunks[0])
    # Layers with Mamba or a gated delta net have no attention, and a pipeline stage may have such layers only.
    attending = (one for one in model.decoder.layers if isinstance(getattr(one, "self_attention", None), Attention))
    if (layer := next(attending, None)) is None:
        return {"attention": "none in this stage's layers", "optimizer": name(optimizer.Adam), **fused_kernels()}
    config, attention = model.config, layer.self_attention
    norm = getattr(layer, "input_layernorm", IdentityOp())  # Falcon-H1's layers call theirs otherwise
    if isinstance(norm, IdentityOp):  # Transformer Engine's is part of the matrix product that follows
        norm = attention.linear_qkv
    softmax = "in the attention"
    if isinstance(attention.core_attention, DotProductAttention):
        softmax = "megatron, fused" if config.masked_softmax_fusion else "torch"
    linear, core = name(type(attention.linear_proj)), name(type(attention.core_attention))
    te_linear, te_core = "transformer_engine" in linear, "transformer_engine" in core
    used = {
        "Transformer Engine": te_linear or te_core,
        "fused weight gradients": config.gradient_accumulation_fusion,
        "flash attention": te_core and os.environ.get("NVTE_FLASH_ATTN") != "0",
    }
    fused = {
        part: state if used[part] or state.startswith("absent") else f"not used by this model's layers ({state})"
        for part, state in fused_kernels().items()
    }
    if used["fused weight gradients"] and te_linear:  # apex's are for Megatron's own layers
        fused["fused weight gradients"] = "Transformer Engine's own"
    return {
        "attention": core,
        "softmax": softmax,
        "norm": name(type(norm)),
        "matrix products": linear + (f", fp8 {config.fp8_recipe}" if config.fp8 else ""),
        "fp32 products": "TF32" if torch.backends.cuda.matmul.allow_tf32 else "fp32",
        "rotary embedding": "fused" if config.apply_rope_fusion else "torch",
        "optimizer": name(optimizer.Adam),
        "gradient norm": name(clip_grads.l2_norm_impl),
        **fused,
    }
