"""What all servers share: token ids in, token ids and their log-probabilities out, by OpenAI's completions API.

What is specific to vLLM and TensorRT-LLM is in ``vllm_server.py`` and ``trtllm_server.py``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import nemo_edo
from nemo_edo.config import ServersConfig
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
ENVIRONMENTS = (Path(".venv-vllm"), Path(nemo_edo.__file__).parents[1] / ".venv-vllm", Path("/opt/vllm"))
"""Where ``make vllm-env`` and the container put the servers' environment."""


@dataclass(frozen=True)
class ServerAPI:
    """A kind of server, and how the run starts one of it. The subclasses are for vLLM and TensorRT-LLM."""

    backend: ClassVar[str]
    """Its value of ``generation.backend``."""
    package: ClassVar[str]
    """The package that its interpreter must have."""
    install: ClassVar[str]
    """How to install it, for error messages."""

    settings: ServersConfig
    dtype: str
    log: Path
    gpus: tuple[int, ...] = ()
    """By their number among those that this process sees. Empty: the server runs on the CPU."""
    max_length: int | None = None
    """Tokens of prompt and response together; None: the model's own."""
    arguments: tuple[str, ...] = ()
    """Command-line arguments before those of the settings."""
    logprobs_after_temperature: bool = False
    """Whether log-probabilities are after the temperature; otherwise they are the model's, at temperature 1."""
    sleeps: bool = False
    """Whether the server must support sleep mode, which frees its GPU memory."""
    nccl_library: str | None = None
    """The library of a refit through NCCL; None: without."""
    adapter_rank: int | None = None
    """Rank of its LoRA adapters; None: without adapters."""

    def model_name(self, model: Path) -> str:
        """The name that the server gives to the model of folder ``model``."""
        raise NotImplementedError

    def command(self, model: Path, port: int) -> list[str]:
        """The server's command line, without the key."""
        raise NotImplementedError

    def environment(self, key: str) -> dict[str, str]:
        """The server's environment variables."""
        raise NotImplementedError

    @staticmethod
    def extra_fields(stop_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of a completion request: return token ids and log-probabilities, and stop only at ``stop_ids``."""
        raise NotImplementedError

    @property
    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES. An inherited list (indices or UUIDs, as schedulers set it) decides which GPUs these
        are."""
        inherited = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        return ",".join(inherited[gpu] if inherited else str(gpu) for gpu in self.gpus)


def server_python(settings: ServersConfig) -> str:
    """The interpreter that starts servers."""
    if settings.python is not None:
        return settings.python
    found = [folder / "bin" / "python" for folder in ENVIRONMENTS if (folder / "bin" / "python").exists()]
    return str(found[0].absolute()) if found else sys.executable


def completion_body(
    api: type[ServerAPI], model_name: str, request: GenerationRequest, sampling: SamplingParams, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """The request for one response. Greedy decoding ignores top_p, which would cut the distribution of its
    log-probabilities."""
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    return {
        "model": model_name,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.temperature == 0 else sampling.top_p,
        "seed": request.seed,
        **api.extra_fields(stop_ids),
        **stop,
    }


def read_answer(body: Any, model_name: str, vocab_size: int) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    """Token ids, log-probabilities and finish_reason of a completion.

    The server may be a user's, of another kind or with another model. Raises Fault where the answer lacks any of them,
    and ServerError for another model's, and for text without token ids.
    """
    require_model(body, model_name)
    _require_more_than_text(body)
    try:
        [choice] = body["choices"]
        ids, logprobs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        fits = 0 < len(ids) == len(logprobs) and max(ids) < vocab_size and math.isfinite(sum(logprobs))
    except (KeyError, TypeError, ValueError) as error:
        raise Fault(f"an answer without a choice's token_ids, logprobs and finish_reason: {error!r}") from None
    if not fits or reason not in ("stop", "length"):
        raise Fault(
            f"an answer of {len(ids)} tokens, expected at least one, all below {vocab_size}, with {len(logprobs)} "
            f"log-probabilities and finish_reason {reason!r}"
        )
    return tuple(ids), tuple(logprobs), reason


def _require_more_than_text(body: Any) -> None:
    """Raises ServerError for an answer of a plain endpoint, which asking again does not change."""
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(choice, dict) and "text" in choice and not (choice.get("token_ids") and choice.get("logprobs")):
        lacking = "token ids" if not choice.get("token_ids") else "log-probabilities"
        raise ServerError(
            f"a server returns text without {lacking}, which training needs: take one that returns them (vLLM), or "
            "evaluate and search with generation=openai (docs/evaluation.md)"
        )


def require_model(body: Any, model_name: str) -> None:
    """Raises ServerError for the answer of another model than was asked, which asking again does not change; one that
    names none passes."""
    found = body.get("model") if isinstance(body, dict) else None
    if found not in (None, model_name):
        raise ServerError(f"a server answers as the model {str(found)[:200]!r}, expected {model_name!r}")
