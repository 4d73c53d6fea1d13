"""Endpoints of OpenAI's API that return text alone: neither token ids nor log-probabilities, and no name of weights.

They serve evaluations, votes, best-of-N and search of a model that is not trained. Its tokens are those that the
tokenizer of ``model.path`` makes of the text, so lengths and n-grams are in that tokenizer's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import COMPLETIONS, MODELS
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

CHAT_COMPLETIONS = "/v1/chat/completions"
Chats = Mapping[str, Sequence[Mapping[str, str]]]
"""The messages of each problem, by its id."""


class PlainReplica(Replica):
    """An endpoint that need not have vLLM's health check, nor tell its models."""

    health = MODELS

    def __init__(self, name: str, url: str, key: str | None, *, ready_limit_s: float, model: str | None) -> None:
        """url: with or without its last part, /v1. model: what requests ask for; None: the first that it lists."""
        super().__init__(name, url.rstrip("/").removesuffix("/v1"), key, ready_limit_s=ready_limit_s)
        self._model = model

    def means_health(self, error: ServerError) -> bool:
        return error.status is not None  # it answers; many have no such path, or refuse it

    def read_models(self) -> None:
        if self._model is not None:
            self.model_name = self._model
            return
        try:
            super().read_models()
        except (ServerError, KeyError, IndexError, TypeError) as error:
            why = error if isinstance(error, ServerError) else "its list of models has no id"
            raise ServerError(f"{self}: {why}; name the model with generation.servers.model=...") from error


class PlainEngine(ServerEngine):
    """A GenerationEngine over plain endpoints."""

    def __init__(
        self,
        *args: Any,
        encode: Callable[[str], Sequence[int]],
        prompt_text: Callable[[Sequence[int]], str],
        chats: Chats | None,
        **kwargs: Any,
    ) -> None:
        """encode: a response's text to token ids. prompt_text: a prompt's token ids to the text that an endpoint reads
        as these. chats: the chats to send to the chat endpoint; None: prompts go to the completions endpoint."""
        super().__init__(*args, **kwargs)
        self._encode, self._prompt_text, self._chats = encode, prompt_text, chats
        self._path = COMPLETIONS if chats is None else CHAT_COMPLETIONS

    def _require_supported(self, sampling: SamplingParams) -> None:
        """Nothing depends on how log-probabilities are computed: there are none."""

    def _body(self, request: GenerationRequest, sampling: SamplingParams) -> dict[str, Any]:
        """Without stop strings: an endpoint does not tell them from the end of a response, and cuts them off."""
        asked: dict[str, Any] = {"prompt": self._prompt_text(request.prompt_ids)}
        if self._chats is not None:
            asked = {"messages": list(self._chats[request.problem_id])}
        return {
            "model": self.served_model,
            **asked,
            "max_tokens": request.limit(sampling),
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.temperature == 0 else sampling.top_p,
            "seed": request.seed % 2**31,  # some endpoints take no more bits
        }

    def _read(self, answer: Any, strings: StopStrings) -> tuple[Sequence[int], Sequence[float], bool]:
        try:
            [choice] = answer["choices"]
            text = choice["text"] if self._chats is None else choice["message"]["content"]
            reason, text = choice["finish_reason"], text or ""
            ids = tuple(self._encode(text))
        except (KeyError, TypeError, ValueError) as error:
            raise Fault(f"an answer without a choice's text and finish_reason: {error!r}") from None
        if reason == "length" or strings.cut(ids)[1] is not None:
            return ids, (), False
        return (*ids, self._stop_ids[0]), (), True
