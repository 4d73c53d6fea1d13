"""What all servers share: token ids in, token ids and their log-probabilities out, by OpenAI's completions API.

What is specific to vLLM and TensorRT-LLM is in ``vllm_server.py`` and ``trtllm_server.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0 in float16 arithmetic."""
LEAST = -3e38
"""A log-probability below it is minus infinity in float32, in which they are kept."""


@dataclass(frozen=True)
class Launch:
    """How the run starts a server."""

    python: str
    """The interpreter of the server's environment."""
    host: str
    dtype: str
    gpus: tuple[int, ...]
    """Empty: the server runs on the CPU."""
    threads: int
    """CPU threads."""
    cpu_cache_gb: int
    memory_share: float
    max_in_flight: int
    arguments: tuple[str, ...]
    log: Path
    max_length: int | None = None
    """Tokens of prompt and response together; None: the model's own."""
    logprobs_after_temperature: bool = False
    """Whether log-probabilities are after the temperature; otherwise they are the model's, at temperature 1."""
    sleeps: bool = False
    """Whether the server must support sleep mode, which frees its GPU memory."""
    nccl_library: str | None = None
    """The library of a refit through NCCL; None: without."""
    adapter_rank: int | None = None
    """Rank of its LoRA adapters; None: without adapters."""


def visible_devices(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a server on some of the GPUs that this process sees, by their number here. An inherited
    list (indices or UUIDs, as schedulers set it) decides which GPUs these are."""
    inherited = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(inherited[gpu] if inherited else str(gpu) for gpu in gpus)


class ServerAPI(Protocol):
    """What is specific to a kind of server."""

    backend: str
    """Its value of ``generation.backend``."""
    package: str
    """The package that its interpreter must have."""
    install: str
    """How to install it, for error messages."""

    def model_name(self, model: Path) -> str:
        """The name that the server gives to the model of folder ``model``."""

    def command(self, launch: Launch, model: Path, port: int) -> list[str]:
        """The server's command line, without the key."""

    def environment(self, launch: Launch, key: str) -> dict[str, str]:
        """The server's environment variables."""

    def extra_fields(self, stop_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of a completion request: return token ids and log-probabilities, and stop only at ``stop_ids``."""


@dataclass(frozen=True)
class Answer:
    """A server's response, checked."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    """A stop token ended it."""
    at_string: bool
    """The server says that a stop string ended it."""


def completion_body(
    api: ServerAPI, model_name: str, request: GenerationRequest, sampling: SamplingParams, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """The request for one response. Greedy decoding ignores top_p, which would cut the distribution of its
    log-probabilities."""
    greedy = sampling.temperature == 0
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    return {
        "model": model_name,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "seed": request.seed,
        **api.extra_fields(stop_ids),
        **stop,
    }


def read_answer(
    body: Any,
    model_name: str,
    request: GenerationRequest,
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> Answer:
    """The answer to a completion request. Raises Fault where it does not fit the request, and ServerError for another
    model's."""
    require_model(body, model_name)
    try:
        [choice] = body["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason, prompt = choice["finish_reason"], choice.get("prompt_token_ids")
        right = all(0 <= token < vocab_size for token in ids) and all(LEAST <= one <= ROUNDING for one in logprobs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Fault(f"an answer without a choice's token_ids, logprobs and finish_reason: {error!r}") from None
    most = request.limit(sampling)
    if not right or not 1 <= len(ids) <= most or len(logprobs) != len(ids):
        raise Fault(
            f"a response of {len(ids)} tokens, expected 1 to {most} below {vocab_size}, and {len(logprobs)} "
            "log-probabilities, expected as many finite numbers of at most 0"
        )
    if prompt not in (None, list(request.prompt_ids)):
        raise Fault("an answer to another prompt")
    finished = ids[-1] in stop_ids
    if early := set(stop_ids).intersection(ids[:-1]):
        raise Fault(f"a response that continues after its stop token {min(early)}")
    at_string = bool(sampling.stop) and reason == "stop" and not finished
    whole = finished or at_string
    if reason != ("stop" if whole else "length") or (not whole and len(ids) < most):
        raise Fault(
            f"a response of {len(ids)} tokens of at most {most} that ends with token {ids[-1]} and finish_reason "
            f"{reason!r}; its stop tokens are {', '.join(map(str, stop_ids))}"
        )
    return Answer(tuple(ids), tuple(logprobs), finished, at_string)


def require_model(body: Any, model_name: str) -> None:
    """Raises ServerError for the answer of another model than was asked, which asking again does not change; one that
    names none passes."""
    found = body.get("model") if isinstance(body, dict) else None
    if found not in (None, model_name):
        raise ServerError(f"a server answers as the model {str(found)[:200]!r}, expected {model_name!r}")
