"""What servers have in common: token ids in, token ids and their log-probabilities out, over OpenAI's completions API.

What differs between vLLM and TensorRT-LLM stands in ``vllm_server.py`` and ``trtllm_server.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nemo_edo.http_client import Fault
from nemo_edo.types import GenerationRequest, SamplingParams

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
ROUNDING = 1e-3
"""Nats by which a log-probability of float16 arithmetic may lie above 0."""


@dataclass(frozen=True)
class Launch:
    """How the run starts a server of its own."""

    python: str
    """The interpreter that has the server."""
    host: str
    dtype: str
    max_length: int | None
    """Tokens of prompt and response together; None: the model's own."""
    logprobs_after_temperature: bool
    """Whether log-probabilities are those of the scaled distribution; else of the model's, at temperature 1."""
    gpus: tuple[int, ...]
    """Empty: the server computes on the CPU."""
    threads: int
    """On the CPU."""
    cpu_cache_gb: int
    memory_share: float
    max_in_flight: int
    sleeps: bool
    """Whether it has to be able to give its GPUs' memory back."""
    adapter_rank: int | None
    """Of the LoRA adapters that it takes beside its weights; None: it takes none."""
    arguments: tuple[str, ...]
    log: Path


class ServerAPI(Protocol):
    """What differs from one kind of server to another."""

    backend: str
    """As ``generation.backend`` names it."""
    package: str
    """What its interpreter has to be able to import."""
    install: str
    """What a user does to have it."""

    def model_name(self, model: Path) -> str:
        """What a server that has loaded the folder ``model`` calls it."""

    def command(self, launch: Launch, model: Path, port: int) -> list[str]:
        """The server's command line. It never holds the key."""

    def environment(self, launch: Launch, key: str) -> dict[str, str]:
        """Variables that the server is started with."""

    def extra_fields(self, stop_id: int) -> dict[str, Any]:
        """Fields of a completion's request that ask for token ids and their log-probabilities, and for one end."""


@dataclass(frozen=True)
class Answer:
    """A response as a server gave it, checked."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    """A stop token ended it."""
    at_string: bool
    """The server says that a stop string ended it."""


def completion_body(
    api: ServerAPI, model_name: str, request: GenerationRequest, sampling: SamplingParams, stop_id: int
) -> dict[str, Any]:
    """The request of one response. Greedy decoding has no use for a seed and must not cut the distribution that its
    log-probabilities are of."""
    greedy = sampling.temperature == 0
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    return {
        "model": model_name,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "seed": request.seed,
        **api.extra_fields(stop_id),
        **stop,
    }


def read_answer(
    body: Any, request: GenerationRequest, sampling: SamplingParams, stop_id: int, vocab_size: int
) -> Answer:
    """The checked answer to a completion's request. Raises Fault where it is no answer to it."""
    try:
        [choice] = body["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason, prompt = choice["finish_reason"], choice.get("prompt_token_ids")
    except (KeyError, TypeError, ValueError) as error:
        raise Fault(f"an answer without {error}") from error
    if prompt not in (None, list(request.prompt_ids)):
        raise Fault("an answer to another prompt")
    most = request.limit(sampling)
    _require_tokens(ids, most, vocab_size)
    _require_logprobs(logprobs, len(ids))
    finished = ids[-1] == stop_id
    if stop_id in ids[:-1]:
        raise Fault(f"a response that goes on after its stop token {stop_id}")
    at_string = bool(sampling.stop) and reason == "stop" and not finished
    whole = finished or at_string
    if reason != ("stop" if whole else "length") or (not whole and len(ids) < most):
        raise Fault(
            f"a response of {len(ids)} tokens of at most {most} that ends with token {ids[-1]} and finish_reason "
            f"{reason!r}; its stop token is {stop_id}"
        )
    return Answer(tuple(ids), tuple(logprobs), finished, at_string)


def _require_tokens(ids: Any, most: int, vocab_size: int) -> None:
    if not _is_list(ids) or not 1 <= len(ids) <= most:
        raise Fault(f"a response of {len(ids) if _is_list(ids) else 'no'} tokens, expected 1 to {most}")
    strange = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
    if strange:
        raise Fault(f"token {strange[0]!r} in a response, expected a whole number below {vocab_size}")


def _require_logprobs(logprobs: Any, tokens: int) -> None:
    if not _is_list(logprobs) or len(logprobs) != tokens:
        raise Fault(f"{len(logprobs) if _is_list(logprobs) else 'no'} log-probabilities of {tokens} tokens")
    strange = [value for value in logprobs if not _is_logprob(value)]
    if strange:
        raise Fault(f"log-probability {strange[0]!r} in a response, expected a number of at most 0")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= ROUNDING
