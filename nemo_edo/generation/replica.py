"""One server that generates with the whole model: one that the run starts, or one that was running before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from nemo_edo.generation.server_api import HEALTH, MODELS
from nemo_edo.generation.server_process import ServerProcess
from nemo_edo.utils.api_key import ApiKey
from nemo_edo.utils.http import SHOWN_CHARACTERS, UNENCODED, Fault, IncomingAnswer, ServerError, described

POLL_EVERY_S = 0.25
"""Seconds between two health checks of a server that is starting."""


class Replica:
    """A server's address, its process where the run starts it, and blocking requests to it. ``dispatch.py`` sends many
    requests concurrently."""

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        process: ServerProcess | None = None,
        key: str | None = None,
        ready_limit_s: float = 900.0,
        launched: bool = False,
    ) -> None:
        """Either ``url``, of a running server, or ``process``, which the run starts.

        name: for messages. key: sent with every request. ready_limit_s: seconds until it must answer after a start.
        launched: the run's job has started the server at the URL.
        """
        if (url is None) == (process is None):
            raise ValueError("a replica has either a URL or a process")
        self.name = name
        self.url = "" if url is None else url.rstrip("/")
        self.process = process
        self.has_worker_extension = process is not None or launched
        """Whether vLLM has loaded the extension of ``inside_server/``."""
        self.model_name = ""
        """What requests call the model; known once the server is ready."""
        self.max_length: int | None = None
        """Tokens of prompt and response that the server accepts; None: it does not say."""
        self.key = ApiKey(key)
        self._ready_limit_s = ready_limit_s

    @property
    def is_managed(self) -> bool:
        """Whether the run starts, restarts and stops the server."""
        return self.process is not None

    @property
    def starts(self) -> int:
        """Starts so far; requests sent before the last one are lost. 0 for a server that the run does not manage."""
        return 0 if self.process is None else self.process.starts

    @property
    def has_ended(self) -> bool:
        """Whether a managed server has no running process. False for others: only requests can tell."""
        return self.process is not None and not self.process.is_running

    @property
    def headers(self) -> dict[str, str]:
        return {**self.key.headers, **UNENCODED}

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.url else self.name

    # --- start and stop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process and waits until it answers; errors as for ``wait_until_ready``."""
        self.start_process()
        self.wait_until_ready()

    def start_process(self) -> None:
        """Starts the process without waiting for it."""
        self.url = self.process.start(self.key.value)

    def wait_until_ready(self, limit_s: float | None = None) -> None:
        """Waits until the server is healthy and names its model. limit_s: None: ``ready_limit_s``.

        Raises ServerError, with the end of the log, after the limit, or as soon as the process has ended.
        """
        limit_s = self._ready_limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            if self.has_ended:
                raise ServerError(f"{self}: {self.ending()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self} is not ready after {limit_s:g} s{self.log_tail()}")
            time.sleep(POLL_EVERY_S)
        self._read_model()

    def stop(self) -> None:
        """Stops the process; does nothing for a server that the run does not manage."""
        if self.process is not None:
            self.process.stop()

    def restart(self, model_folder: Path | None = None) -> None:
        """Restarts the process with ``model_folder`` (None: the last one); errors as for ``wait_until_ready``."""
        if model_folder is not None:
            self.process.model_folder = model_folder
        self.stop()
        self.start()

    # --- requests -------------------------------------------------------------------------------------------------

    def is_healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            self.request("GET", HEALTH, timeout_s=timeout_s)
        except ServerError:
            return False
        return True

    def request(
        self,
        method: str,
        path: str,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        answers_json: bool = True,
    ) -> Any:
        """The answer's parsed JSON; None where it is empty, or not wanted (``answers_json``). Raises ServerError for
        every other outcome. timeout_s: until the whole answer is here, however many pieces of it arrive."""
        try:
            answer = asyncio.run(asyncio.wait_for(self._answer(method, path, json, params), timeout_s))
            if answers_json:
                return answer.value(str(self))
            return answer.require_success(str(self))
        except httpx.HTTPError as error:
            said = self.key.hide(described(error))
            raise ServerError(f"{self}: {method} {path}: {said}{self.log_tail()}") from None
        except TimeoutError:
            late = f"no whole answer after {timeout_s:g} s"
            raise ServerError(f"{self}: {method} {path}: {late}{self.log_tail()}") from None
        except Fault as fault:
            raise ServerError(f"{self}: {fault}{self.log_tail()}") from None

    async def _answer(self, method: str, path: str, json: Any, params: Mapping[str, Any] | None) -> IncomingAnswer:
        # A managed server is on this machine, so proxies of the environment do not apply. Without TLS no certificates
        # are needed, and loading them takes longer than the request.
        verify, trust_env = self.url.startswith("https://"), not self.is_managed
        async with (
            httpx.AsyncClient(headers=self.headers, timeout=None, trust_env=trust_env, verify=verify) as client,
            client.stream(method, self.url + path, json=json, params=params) as response,
        ):
            answer = IncomingAnswer(f"{method} {path}", response.status_code, response.headers, self.key)
            async for piece in response.aiter_raw():
                answer.add(piece)
        return answer

    def _read_model(self) -> None:
        models = served_models(self)
        names = [model["id"] for model in models]
        expected = None if self.process is None else self.process.model_name
        if not names or expected not in (None, *names):
            # Another process may have taken the port after free_port() found it.
            raise ServerError(f"{self} is not the server that was started: it has the models {names}{self.log_tail()}")
        self.model_name = expected or names[0]
        longest = models[0].get("max_model_len")
        self.max_length = longest if type(longest) is int else None

    def ending(self) -> str:
        """How a managed server's process has ended, for messages."""
        return f"its process has ended with status {self.process.status}{self.log_tail()}"

    def log_tail(self) -> str:
        """The end of a managed server's log, to append to an error message; empty for others."""
        return "" if self.process is None else self.key.hide(self.process.log_tail())


def field(replica: Replica, answer: Any, name: str, kind: type) -> Any:
    """What an answer of a replica has under this name. Raises ServerError where that is not of this type."""
    found = answer.get(name) if isinstance(answer, dict) else None
    if type(found) is not kind:
        said = str(answer)[:SHOWN_CHARACTERS]
        raise ServerError(f"{replica}: an answer without {name} of type {kind.__name__}: {said}")
    return found


def served_models(replica: Replica) -> list[dict[str, Any]]:
    """What a server says of its model and adapters, each with its name as ``id``. Raises ServerError."""
    answer = replica.request("GET", MODELS)
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(isinstance(one, dict) and _is_text(one.get("id")) for one in models):
        raise ServerError(f"{replica}: GET {MODELS} names no models: {str(answer)[:SHOWN_CHARACTERS]}")
    return models


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""
