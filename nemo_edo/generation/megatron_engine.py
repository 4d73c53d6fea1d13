"""Sampling in the trainer's process, from the weights in training.

Batched decoding with megatron-core's KV cache. Three things make it cheaper than a plain loop: requests share equal
prompts, only the last position's logits are computed, and rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_edo.generation.decoding import through_stages, token_by_token
from nemo_edo.generation.sampling import choose_tokens, request_uniforms
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.megatron.bridge import BuiltModel
from nemo_edo.megatron.decoding_cache import CacheContext
from nemo_edo.megatron.layer_spec import reads_by_head, shared_prompt_cache, shares_prompts
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.utils.status_line import Counter

COMPACT_BELOW = 0.9
"""Ended rows leave the cache once fewer than this share of its rows are alive: a copy of the cache costs time, too."""



class MegatronEngine:
    """A GenerationEngine over a Megatron model, with the model's parallelism."""

    def __init__(
        self,
        built: BuiltModel,
        *,
        stop_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_batch_size: int,
        device: torch.device,
        progress: bool = False,
    ) -> None:
        config = get_model_config(built.chunks[0])
        if config.context_parallel_size > 1 or config.expert_model_parallel_size > 1:
            raise ValueError("in-process generation can use neither context nor expert parallelism")
        self.policy_version = 0
        self._built = built
        self._vocab_size = built.vocab_size
        self._stop_ids = torch.tensor(sorted(stop_ids), device=device)
        self._decode = decode
        self._max_batch_size = max_batch_size
        self._device = device
        self._progress = progress
        modules = [module for chunk in built.chunks for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, Attention)]
        self._shares_prompts, self._by_head = all(map(shares_prompts, layers)), all(map(reads_by_head, layers))

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, in order, the same list on every rank; data-parallel ranks share the work."""
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        mine = list(requests)[rank::ranks]
        # Rows of a batch advance together, so batches have prompts of similar length.
        order = sorted(range(len(mine)), key=lambda i: (len(mine[i].prompt_ids), mine[i].prompt_ids))
        rollouts: list[Rollout | None] = [None] * len(mine)
        with (
            token_by_token(self._built.chunks) as self._chunks,
            Counter("generate", len(mine), shown=self._progress) as counter,
        ):
            for start in range(0, len(order), self._max_batch_size):
                places = order[start : start + self._max_batch_size]
                for place, rollout in zip(places, self._batch([mine[i] for i in places], sampling), strict=True):
                    rollouts[place] = rollout
                counter.add(len(places))
        return _interleave(_gather(rollouts), len(requests))

    @torch.inference_mode()
    def _batch(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        strings = StopStrings(sampling.stop, self._decode)
        decoding = _Decoding(requests, sampling, strings, self._device)
        step = self._prefill(decoding)
        for position in range(decoding.prefix, decoding.length):
            tokens, logprobs = self._choose(step, decoding, position, sampling)
            decoding.record(position, tokens, logprobs, self._stop_ids)
            if decoding.done or position + 1 == decoding.length:
                break
            if decoding.alive.float().mean() < COMPACT_BELOW:
                decoding.compact()
            step = self._forward(decoding, decoding.last[:, None], position)
        return [
            self._rollout(request, *response) for request, response in zip(requests, decoding.responses(), strict=True)
        ]

    def _prefill(self, decoding: _Decoding) -> Tensor | None:
        """Runs the prompts' common length once for each distinct prompt. Rows with the same prompt share its cache
        where their attention can, otherwise each gets a copy."""
        prefixes, owner = torch.unique(decoding.prompts[:, : decoding.prefix], dim=0, return_inverse=True)
        shared = self._shares_prompts and 2 * len(prefixes) <= len(owner)
        length = decoding.prefix if shared else decoding.length
        decoding.context = CacheContext(len(prefixes), length, by_head=self._by_head)
        logits = self._forward(decoding, prefixes, 0)
        if shared:
            decoding.context = shared_prompt_cache(decoding.context, owner, decoding.length)
        else:
            decoding.context.keep(owner)
        return None if logits is None else logits[owner]

    def _forward(self, decoding: _Decoding, tokens: Tensor, position: int) -> Tensor | None:
        """[B, V] logits of the last token, on the last pipeline stage; None on the others."""
        positions = torch.arange(position, position + tokens.shape[1], device=self._device).expand_as(tokens)
        logits = through_stages(self._chunks, tokens, positions, decoding.context)
        return None if logits is None else logits[:, -1, : self._vocab_size]

    def _choose(self, logits: Tensor | None, decoding: _Decoding, position: int, sampling: SamplingParams):
        """The next token of each row and its log-probability, the same on every pipeline stage."""
        if logits is not None:
            tokens, logprobs = choose_tokens(logits, decoding.uniforms_at(position), sampling)
        else:
            tokens = torch.empty(len(decoding.rows), dtype=torch.int64, device=self._device)
            logprobs = torch.empty(len(decoding.rows), device=self._device)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            for tensor in (tokens, logprobs):
                torch.distributed.broadcast(tensor, src=last, group=group)
        return tokens, logprobs

    def _rollout(
        self, request: GenerationRequest, ids: list[int], logprobs: list[float], finished: bool, stop: str | None
    ) -> Rollout:
        text_ids = ids[:-1] if finished else ids
        return Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(ids),
            response_logprobs=tuple(logprobs),
            text=self._decode(text_ids),
            finished=finished,
            policy_version=self.policy_version,
            seed=request.seed,
            stop=stop,
        )


class _Decoding:
    """The state of a batch: all rows are at the same position; rows with longer prompts read these to their end.

    ``rows`` has the request of each row of the cache; responses are stored by request.
    """

    def __init__(
        self, requests: list[GenerationRequest], sampling: SamplingParams, strings: StopStrings, device: torch.device
    ) -> None:
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [request.limit(sampling) for request in requests]
        self.prefix = min(lengths)
        self.length = max(length + limit for length, limit in zip(lengths, limits, strict=True))
        self.max_new_tokens = max(limits)
        padded = [request.prompt_ids + (0,) * (max(lengths) - n) for request, n in zip(requests, lengths, strict=True)]
        self.prompts = torch.tensor(padded, device=device)
        self.prompt_lengths = torch.tensor(lengths, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.uniforms = request_uniforms([request.seed for request in requests], self.max_new_tokens).to(device)
        self.tokens = torch.zeros(len(requests), self.max_new_tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(len(requests), self.max_new_tokens, device=device)
        self.response_lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.strings = strings
        self.stop_of: list[str | None] = [None] * len(requests)
        self.rows = torch.arange(len(requests), device=device)
        self.alive = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.last = self.prompts[:, self.prefix - 1]
        self.context: CacheContext | None = None

    @property
    def done(self) -> bool:
        return not bool(self.alive.any())

    def uniforms_at(self, position: int) -> Tensor:
        """Each row's random number for the token at ``position`` (any number where it still reads its prompt)."""
        return self.uniforms[self.rows, self._response_index(position).clamp(0, self.max_new_tokens - 1)]

    def record(self, position: int, tokens: Tensor, logprobs: Tensor, stop_ids: Tensor) -> None:
        """Stores the chosen tokens for ``position``, or the prompt's token where a prompt is that long."""
        index = self._response_index(position)
        reading = index < 0
        if reading.any():
            tokens = torch.where(reading, self.prompts[self.rows, min(position, self.prompts.shape[1] - 1)], tokens)
        writing = self.alive & ~reading
        rows, index = self.rows[writing], index[writing]
        self.tokens[rows, index] = tokens[writing]
        self.logprobs[rows, index] = logprobs[writing]
        self.response_lengths[rows] = index + 1
        stop = torch.isin(tokens[writing], stop_ids)
        self.stopped[rows] = stop
        self.alive[writing] = ~stop & (index + 1 < self.limits[rows])
        if self.strings:
            self._find_stop_strings(writing & ~torch.isin(tokens, stop_ids), tokens)
        self.last = tokens

    def _find_stop_strings(self, asked: Tensor, tokens: Tensor) -> None:
        """Ends those of the ``asked`` rows that have met a stop string with the token that was just recorded."""
        places = asked.nonzero().squeeze(-1).tolist()
        for place, row, token in zip(places, self.rows[asked].tolist(), tokens[asked].tolist(), strict=True):
            if self.strings.may_complete(token):
                self.stop_of[row] = self.strings.ended_by(self.tokens[row, : self.response_lengths[row]].tolist())
                if self.stop_of[row] is not None:
                    self.alive[place] = False

    def compact(self) -> None:
        """Drops the rows that have ended."""
        keep = self.alive.nonzero().squeeze(-1)
        self.context.keep(keep)
        self.rows, self.last, self.alive = self.rows[keep], self.last[keep], self.alive[keep]

    def responses(self) -> list[tuple[list[int], list[float], bool, str | None]]:
        """Tokens, log-probabilities, whether it stopped by itself and by which stop string, for each request."""
        columns = (self.tokens, self.logprobs, self.response_lengths, self.stopped)
        return [
            (tokens[:length], logprobs[:length], stopped, stop)
            for tokens, logprobs, length, stopped, stop in zip(
                *(column.tolist() for column in columns), self.stop_of, strict=True
            )
        ]

    def _response_index(self, position: int) -> Tensor:
        return position - self.prompt_lengths[self.rows]


def _gather(rollouts: list[Rollout]) -> list[list[Rollout]]:
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return [rollouts]
    shares: list[list[Rollout] | None] = [None] * group.size()
    torch.distributed.all_gather_object(shares, rollouts, group=group)
    return shares


def _interleave(shares: list[list[Rollout]], total: int) -> list[Rollout]:
    """The rollouts in the order of the requests: request i went to rank i modulo the number of ranks."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]
