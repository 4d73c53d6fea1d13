"""What FP8 training needs from the machine and the model, checked before time is spent, and Megatron's switches."""

import os
import warnings

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from packaging.version import Version

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError

BLOCK = 128  # tokens, and numbers of a token, that the blockwise recipe scales together
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


SUPPORT = {  # how Transformer Engine tells whether the GPU and the libraries allow a recipe, and why not
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def check_fp8_support(precision: PrecisionConfig, engine: Version | None) -> None:
    """Raises UserError where the machine lacks what the config's FP8 recipe needs. engine: the version of Transformer
    Engine, 0.0.0 where it is absent; None: there is no GPU."""
    if precision.fp8 is None:
        return
    if engine is None or not engine.major:
        absent = "a GPU, and there is none" if engine is None else "Transformer Engine, which is absent"
        raise UserError(f"precision.fp8 {precision.fp8} needs {absent}: set precision=bf16")
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    found = {recipe: getattr(FP8GlobalStateManager, name)() for recipe, name in SUPPORT.items()}
    allowed, why = found[precision.fp8_recipe]
    if not allowed:
        possible = ", ".join(recipe for recipe, (allowed, _) in found.items() if allowed)
        raise UserError(
            f"precision.fp8_recipe {precision.fp8_recipe}: {why} This machine can do "
            f"{possible or 'no FP8 recipe: set precision=bf16'}"
        )


def token_multiple(recipe: str, *, gathers: bool) -> int:
    """What a rank's number of tokens must be a multiple of. gathers: whether layers gather their inputs from
    tensor-parallel ranks (sequence parallelism). Blockwise ones are then whole blocks of tokens and of the hidden size
    (Transformer Engine's ``assert_dim_for_all_gather``)."""
    return BLOCK if recipe == "blockwise" and gathers else get_fp8_align_size(recipe)


def check_dimensions(precision: PrecisionConfig, model, parallelism: ParallelismConfig) -> None:
    """Raises UserError where a dimension of a rank's matrix products is no multiple of what FP8 needs."""
    if precision.fp8 is None:
        return
    tensor = parallelism.tensor_model_parallel_size
    groups = model.num_query_groups or model.num_attention_heads
    sizes = {
        "hidden size": model.hidden_size,
        "queries, keys and values": (model.num_attention_heads + 2 * groups) * model.kv_channels // tensor,
        "attention output": model.num_attention_heads * model.kv_channels // tensor,
    }
    if model.num_moe_experts:
        expert = parallelism.expert_tensor_parallel_size or tensor
        sizes["units of an expert"] = model.moe_ffn_hidden_size // expert
    else:
        sizes["units of an MLP"] = model.ffn_hidden_size // tensor
    step, gathers = get_fp8_align_size(precision.fp8_recipe), parallelism.sequence_parallel and tensor > 1
    of_hidden = token_multiple(precision.fp8_recipe, gathers=gathers)
    if model.hidden_size % of_hidden and not model.hidden_size % step:
        raise UserError(
            f"precision.fp8_recipe {precision.fp8_recipe} with parallelism.sequence_parallel needs a hidden size that "
            f"is a multiple of {of_hidden}, the model's is {model.hidden_size}: set "
            "parallelism.sequence_parallel=false or precision=fp8"
        )
    odd = [f"{name} {size}" for name, size in sizes.items() if size % step]
    if odd:
        raise UserError(
            f"precision.fp8_recipe {precision.fp8_recipe} needs multiples of {step} on each tensor-parallel rank, the "
            f"model has {', '.join(odd)}: choose a smaller parallelism.tensor_model_parallel_size or precision=bf16"
        )


def warn_of_emulated_bf16(precision: PrecisionConfig) -> None:
    """Warns where bf16 is the precision and this machine, a CPU, has no instructions for it."""
    if precision.dtype != "bf16" or torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    warnings.warn(
        "this CPU has no instructions for bf16, whose matrix products take four to six times as long as fp32's: set "
        "precision=fp32",
        stacklevel=2,
    )


CUBLAS_TF32 = "NVIDIA_TF32_OVERRIDE"


def allow_tf32(allowed: bool) -> None:
    """Sets how this process computes fp32 products, before its first one. Torch has a switch, whose default images of
    NVIDIA's turn on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE). Transformer Engine has none and asks for TF32 always: only a
    variable forbids it, which cuBLAS reads at its first call."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    os.environ.pop(CUBLAS_TF32, None)
    if not allowed:
        os.environ[CUBLAS_TF32] = "0"


def configure(model, precision: PrecisionConfig) -> None:
    """Sets Megatron's config of a model, and the process's products, to this precision."""
    allow_tf32(precision.tf32)
    dtype = DTYPES[precision.dtype]
    model.params_dtype = model.pipeline_dtype = model.autocast_dtype = dtype
    model.bf16 = dtype is torch.bfloat16
    model.fp16 = False
    model.fp8 = precision.fp8
    if precision.fp8 is None:
        return
    model.fp8_recipe = precision.fp8_recipe
    model.fp8_margin = precision.fp8_margin
    model.fp8_amax_history_len = precision.fp8_amax_history_len
    model.fp8_amax_compute_algo = "max"
    model.fp8_param = precision.fp8_param_gather
    model.num_layers_at_start_in_bf16 = precision.bf16_layers_at_start
    model.num_layers_at_end_in_bf16 = precision.bf16_layers_at_end
    model.first_last_layers_bf16 = bool(precision.bf16_layers_at_start or precision.bf16_layers_at_end)
