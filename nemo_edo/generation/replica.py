"""One server behind a URL: a process that the run starts, or one that was there before it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from nemo_edo.generation.server_api import HEALTH, MODELS, Launch, ServerAPI
from nemo_edo.http_client import Fault, ServerError, described, json_of, require_success
from nemo_edo.processes import kept

LOOK_EVERY_S = 0.25
"""Between two looks at a server that is starting."""
LOG_LINES = 25
"""Of a server's log, in messages."""
OF_THE_TRAINER = ("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                  "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")  # fmt: skip
"""Variables that torchrun or a user sets for the trainer, and that would lead a server astray."""


class Replica:
    """A server that answers for the whole model. Everything here waits: what answers many requests at a time is
    ``dispatch.py``."""

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        key: str | None = None,
        api: ServerAPI | None = None,
        launch: Launch | None = None,
        model_folder: Path | None = None,
        start_limit_s: float = 900.0,
        launched: bool = False,
    ) -> None:
        """name: in messages. url: of a server that is there already; else ``api``, ``launch`` and ``model_folder``,
        what it loads when it is started, say how the run starts one. key: sent with every request. launched: whether
        the run's job has started the one at the URL."""
        if (url is None) == (launch is None):
            raise ValueError("a replica has a URL, or a way to start it")
        self.name = name
        self.url = "" if url is None else url.rstrip("/")
        self.is_ours = url is None or launched
        """Whether it was started as the run starts servers, with what it loads into them."""
        self.generation = 0
        """Starts so far: what was begun before the last one is lost."""
        self.model_folder = model_folder
        self.model_name = ""
        """What requests have to call its model; known once it is ready."""
        self.max_length: int | None = None
        """Tokens of prompt and response that the server takes, where it tells."""
        self._key = key
        self._api = api
        self._launch = launch
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen | None = None

    @property
    def is_local(self) -> bool:
        """Whether the run starts it."""
        return self._launch is not None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    @property
    def has_ended(self) -> bool:
        """Whether there is no process of it. Nobody knows that of a server that the run does not start."""
        return self.is_local and (self._process is None or self._process.poll() is not None)

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.url else self.name

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process and waits until it answers. Raises ServerError, with the end of its log, where it does
        not come up in time."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Starts the process, and waits for nothing."""
        launch, port = self._launch, free_port(self._launch.host)
        self.url = f"http://{_reached_at(launch.host)}:{port}"
        self.generation += 1
        inherited = {name: value for name, value in os.environ.items() if not _is_of_the_trainer(name)}
        environment = {**inherited, **self._api.environment(launch, self._key)}
        command = self._api.command(launch, self.model_folder, port)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            log.write(f"\n--- start {self.generation} of {self}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                kept(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until_ready(self, limit_s: float | None = None) -> None:
        """Returns once it is healthy and tells its model's name. Raises ServerError after ``limit_s`` (None: the limit
        of a start), or once its process has ended."""
        limit_s = self._start_limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            if self.has_ended:
                raise ServerError(f"{self} has ended with status {self._process.poll()}{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self} is not ready after {limit_s:g} s{self.log_tail()}")
            time.sleep(LOOK_EVERY_S)
        self._learn_model()

    def stop(self) -> None:
        """Ends the process and all that it started; nothing where there is none."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def restart(self, model_folder: Path | None = None) -> None:
        """A new process that loads ``model_folder`` (None: the last one); errors as of ``start``."""
        if model_folder is not None:
            self.model_folder = model_folder
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
        """The parsed JSON of the answer; None where it is empty, and without ``answers_json``, whatever it is. Raises
        ServerError for every other outcome."""
        try:
            # The run's own servers are on this machine, whatever proxy the environment names. Without TLS, no
            # certificates: to load them takes longer than the request.
            verify = self.url.startswith("https://")
            with httpx.Client(
                headers=self.headers, timeout=timeout_s, trust_env=not self.is_local, verify=verify
            ) as client:
                response = client.request(method, self.url + path, json=json, params=params)
            require_success(response, str(self))
            return json_of(response) if answers_json else None
        except httpx.HTTPError as error:
            raise ServerError(f"{self}: {method} {path}: {described(error)}{self.log_tail()}") from error
        except Fault as fault:
            raise ServerError(f"{self}: {method} {fault}{self.log_tail()}") from fault

    def _learn_model(self) -> None:
        models = self.request("GET", MODELS)
        try:
            names = [model["id"] for model in models["data"]]
        except (KeyError, TypeError) as error:
            raise ServerError(f"{self}: GET {MODELS} tells no models: {models!r}") from error
        expected = self._api.model_name(self.model_folder) if self.is_local else None
        if not names or expected not in (None, *names):
            # Another process was given the port between the search for a free one and the start.
            raise ServerError(f"{self} is not the server that was started: it has the models {names}{self.log_tail()}")
        self.model_name = expected or names[0]
        longest = models["data"][0].get("max_model_len")
        self.max_length = longest if isinstance(longest, int) else None

    def log_tail(self) -> str:
        """The end of the log, for the end of a message; nothing for a server that the run has not started."""
        if self._launch is None or not self._launch.log.is_file():
            return ""
        lines = self._launch.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"; the end of {self._launch.log}:", *(f"  | {line}" for line in lines)])


def _is_of_the_trainer(name: str) -> bool:
    return name in OF_THE_TRAINER or name.startswith("TORCHELASTIC_")


def _reached_at(host: str) -> str:
    """Where this machine reaches a server that listens on ``host``, as a URL has it."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address else address


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
