"""Single-token passes of a model in training, and sampling by random numbers that depend on the request only."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.inference.communication_utils import recv_from_prev_pipeline_rank_, send_to_next_pipeline_rank
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from nemo_edo.megatron.layer_spec import products_of_few_rows
from nemo_edo.types import SamplingParams

SWITCHES = {  # attributes of Megatron's modules and Bridge's adapters, with sequence parallelism off
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "disable_sequence_parallel_comm": True,
}
CPU_BLOCK, GPU_BLOCK = 2**18, 2**26  # logits chosen from at a time: a core's cache holds them; a GPU can spare them
LIKELY = 1024  # tokens that nearly always reach top_p; finding them costs a tenth of sorting a whole vocabulary


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
    """Logits of ``tokens`` [b, s] at ``positions`` on the last pipeline stage, None on the others. Hidden states [s, b,
    h] go from stage to stage, once around the pipeline for each virtual stage."""
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


def request_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """[B, length] float32 uniforms in [0, 1): row b depends on ``seeds[b]`` alone (a Philox counter each). So a request
    gets the same response whatever else is in its batch, and on any rank."""
    bits = np.random.Philox(key=0)
    generator, state = np.random.Generator(bits), bits.state
    rows = np.empty((len(seeds), length), dtype=np.float32)
    for row, seed in zip(rows, seeds, strict=True):
        state["state"]["key"][:] = seed % 2**64, seed >> 64  # the state of Philox(key=seed), without its construction
        bits.state = state
        generator.random(out=row, dtype=np.float32)
    return torch.from_numpy(rows)


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Samples a token for each row by inverting the cumulative distribution at its uniform number: tokens [B] int64 and
    their log-probabilities [B] float32 under the temperature-scaled softmax over the whole vocabulary, before any top-p
    cut, as a trainer recomputes them. logits: [B, V]; uniforms: [B] in [0, 1). Temperature 0: the first likeliest."""
    rows = max(1, (GPU_BLOCK if logits.is_cuda else CPU_BLOCK) // logits.shape[1])
    blocks = zip(logits.split(rows), uniforms.split(rows), strict=True)
    tokens, logprobs = zip(*(_choose(*block, sampling) for block in blocks), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    elif sampling.top_p < 1:
        kept, order = _nucleus(logprobs.exp(), sampling.top_p)
        tokens = order.gather(-1, _invert(kept, uniforms)[:, None]).squeeze(-1)
    else:
        tokens = _invert(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _nucleus(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens' probabilities in falling order, zero after the first of them that add up to top_p, and
    the tokens; of equals the first token comes first (Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration"). All tokens are sorted only where the ``LIKELY`` most likely ones do not reach top_p."""
    if probs.shape[1] > LIKELY:
        chosen = probs.topk(LIKELY, sorted=False).indices.sort(dim=-1).values
        sorted_probs, places = probs.gather(-1, chosen).sort(dim=-1, descending=True, stable=True)
        before = sorted_probs.cumsum(dim=-1) - sorted_probs
        # Tokens as likely as the last of these may be missing among them: those are not to be kept.
        at_the_edge = sorted_probs == sorted_probs[:, -1:]
        if bool((~at_the_edge | (before >= top_p)).all()):
            return sorted_probs.masked_fill(before >= top_p, 0.0), chosen.gather(-1, places)
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = sorted_probs.cumsum(dim=-1) - sorted_probs
    return sorted_probs.masked_fill(before >= top_p, 0.0), order  # the first token always stays


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds the uniform's share of the total; its own is never 0."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = uniforms.to(probs.device)[:, None] * total
    # Rounding can carry a target up to the total, which no cumulative probability exceeds.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True).squeeze(-1)
