"""One server that generates with the whole model: one that the run starts, or one that was running before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from nemo_edo.generation.server_api import HEALTH, MODELS
from nemo_edo.generation.server_process import ServerProcess
from nemo_edo.utils.api_key import ApiKey
from nemo_edo.utils.http import Fault, ServerError, exchange, open_session

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
        """As ``exchange``; raises ServerError for every outcome without a value. timeout_s: until the whole answer is
        here."""

        async def one_request() -> Any:
            async with self.open_session() as session:
                return await exchange(
                    session, method, self.url + path, self.key, server=str(self), limit_s=timeout_s, json=json,
                    params=params, answers_json=answers_json,
                )  # fmt: skip

        try:
            return asyncio.run(one_request())
        except Fault as fault:
            raise ServerError(f"{self}: {fault}{self.log_tail()}") from None

    def open_session(self) -> aiohttp.ClientSession:
        # A managed server is on this machine, so proxies of the environment do not apply.
        return open_session(self.key, trust_env=not self.is_managed)

    def _read_model(self) -> None:
        models = self.request("GET", MODELS)["data"]
        names = [model["id"] for model in models]
        expected = None if self.process is None else self.process.model_name
        if expected not in (None, *names):
            # Another process may have taken the port after free_port() found it.
            raise ServerError(f"{self} is not the server that was started: it has the models {names}{self.log_tail()}")
        self.model_name = expected or names[0]
        self.max_length = models[0].get("max_model_len")

    def ending(self) -> str:
        """How a managed server's process has ended, for messages."""
        return f"its process has ended with status {self.process.status}{self.log_tail()}"

    def log_tail(self) -> str:
        """The end of a managed server's log, to append to an error message; empty for others."""
        return "" if self.process is None else self.key.hide(self.process.log_tail())
