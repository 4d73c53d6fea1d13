"""The process of a server that the run starts on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from nemo_edo.generation.server_api import Launch, ServerAPI
from nemo_edo.utils.processes import kept

START = "--- start"
"""How a line of a server's log begins that tells of a start."""
LOG_LINES = 25
"""Lines of a server's log that error messages show."""
TRAINER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                     "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
                     "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # fmt: skip
"""Variables that torchrun or a user sets for the trainer, and that would mislead a server: one queue to the GPU is for
Megatron's overlap, and vLLM's sleep mode refuses an allocator with expandable segments."""


class ServerProcess:
    """Starts and stops a server. Each start takes a free port and appends to the same log."""

    def __init__(self, api: ServerAPI, launch: Launch, model_folder: Path) -> None:
        """model_folder: what the next start loads; may be set before each."""
        self.launch = launch
        self.model_folder = model_folder
        self.starts = 0
        self._api = api
        self._process: subprocess.Popen | None = None

    @property
    def model_name(self) -> str:
        """What the server calls the model of ``model_folder``."""
        return self._api.model_name(self.model_folder)

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs, and where there is none."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.status is None

    def start(self, key: str | None) -> str:
        """Starts the process without waiting for it. Returns the server's URL. key: what it asks its clients for."""
        port = free_port(self.launch.host)
        url = f"http://{_client_address(self.launch.host)}:{port}"
        self.starts += 1
        inherited = {name: value for name, value in os.environ.items() if not _is_trainer_variable(name)}
        environment = {**inherited, **self._api.environment(self.launch, key)}
        command = self._api.command(self.launch, self.model_folder, port)
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        with self.launch.log.open("ab") as log:
            log.write(f"\n{START} {self.starts}: {url}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                kept(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        return url

    def stop(self) -> None:
        """Ends the process and all that it started; does nothing where there is none."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def log_tail(self) -> str:
        """The end of the log, to append to an error message; empty where there is no log."""
        if not self.launch.log.is_file():
            return ""
        lines = self.launch.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"; the end of {self.launch.log}:", *(f"  | {line}" for line in lines)])


def starts_in(log: Path) -> int:
    """How often a server was started, by its log."""
    return sum(line.startswith(START) for line in log.read_text(encoding="utf-8", errors="replace").splitlines())


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _is_trainer_variable(name: str) -> bool:
    return name in TRAINER_VARIABLES or name.startswith("TORCHELASTIC_")


def _client_address(host: str) -> str:
    """The address, as URLs write it, at which this machine reaches a server that listens on ``host``."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address else address
