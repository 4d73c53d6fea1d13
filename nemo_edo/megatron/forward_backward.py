"""Forward and backward passes over a global batch through Megatron's schedules.

The one place that divides a loss: by counts of the whole global batch, fixed before the first backward pass. A
micro-batch, a data-parallel rank or a pipeline stage adds its sums and divides by nothing, so gradients do not depend
on how a batch is split. Megatron is configured to do the same (``calculate_per_token_loss`` in bridge.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_edo.data.shares import Prompts, Share, take_rows
from nemo_edo.errors import UserError
from nemo_edo.losses import LossTerm, NotFinite, one_check
from nemo_edo.megatron.output_layer import LossHead
from nemo_edo.megatron.packing import ModelInputs, packed_inputs, row_inputs
from nemo_edo.megatron.platform import moved
from nemo_edo.megatron.policy import MegatronPolicy
from nemo_edo.megatron.routing import own_routing_afterwards, set_recomputing, set_replayed
from nemo_edo.megatron.shared_prompts import shared_inputs
from nemo_edo.parallel.main_rank import any_rank, gathered
from nemo_edo.types import TrainingBatch

TERM = "term:"  # before the names of the loss's terms, among the metrics
TOKENS = "tokens:"  # among the metrics: the log-probabilities and entropies of a micro-batch

Terms = tuple[dict[str, LossTerm], dict[str, LossTerm]]  # the terms of a loss by name, and its metrics
LossFunction = Callable[[Tensor, Tensor, TrainingBatch, float], Terms]
"""(log-probabilities [b, T], entropies [b, T], micro-batch, exploration weight) -> terms."""


def forward_backward(
    policy: MegatronPolicy,
    share: Share,
    loss: LossFunction,
    *,
    exploration_weight: float,
    temperature: float,
    forward_only: bool = False,
    keep_tokens: bool = False,
) -> tuple[dict[str, float], Tensor | None]:
    """Accumulates the gradient of the loss over the global batch, reduced over all ranks, each with its share.

    The loss is the sum over its terms of term.sum / share.loss_counts[name]: each has its own denominator, its count
    over the global batch, which the micro-batches' counts must add up to.
    Returns the global means of the loss ("loss") and its metrics, the same on every rank, and with ``keep_tokens`` what
    ``share_values`` makes of the log-probabilities and entropies.
    The loss is NaN where it is not finite in any micro-batch of any rank, or a loss function raises ``NotFinite``: then
    the gradient is useless, and the metrics leave that micro-batch out.
    """
    readout = _Readout(policy.head, temperature, loss, exploration_weight, share.loss_counts, keep_tokens)
    # Megatron gathers changed weights during the forward pass only after zero_grad.
    chunks = policy.chunks if forward_only else policy.built.training_chunks
    stored = _run_schedule(policy, chunks, share, readout, forward_only)
    if not forward_only and not policy.has_equal_copies:
        policy.has_equal_copies = _have_equal_copies(chunks)
    tokens = share_values(share, [micro.pop(TOKENS) for micro in stored], policy.device) if keep_tokens else None
    return _means(_reduce_metrics(policy, stored), share.loss_counts), tokens


@torch.no_grad()
def logprobs_and_entropy(policy: MegatronPolicy, share: Share, temperature: float) -> Tensor:
    """Log-probabilities and exact entropies (nats) of the share's rows, as of ``share_values``; 0 where the mask is."""
    readout = _Readout(policy.head, temperature)
    stored = _run_schedule(policy, policy.chunks, share, readout, forward_only=True)
    return share_values(share, stored, policy.device)


def share_values(share: Share, stored: list[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """[2, b, t] of what the share's micro-batches have given on the last pipeline stage; zeros on the others."""
    result = torch.zeros(2, *share.rows.mask.shape, device=device)
    for rows, values in zip(share.micro_batches, stored, strict=True) if stored else ():
        both = torch.stack(values)[:, : len(rows), : result.shape[-1]]
        result[:, moved(torch.tensor(rows, dtype=torch.int64), device), : both.shape[-1]] = both
    return result


def on_every_rank(share: Share, own: Tensor, shape: torch.Size) -> Tensor:
    """[2, B, T] of a global batch that every rank holds, from each rank's ``share_values``."""
    whole = torch.zeros(2, *shape, device=own.device)
    whole[:, share.places, : own.shape[-1]] = own[:, : len(share.places)]
    torch.distributed.all_reduce(whole, group=parallel_state.get_data_parallel_group())
    _broadcast_from_last_stage(whole)
    return whole.cpu()


# --- what Megatron's schedule calls ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Readout:
    """Runs the model on a micro-batch, and reads log-probabilities, entropies and the loss from its outputs."""

    head: LossHead
    temperature: float
    loss: LossFunction | None = None  # None: log-probabilities and entropies alone are read
    exploration_weight: float = 0.0
    loss_counts: Mapping[str, float] = field(default_factory=dict)
    keep_tokens: bool = False
    inputs: ModelInputs | None = None  # of the micro-batch that is being read

    def forward_step(self, micro_batches: Iterator[ModelInputs], chunk: MegatronModule) -> tuple[Tensor, _Readout]:
        """Megatron calls what this returns second with what it returns first, on the last pipeline stage."""
        inputs = next(micro_batches)
        if inputs.experts is not None:
            set_replayed(chunk, inputs.experts)
        # Megatron's wrapper of 16-bit models would copy their outputs to fp32.
        options = {"fp32_output": False} if get_model_config(chunk).bf16 else {}
        outputs = chunk(inputs.tokens, inputs.positions, None, packed_seq_params=inputs.packed, **options)
        if inputs.experts is not None:
            set_recomputing(chunk)
        return outputs, replace(self, inputs=inputs)

    def __call__(self, outputs: Tensor) -> tuple[Tensor, Tensor, object]:
        """The loss of the micro-batch, divided by the global counts, a token count of 0 that Megatron would divide by
        (see ``_sum_gradients``), and what is kept: log-probabilities and entropies [b, T], zero where the mask is, or
        the loss's terms and metrics."""
        inputs, no_tokens = self.inputs, torch.zeros([], dtype=torch.int, device=outputs.device)
        values = self.head(outputs, inputs.targets, inputs.read, self.temperature)
        logprobs, entropies = (inputs.to_rows(value) for value in values)
        if self.loss is None:
            return outputs.new_zeros(()), no_tokens, (logprobs, entropies)
        if torch.is_grad_enabled() and not logprobs.requires_grad:  # Megatron would skip the backward pass in silence
            raise RuntimeError("the log-probabilities depend on no trained weight: a step would change nothing")
        tokens = {TOKENS: (logprobs.detach(), entropies.detach())} if self.keep_tokens else {}
        if inputs.is_padding:  # it keeps the ranks in step, and no loss sees it
            return logprobs.sum() * 0.0, no_tokens, tokens
        try:
            with one_check():
                terms, metrics = self.loss(logprobs, entropies, inputs.micro, self.exploration_weight)
        except NotFinite:  # perhaps on this rank alone, and the others wait for it: it goes through the whole pass
            terms = dict.fromkeys(self.loss_counts, LossTerm(logprobs.sum() * math.nan, math.nan))
            metrics = {}
        parts = [terms[name].sum / max(count, 1.0) for name, count in self.loss_counts.items()]
        total = sum(parts[1:], parts[0])
        sums = _pairs(metrics | {TERM + name: term for name, term in terms.items()})
        return total, no_tokens, sums | tokens


def _run_schedule(
    policy: MegatronPolicy, chunks: list[MegatronModule], share: Share, readout: _Readout, forward_only: bool
) -> list:
    """Megatron's schedule over the share: ``readout``'s third values on the last pipeline stage, [] on the others."""
    # On the CPU, and then moved: which positions are read, and how packs are laid out, would wait for a GPU.
    micro_batches = [inputs.to(policy.device) for inputs in _inputs(share, policy.built.vocab_size)]
    get_model_config(chunks[0]).finalize_model_grads_func = _sum_gradients
    with readout.head.installed(), own_routing_afterwards(chunks):
        return get_forward_backward_func()(
            forward_step_func=readout.forward_step,
            data_iterator=[iter(micro_batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(micro_batches),
            # Where micro-batches differ in both, pipeline stages tell each other the shapes (variable_seq_lengths).
            seq_length=max(length for _, length in share.shapes),
            micro_batch_size=max(rows for rows, _ in share.shapes),
            forward_only=forward_only,
        )


def _inputs(share: Share, vocab_size: int) -> list[ModelInputs]:
    """What the model sees. Raises ValueError for ids outside the vocabulary, which would end a process on a GPU."""
    least, most = (int(value) for value in share.rows.tokens.aminmax())
    if least < 0 or most >= vocab_size:
        raise ValueError(f"token ids are {least} to {most}, expected 0 to {vocab_size - 1}")
    inputs = []
    for rows, shape in zip(share.micro_batches, share.shapes, strict=True):
        # A micro-batch of padding only has a unit of the shortest rows.
        lengths = [share.lengths[row] for row in rows] or [2] * share.rows.unit
        micro = take_rows(share.rows, rows, max(lengths))
        if share.prompts is not None:
            prompts = share.prompts.take(rows) if rows else Prompts.none(share.rows.unit)
            inputs.append(shared_inputs(micro, lengths, prompts, shape))
        else:
            inputs.append(packed_inputs(micro, lengths, shape) if share.packing else row_inputs(micro, shape))
    return inputs


def _sum_gradients(model: list[MegatronModule], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Megatron's reduction of gradients over ranks, without its division by a number of tokens."""
    finalize_model_grads(model, None, **kwargs)


UNEQUAL = 1e-2
"""Relative difference of two ranks' gradients of one weight that rounding does not explain."""


def _have_equal_copies(chunks: list[MegatronModule]) -> bool:
    """Whether the gradients could be compared, which in some steps are 0 or not all finite. Raises UserError where
    tensor-parallel ranks have different gradients of a weight that each of them has whole: layers of a family that do
    not add up the ranks' parts would let the copies drift apart, and no log-probability shows it before."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return True
    whole = {
        name: torch.linalg.vector_norm(parameter.main_grad, dtype=torch.float64)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
        and getattr(parameter, "allreduce", True)  # not an expert's
        and not getattr(parameter, "tensor_model_parallel", False)
    }
    if not whole:
        return True
    least = torch.stack(list(whole.values()))
    most = least.clone()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    far = (most - least > UNEQUAL * most).tolist()
    if different := [name for name, is_far in zip(whole, far, strict=True) if is_far]:
        raise UserError(
            f"tensor-parallel ranks have different gradients of {different[0]}, of which each has all: the layers of "
            "this model do not add up the ranks' parts; set parallelism.tensor_model_parallel_size=1"
        )
    return bool(most.isfinite().all() and most.any())


def _means(totals: dict[str, tuple[float, float]], loss_counts: Mapping[str, float]) -> dict[str, float]:
    """Global means, the loss's terms added up; RuntimeError where their counts are not those of the global batch."""
    for name, expected in loss_counts.items():
        found = totals[TERM + name][1]
        if abs(found - expected) > 1e-3 * max(expected, 1.0):
            raise RuntimeError(f"the micro-batches' terms {name!r} count {found}, the global batch {expected}")
    means = {name: total / count if count else 0.0 for name, (total, count) in totals.items()}
    terms = [means.pop(TERM + name) for name in loss_counts]
    return {"loss": math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan, **means}


def _pairs(terms: Mapping[str, LossTerm]) -> dict[str, Tensor]:
    """Each term's sum and count, [2] float64 on the sum's device, copied together. A count may be a plain number."""
    sums = torch.stack([term.sum.detach() for term in terms.values()]).double()
    counts = torch.stack(
        [term.count if isinstance(term.count, Tensor) else sums.new_full((), term.count) for term in terms.values()]
    ).double()
    return dict(zip(terms, torch.stack([sums, counts], dim=1), strict=True))


def _reduce_metrics(policy: MegatronPolicy, stored: list[dict[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Adds sums and counts over micro-batches and data-parallel ranks; every pipeline stage receives them."""
    group, device = parallel_state.get_data_parallel_group(), policy.device
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    names = sorted({name for micro in stored for name in micro})
    if torch.distributed.get_world_size() == 1:
        policy.metric_names = names
    elif any_rank(bool(names) and names != policy.metric_names):  # lists are pickled, which waits for a GPU ten times
        # The names in any micro-batch of any rank: a rank whose rows are all padding has none.
        found = gathered(names, group)
        shared, last = [sorted(set().union(*found))], parallel_state.get_pipeline_model_parallel_last_rank()
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast_object_list(shared, src=last, group=pipeline)
        policy.metric_names = shared[0]
    names = policy.metric_names
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for micro in stored:
        sums += torch.stack([micro.get(name, nothing) for name in names])
    torch.distributed.all_reduce(sums, group=group)
    _broadcast_from_last_stage(sums)
    return {name: (float(total), float(count)) for name, (total, count) in zip(names, sums.tolist(), strict=True)}


def _broadcast_from_last_stage(tensor: Tensor) -> None:
    torch.distributed.broadcast(
        tensor,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
