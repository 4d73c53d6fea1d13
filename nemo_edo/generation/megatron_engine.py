"""Sampling in the trainer's process, from the weights in training: batched decoding with megatron-core's KV cache.
Requests share equal prompts, only the last position's logits are computed, and rows that have ended leave the batch.
Where rows may be at different positions, waiting requests take their places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_edo.config.generation import AUTO
from nemo_edo.errors import UserError
from nemo_edo.generation.batch_size import of_similar_length, refilled_places, row_bytes, rows_that_fit, split_evenly
from nemo_edo.generation.sampling import choose_tokens, request_uniforms, through_stages, token_by_token
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.megatron.bridge import BuiltModel
from nemo_edo.megatron.decoding_cache import CacheContext, PromptCacheContext, joined
from nemo_edo.megatron.layer_spec import keeps_state, reads_by_head, shares_prompts
from nemo_edo.megatron.platform import fetched, moved
from nemo_edo.megatron.routing import recorded, recording
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.utils.status_line import Counter

FEWEST_READ = {"cpu": 512, "cuda": 8192}  # prompt tokens from which on a pass is about as fast per token as larger ones
COMPACT_BELOW = 0.9  # share of rows that are alive below which ended ones leave: copies of the cache cost time


@dataclass(eq=False, repr=False)
class MegatronEngine:
    """A GenerationEngine over a Megatron model, with the model's parallelism."""

    built: BuiltModel
    _: KW_ONLY
    stop_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    max_batch_size: int | str  # rows that are decoded at a time at most; AUTO: as many as memory has room for
    device: torch.device
    keeps_experts: bool = False  # rollouts get ``routed_experts``
    progress: bool = False

    def __post_init__(self) -> None:
        config = get_model_config(self.built.chunks[0])
        if config.context_parallel_size > 1 or config.expert_model_parallel_size > 1:
            raise ValueError("in-process generation can use neither context nor expert parallelism")
        modules = [module for chunk in self.built.chunks for module in chunk.modules()]
        if any(map(keeps_state, modules)):
            raise UserError(
                "in-process generation caches keys and values of attention alone, and this model has Mamba layers or "
                "linear attention: set generation=vllm"
            )
        self.policy_version = 0
        self._stops = torch.tensor(sorted(self.stop_ids))
        self._layers = layers = [module for module in modules if isinstance(module, Attention)]
        self._shares_prompts, self._by_head = all(map(shares_prompts, layers)), all(map(reads_by_head, layers))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        longest: tuple[int, int] | None = None,
        ended: Callable[[list[int], list[Rollout]], None] = lambda places, rollouts: None,
    ) -> list[Rollout]:
        """One rollout for each request, in order. Ranks that share the model call it with the same requests. longest:
        the longest prompt and response of all data-parallel ranks, in tokens; None: of these requests. ended: called at
        each step with the places and the responses that have ended in it."""
        mine = list(requests)
        prompt, response = longest or (
            max((len(request.prompt_ids) for request in mine), default=1),
            max((request.limit(sampling) for request in mine), default=1),
        )
        # Rows of a batch advance together, so batches have prompts of similar length.
        order = sorted(range(len(mine)), key=lambda i: (len(mine[i].prompt_ids), mine[i].prompt_ids))
        rollouts: list[Rollout | None] = [None] * len(mine)
        rows = self._batch_size(prompt, response)
        with (
            torch.no_grad(),  # Transformer Engine keeps tensors for training that inference_mode would forbid it to use
            token_by_token(self.built.chunks) as self._chunks,
            recording(self.built.chunks) if self.keeps_experts else nullcontext(),
            Counter("generate", len(mine), shown=self.progress) as counter,
        ):
            for places in split_evenly(order, max(1, len(mine)) if self._shares_prompts else rows):
                asked, strings = [mine[i] for i in places], StopStrings(sampling.stop, self.decode)
                decoding = _Decoding(asked, rows, sampling, strings, self.device, whole_prompts=self._shares_prompts)
                prefill = self._prefill_whole if decoding.after_prompts else self._prefill_equal
                logits, waiting = prefill(decoding), len(asked)
                for step in itertools.count():
                    tokens, logprobs = self._choose(logits, decoding, step, sampling)
                    last = decoding.record(step, tokens, logprobs, self._stops)
                    new = decoding.take_ended(last, self.decode, self.policy_version)
                    counter.add(len(new))
                    ended([places[place] for place in new], list(new.values()))
                    for place, rollout in new.items():
                        rollouts[places[place]] = rollout
                    waiting -= len(new)
                    if waiting == 0:
                        break
                    if decoding.alive.sum() < COMPACT_BELOW * len(decoding.rows) or decoding.context.is_full:
                        decoding.compact()
                        if decoding.free_rows:  # for waiting requests; the end of a prompt is a row's next token
                            begun = decoding.refill(step)
                            context, owner = self._read_prompts(decoding, begun)
                            lengths = decoding.prompt_lengths[begun] - 1
                            decoding.context.add(context, self._moved(owner), self._moved(lengths))
                    logits = self._forward(decoding, decoding.last[:, None], decoding.positions(step))
        return rollouts

    def _batch_size(self, prompt: int, response: int) -> int:
        """The most rows of a batch, the same on every rank. prompt, response: the longest ones of all ranks."""
        if self.max_batch_size != AUTO:
            return int(self.max_batch_size)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        row = row_bytes(
            self._layers,
            prompt=prompt,
            response=refilled_places(response) if self._shares_prompts else response,
            vocabulary=self.built.vocab_size if pipeline.rank() + 1 == pipeline.size() else 0,
            device=self.device,
        )
        return rows_that_fit(row, self.device)

    def _prefill_whole(self, decoding: _Decoding) -> Tensor | None:
        """Logits of each row's next token, where positions may differ. All but a prompt's last token goes to a cache
        that rows with the same prompt share; the last one is each row's first query, as the prompts' ends differ."""
        context, owner = self._read_prompts(decoding, decoding.rows)
        lengths = decoding.prompt_lengths[decoding.rows]
        length = context.max_sequence_length + decoding.places
        decoding.context = PromptCacheContext(context, self._moved(owner), length, self._moved(lengths - 1))
        return self._forward(decoding, decoding.ends_of_prompts(decoding.rows)[:, None], lengths[:, None] - 1)

    def _read_prompts(self, decoding: _Decoding, requests: Tensor) -> tuple[CacheContext, Tensor]:
        """A cache of the requests' distinct prompts without their last tokens, and each request's prompt in it."""
        lengths = decoding.prompt_lengths[requests]
        prompts = decoding.prompts[requests, : max(2, int(lengths.max()))]
        distinct, owner = torch.unique(torch.cat([lengths[:, None], prompts], dim=1), dim=0, return_inverse=True)
        read = (distinct[:, 0] - 1).clamp(min=1).tolist()
        least = FEWEST_READ[self.device.type]
        contexts = []
        for rows in of_similar_length(read, least):
            tokens = distinct[rows, 1 : 1 + read[rows.stop - 1]]
            contexts.append(context := CacheContext(*tokens.shape, by_head=self._by_head))
            positions = self._moved(_from_the_beginning(tokens))
            through_stages(self._chunks, self._moved(tokens), positions, context)
            if self.keeps_experts:
                of_these = (owner >= rows.start) & (owner < rows.stop)
                experts = recorded(self._chunks, tokens)[self._moved(owner[of_these] - rows.start)]
                decoding.keep_experts(requests[of_these], _from_the_beginning(experts[..., 0]), experts)
        return joined(contexts, by_head=self._by_head), owner

    def _prefill_equal(self, decoding: _Decoding) -> Tensor | None:
        """Logits of each row's next token, where all are at the end of the shortest prompt. Rows with the same prompt
        share its cache where their attention can, otherwise each gets a copy."""
        prefixes, owner = torch.unique(decoding.prompts[:, : decoding.prefix], dim=0, return_inverse=True)
        shared = self._shares_prompts and 2 * len(prefixes) <= len(owner)
        length = decoding.prefix if shared else decoding.length
        decoding.context = CacheContext(len(prefixes), length, by_head=self._by_head)
        logits = self._forward(decoding, prefixes, _from_the_beginning(prefixes), owner)
        owner = self._moved(owner)
        if shared:
            decoding.context = PromptCacheContext(decoding.context, owner, decoding.length)
        else:
            decoding.context.keep(owner)
        return None if logits is None else logits[owner]

    def _moved(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self.device)

    def _forward(
        self, decoding: _Decoding, tokens: Tensor, positions: Tensor, owner: Tensor | None = None
    ) -> Tensor | None:
        """[B, V] logits of the last of tokens [B, s], on the last pipeline stage; None on the others. owner: which of
        the B each row of the batch is; None: they are the rows."""
        logits = through_stages(self._chunks, self._moved(tokens), self._moved(positions), decoding.context)
        if self.keeps_experts:
            experts = recorded(self._chunks, tokens)
            if owner is not None:
                experts, positions = experts[self._moved(owner)], positions[owner]
            decoding.keep_experts(decoding.rows, positions, experts)
        return None if logits is None else logits[:, -1, : self.built.vocab_size]

    def _choose(self, logits: Tensor | None, decoding: _Decoding, step: int, sampling: SamplingParams):
        """The next token of each row and its log-probability, on the host, the same on every rank of the model."""
        if logits is not None:
            tokens, logprobs = choose_tokens(logits, self._moved(decoding.uniforms_at(step)), sampling)
        else:
            tokens = torch.empty(len(decoding.rows), dtype=torch.int64, device=self.device)
            logprobs = torch.empty(len(decoding.rows), device=self.device)
        # Ranks that share the last stage have the same logits but for CUDA's rounding: one of them chooses for all.
        choosers = {
            parallel_state.get_tensor_model_parallel_group(): parallel_state.get_tensor_model_parallel_src_rank(),
            parallel_state.get_pipeline_model_parallel_group(): parallel_state.get_pipeline_model_parallel_last_rank(),
        }
        for group, source in choosers.items():
            if group.size() > 1:
                for tensor in (tokens, logprobs):
                    torch.distributed.broadcast(tensor, src=source, group=group)
        return fetched(tokens, logprobs)


def _from_the_beginning(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand(tokens.shape)


class _Decoding:
    """The state of a batch, on the host, which waits for the device once a token. Each row is at the end of its prompt;
    or, where all have to be at the same position, rows with longer prompts read these to their end. ``rows`` has the
    request of each row of the cache; responses are stored by request. Requests that are more than the rows that there
    may be wait, which needs rows at different positions."""

    def __init__(
        self,
        requests: list[GenerationRequest],
        most: int,
        sampling: SamplingParams,
        strings: StopStrings,
        device: torch.device,
        *,
        whole_prompts: bool,
    ) -> None:
        """most: rows at a time. whole_prompts: whether rows may be at different positions."""
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [request.limit(sampling) for request in requests]
        self._requests, self.prefix = requests, min(lengths)
        self.begun = min(most, len(requests))  # requests that have, or had, a row: the first ones
        waiting = self.begun < len(requests)
        self.after_prompts = whole_prompts and (waiting or max(lengths) > self.prefix)  # rows at different positions
        self.length = max(length + limit for length, limit in zip(lengths, limits, strict=True))
        self.max_new_tokens = max(limits)
        self.places = refilled_places(self.max_new_tokens) if waiting else self.max_new_tokens  # after the prompts
        width = max(2, *lengths) if self.after_prompts else max(lengths)
        padded = [request.prompt_ids + (0,) * (width - n) for request, n in zip(requests, lengths, strict=True)]
        self.prompts = torch.tensor(padded)
        self.prompt_lengths = torch.tensor(lengths)
        self.limits = torch.tensor(limits)
        self.to_read = torch.zeros_like(self.limits) if self.after_prompts else self.prompt_lengths - self.prefix
        """Steps before each request's first response token: those that read its prompt, or before it got its row."""
        self.uniforms = request_uniforms([request.seed for request in requests], self.max_new_tokens)
        self.tokens = torch.zeros(len(requests), self.max_new_tokens, dtype=torch.int64)
        self.logprobs = torch.zeros(len(requests), self.max_new_tokens)
        self.response_lengths = torch.zeros(len(requests), dtype=torch.int64)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool)
        self.strings = strings
        self.stop_of: list[str | None] = [None] * len(requests)
        self.rows = torch.arange(self.begun)
        self.alive = torch.ones(self.begun, dtype=torch.bool)
        self._most, self._device = most, device
        self.last = torch.empty(0, dtype=torch.int64)
        self.context: CacheContext | None = None
        self._experts: Tensor | None = None  # [requests, tokens, layers * k] int16

    @property
    def free_rows(self) -> int:
        """Rows that waiting requests can have."""
        return min(self._most - len(self.rows), len(self.limits) - self.begun)

    def ends_of_prompts(self, requests: Tensor) -> Tensor:
        return self.prompts[requests, self.prompt_lengths[requests] - 1]

    def uniforms_at(self, step: int) -> Tensor:
        """Each row's random number for the step's token (any number where it still reads its prompt)."""
        return self.uniforms[self.rows, self._response_index(step).clamp(0, self.max_new_tokens - 1)]

    def positions(self, step: int) -> Tensor:
        """[rows, 1] of the step's tokens."""
        return (self.prompt_lengths[self.rows] + self._response_index(step))[:, None]

    def record(self, step: int, tokens: Tensor, logprobs: Tensor, stop_ids: Tensor) -> Tensor:
        """Stores the step's tokens, or the prompt's where it is not read to its end. Returns the requests that end."""
        index, alive = self._response_index(step), self.alive.clone()
        reading = index < 0
        if reading.any():
            position = min(self.prefix + step, self.prompts.shape[1] - 1)
            tokens = torch.where(reading, self.prompts[self.rows, position], tokens)
        writing = self.alive & ~reading
        rows, index = self.rows[writing], index[writing]
        self.tokens[rows, index] = tokens[writing]
        self.logprobs[rows, index] = logprobs[writing]
        self.response_lengths[rows] = index + 1
        stop = torch.isin(tokens[writing], stop_ids)
        self.stopped[rows] = stop
        self.alive[writing] = ~stop & (index + 1 < self.limits[rows])
        if self.strings:
            asked = writing & ~torch.isin(tokens, stop_ids)
            places = asked.nonzero().squeeze(-1).tolist()
            for place, row, token in zip(places, self.rows[asked].tolist(), tokens[asked].tolist(), strict=True):
                if self.strings.may_complete(token):
                    self.stop_of[row] = self.strings.ended_by(self.tokens[row, : self.response_lengths[row]].tolist())
                    self.alive[place] = self.stop_of[row] is None and bool(self.alive[place])
        self.last = tokens
        return self.rows[alive & ~self.alive]

    def keep_experts(self, requests: Tensor, positions: Tensor, experts: Tensor) -> None:
        """Stores the experts [n, s, layers * k] of the requests' tokens at positions [n, s]. Rows that have ended are
        computed until they leave the batch: what is after their last token is of no use, as is the place after all."""
        if self._experts is None:
            tokens = int(self.prompt_lengths.max()) + self.max_new_tokens
            self._experts = experts.new_zeros(len(self.limits), tokens, experts.shape[-1])
        places = requests[:, None], positions.clamp(max=self._experts.shape[1] - 1)
        self._experts[tuple(moved(part, self._device) for part in places)] = experts

    def compact(self) -> None:
        """Drops the rows that have ended."""
        keep = self.alive.nonzero().squeeze(-1)
        self.context.keep(moved(keep, self._device))
        self.rows, self.last, self.alive = self.rows[keep], self.last[keep], self.alive[keep]

    def refill(self, step: int) -> Tensor:
        """Gives free rows to waiting requests, which it returns; the step after this one chooses their first tokens."""
        count = self.free_rows
        requests = torch.arange(self.begun, self.begun + count)
        self.begun += count
        self.to_read[requests] = step + 1
        self.rows, self.alive = torch.cat([self.rows, requests]), torch.cat([self.alive, self.alive.new_ones(count)])
        self.last = torch.cat([self.last, self.ends_of_prompts(requests)])
        return requests

    def take_ended(self, rows: Tensor, decode: Callable[[Sequence[int]], str], version: int) -> dict[int, Rollout]:
        """The rollout of each of these requests, which have ended."""
        columns = (rows, self.tokens[rows], self.logprobs[rows], self.response_lengths[rows], self.stopped[rows])
        ended = {}
        for row, tokens, logprobs, length, stopped in zip(*(column.tolist() for column in columns), strict=True):
            request, ids, experts = self._requests[row], tokens[:length], b""
            if self._experts is not None:
                experts = self._experts[row, : int(self.prompt_lengths[row]) + length - 1].cpu().numpy().tobytes()
            ended[row] = Rollout(
                problem_id=request.problem_id,
                sample_index=request.sample_index,
                prompt_ids=request.prompt_ids,
                response_ids=ids,
                response_logprobs=logprobs[:length],
                text=decode(ids[:-1] if stopped else ids),
                finished=stopped,
                policy_version=version,
                seed=request.seed,
                stop=self.stop_of[row],
                routed_experts=experts,
            )
        return ended

    def _response_index(self, step: int) -> Tensor:
        return step - self.to_read[self.rows]
