"""A scripted engine, to try an algorithm, a scorer or an evaluation without a model, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams


class ScriptedEngine:
    """A GenerationEngine whose responses come from a function.

    ``script(request, sampling)`` is the full text of a response, which finishes unless a stop string ends it or it has
    more than ``max_new_tokens`` tokens, the stop token included. ``encode`` and ``decode`` are a tokenizer's,
    without special tokens; every token gets the natural log-probability ``log_prob``.
    """

    def __init__(self, script: Callable[[GenerationRequest, SamplingParams], str], *,
                 encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str], stop_id: int,
                 log_prob: float = 0.0) -> None:
        self.policy_version = 0
        self._script, self._encode, self._decode = script, encode, decode
        self._stop_id, self._log_prob = stop_id, log_prob

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        return [self._rollout(request, sampling) for request in requests]

    def _rollout(self, request: GenerationRequest, sampling: SamplingParams) -> Rollout:
        whole = (*self._encode(self._script(request, sampling)), self._stop_id)
        length, stop = StopStrings(sampling.stop, self._decode).cut(whole[: request.limit(sampling)])
        ids = whole[:length]
        finished = length == len(whole) and stop is None
        text, logprobs = self._decode(ids[:-1] if finished else ids), (self._log_prob,) * len(ids)
        return Rollout(request.problem_id, request.sample_index, request.prompt_ids, ids, logprobs, text, finished,
                       self.policy_version, request.seed, stop=stop)
