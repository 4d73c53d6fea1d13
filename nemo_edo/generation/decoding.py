"""Single-token forward passes of a model that is set up for training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.inference.communication_utils import recv_from_prev_pipeline_rank_, send_to_next_pipeline_rank
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from nemo_edo.megatron.layer_spec import products_of_few_rows

SWITCHES = {
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "disable_sequence_parallel_comm": True,
}
"""Attributes of Megatron's modules and Megatron-Bridge's adapters, with sequence parallelism off."""


@contextlib.contextmanager
def token_by_token(chunks: list[MegatronModule]) -> Iterator[list[MegatronModule]]:
    """Inside the block the model is in evaluation mode, without sequence parallelism and FP8, which need more than one
    token at a time. FP8 weights are used as their bf16 originals. Its logits are those of the last position alone."""
    config = get_model_config(chunks[0])
    modules = [module for chunk in chunks for module in chunk.modules()]
    before = [(module, "training", module.training) for module in modules] + [(config, "fp8", config.fp8)]
    if config.sequence_parallel:
        owners = [config, *modules]
        before += [(owner, name, getattr(owner, name)) for owner in owners for name in SWITCHES if name in vars(owner)]
    for owner, name, _ in before:
        setattr(owner, name, {**SWITCHES, "training": False, "fp8": None}[name])
    try:
        with InferenceMode.active(), products_of_few_rows(chunks):
            yield chunks
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def through_stages(
    chunks: list[MegatronModule], tokens: Tensor, positions: Tensor, context: StaticInferenceContext
) -> Tensor | None:
    """Logits of ``tokens`` [b, s] at ``positions`` on the last pipeline stage, None on the others.

    Hidden states [s, b, h] go from stage to stage, once around the pipeline for each virtual stage.
    """
    config, group = get_model_config(chunks[0]), parallel_state.get_pipeline_model_parallel_group()
    shape = (tokens.shape[1], tokens.shape[0], config.hidden_size)
    outputs = None
    for virtual, chunk in enumerate(chunks):
        received = None
        if group.rank() > 0 or virtual > 0:
            received = torch.empty(shape, dtype=config.params_dtype, device=tokens.device)
            recv_from_prev_pipeline_rank_(received, group)
        get_attr_wrapped_model(chunk, "set_input_tensor")(received)
        outputs = chunk(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        if group.rank() + 1 < group.size() or virtual + 1 < len(chunks):
            send_to_next_pipeline_rank(outputs.to(config.params_dtype), group)
            outputs = None
    context.increment_sequence_len_offset(tokens.shape[1])
    return outputs
