"""One server that has the whole model: one that was running before the run, or one that the run starts."""

import asyncio
import errno
import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from nemo_edo.generation.server_api import HEALTH, MODELS, ServerAPI
from nemo_edo.utils.files import end_of_log
from nemo_edo.utils.http import ApiKey, Fault, NoAnswer, ServerError, exchange, open_session
from nemo_edo.utils.processes import end_family, kept

POLL_EVERY_S = 0.25  # seconds between two health checks of a server that is starting
START = "\n--- start "  # how a line of a server's log begins that tells of a start
PORTS = range(20_000, 32_768)
TRAINER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                     "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
                     "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
                     "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")  # fmt: skip
"""Variables that torchrun, a user, an image or the trainer sets for the trainer, and that would mislead a server: one
queue to the GPU is for Megatron's overlap, vLLM's sleep mode refuses expandable segments, NVIDIA's images use TF32."""


class Replica:
    """A server at a URL, and blocking requests to it. ``dispatch.py`` sends many requests concurrently."""

    health = HEALTH  # the path that a healthy server answers
    any_answer_is_health = False  # whether a server that refuses the health check is well, as it answers

    def __init__(
        self,
        name: str,
        url: str = "",
        key: str | None = None,
        *,
        ready_limit_s: float = 900.0,
        has_worker_extension: bool = False,
        api: ServerAPI | None = None,
        model_folder: Path | None = None,
    ) -> None:
        """name: for messages. key: sent with every request. ready_limit_s: seconds until it must answer.
        has_worker_extension: that of ``inside_server/``, which servers have that the run or its job has started. api:
        how the run starts it on this machine, with a free port at each start, one log for all of them, and the model of
        ``model_folder``; None: it does not."""
        self.name = name
        self.url = url.rstrip("/")
        self.key = ApiKey(key)
        self.has_worker_extension = has_worker_extension or api is not None
        self.ready_limit_s = ready_limit_s
        self.api = api
        self.model_folder = model_folder  # what a managed server's next start loads
        self.model_name = ""  # what requests call the model; known once the server is ready
        self.served = ""  # the model, by its name and by what the server says that it loaded
        self.max_length: int | None = None  # tokens of prompt and response that it accepts; None: it does not say
        self.starts = 0  # by the run; requests sent before the last one are lost
        self.process: subprocess.Popen | None = None  # the keeper of its processes; None before a start, after ``stop``
        self._last_fault = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.url else self.name

    @property
    def is_managed(self) -> bool:
        """Whether the run starts, restarts and stops the server."""
        return self.api is not None

    @property
    def has_ended(self) -> bool:
        """Whether a managed server has no running process. False for others: only requests can tell."""
        return self.is_managed and (self.process is None or self.process.poll() is not None)

    def start(self) -> None:
        """Returns once the server is ready; errors as for ``wait_until_ready``."""
        if self.is_managed:
            self.start_process()
        self.wait_until_ready()

    def start_process(self) -> None:
        """Starts a managed server's process without waiting for it."""
        host = self.api.settings.host
        port = free_port(host)
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        self.starts += 1
        trainers = {name for name in os.environ if name in TRAINER_VARIABLES or name.startswith("TORCHELASTIC_")}
        inherited = {name: value for name, value in os.environ.items() if name not in trainers}
        environment = {**inherited, **self.api.environment(self.key.value)}
        command = kept(self.api.command(self.model_folder, port))
        self.api.log.parent.mkdir(parents=True, exist_ok=True)
        with self.api.log.open("ab") as log:
            log.write(f"{START}{self.starts}: {self.url}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def restart(self, model_folder: Path | None = None) -> None:
        """Restarts a managed server with ``model_folder`` (None: the last one), and waits for the return of another;
        errors as for ``wait_until_ready``."""
        self.model_folder = model_folder or self.model_folder
        self.stop()
        self.start()

    def stop(self) -> None:
        """Ends a managed server's process and all that it started; does nothing where there is none."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            end_family(self.process.pid)  # where it was killed, and could not end what it kept
            self.process = None

    def wait_until_ready(self) -> None:
        """Waits until the server is healthy and names its model. Raises ServerError, with the end of the log, after
        ``ready_limit_s``, or as soon as the process has ended."""
        deadline = time.monotonic() + self.ready_limit_s
        while not self.is_healthy():
            if self.has_ended:
                raise ServerError(f"{self}: {self.ending()}")
            if time.monotonic() > deadline:
                why = "" if self.is_managed else f": {self._last_fault}"
                raise ServerError(f"{self} is not ready after {self.ready_limit_s:g} s{why}{self.log_tail()}")
            time.sleep(POLL_EVERY_S)
        self.read_models()

    def read_models(self) -> None:
        """Asks for the model's name and its context."""
        models = self.request("GET", MODELS)["data"]
        self.model_name, self.max_length = models[0]["id"], models[0].get("max_model_len")
        self.served = f"{self.model_name} ({models[0].get('root') or self.model_name})"

    def is_healthy(self) -> bool:
        try:
            self.request("GET", self.health, timeout_s=5.0, answers_json=False)
        except ServerError as error:
            self._last_fault = str(error)
            return self.any_answer_is_health and error.status is not None
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
        """``utils.http.exchange``, but blocking, and with ServerError for every outcome without a value."""

        async def one_request() -> Any:
            async with open_session(self.key) as session:
                return await self.exchange(
                    session, method, path, timeout_s, body=json, params=params, answers_json=answers_json
                )

        try:
            return asyncio.run(one_request())
        except Fault as fault:
            raise NoAnswer(f"{self}: {fault}{self.log_tail()}") from None

    async def exchange(
        self, session: aiohttp.ClientSession, method: str, path: str, limit_s: float, **options: Any
    ) -> Any:
        """``utils.http.exchange`` with this server."""
        url, server, is_own = self.url + path, str(self), self.has_worker_extension
        return await exchange(session, method, url, self.key, server=server, limit_s=limit_s, is_own=is_own, **options)

    def ending(self) -> str:
        """How a managed server's process has ended, for messages."""
        status = None if self.process is None else self.process.poll()
        return f"its process has ended with status {status}{self.log_tail()}"

    def log_tail(self) -> str:
        """The end of a managed server's log, to append to an error message; empty for others."""
        return "" if self.api is None else self.key.hide(end_of_log(self.api.log))


class PlainReplica(Replica):
    """An endpoint of OpenAI's API that need not have vLLM's health check, nor tell its models."""

    health = MODELS
    any_answer_is_health = True  # many have no such path, or refuse it

    def __init__(self, name: str, url: str, key: str | None, *, ready_limit_s: float, model: str | None) -> None:
        """url: with or without its last part, /v1. model: what requests ask for; None: the first that it lists."""
        super().__init__(name, url.rstrip("/").removesuffix("/v1"), key, ready_limit_s=ready_limit_s)
        self._model = model

    def read_models(self) -> None:
        if self._model is not None:
            self.model_name = self._model
            self.served = f"{self._model} ({self._model})"
            return
        try:
            super().read_models()
        except (ServerError, KeyError, IndexError, TypeError) as error:
            why = error if isinstance(error, ServerError) else "its list of models has no id"
            raise ServerError(f"{self}: {why}; name the model with generation.servers.model=...") from error


def free_port(host: str) -> int:
    """A port below those that the kernel gives to outgoing connections, one of which would take it before the server,
    which first loads for seconds to minutes, listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):  # runs with the same seed want others
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise ServerError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {host}")
