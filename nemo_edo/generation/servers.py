"""From the config to the servers that responses come from."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import nemo_edo
from nemo_edo.config import RunConfig, ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import Launch, ServerAPI
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.generation.trtllm_server import TRTLLM
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.http_client import ServerError

APIS: dict[str, type[ServerAPI]] = {api.backend: api for api in (VLLM, TRTLLM)}
ENVIRONMENTS = (Path(".venv-vllm"), Path(nemo_edo.__file__).parents[1] / ".venv-vllm", Path("/opt/vllm"))
"""Where servers' own environments stand: of ``make vllm-env``, and of the container."""


def check_servers(cfg: RunConfig, gpus: int) -> None:
    """Raises UserError where the config's servers cannot be started or reached for lack of an environment, of GPUs or
    of a key. gpus: of this machine."""
    settings, api = cfg.generation.servers, APIS[cfg.generation.backend]
    check_environment(settings, api, gpus)


def check_environment(settings: ServersConfig, api: type[ServerAPI], gpus: int) -> None:
    """``check_servers``, of servers of any use."""
    if settings.urls:
        given_key(settings)
        return
    python = server_python(settings)
    if shutil.which(python) is None:
        raise UserError(f"generation.servers.python: there is no {python}")
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    # -I, for the servers are started without the trainer's PYTHONPATH, too
    if subprocess.run([python, "-I", "-c", probe, api.package], capture_output=True).returncode:
        raise UserError(
            f"{python} has no {api.package}: {api.install}; then name its interpreter (generation.servers.python), or "
            "servers that run already (generation.servers.urls)"
        )
    needed = settings.first_gpu + settings.replicas * settings.tensor_parallel_size
    if gpus and needed > gpus:
        raise UserError(
            f"generation.servers: {settings.replicas} replicas of {settings.tensor_parallel_size} GPUs from GPU "
            f"{settings.first_gpu} on need {needed} GPUs; this machine has {gpus}"
        )


def server_python(settings: ServersConfig) -> str:
    """The interpreter that servers are started with."""
    if settings.python is not None:
        return settings.python
    found = [str(folder / "bin" / "python") for folder in ENVIRONMENTS if (folder / "bin" / "python").exists()]
    return str(Path(found[0]).absolute()) if found else sys.executable


def build_replicas(cfg: RunConfig, model_folder: Path, logs: Path, gpus: int, key: str | None = None) -> list[Replica]:
    """Replicas as the config has them, none started. logs: the folder of their logs. gpus: of this machine. key: that
    those which are started will ask for; None: one that is made here."""
    settings = cfg.generation.servers
    if settings.urls:
        return replicas_at_urls(settings)
    return own_replicas(settings, APIS[cfg.generation.backend](), _launch(cfg, logs), model_folder, gpus, key)


def replicas_at_urls(settings: ServersConfig) -> list[Replica]:
    """Those that are there already, of any use."""
    key = given_key(settings)
    return [
        Replica(f"server {place}", url=url, key=key, start_limit_s=settings.health_limit_s, launched=settings.launched)
        for place, url in enumerate(settings.urls)
    ]


def own_replicas(
    settings: ServersConfig, api: ServerAPI, launch: Launch, model_folder: Path, gpus: int, key: str | None = None
) -> list[Replica]:
    """Those that are started on this machine, of any use. launch: of each, but for its GPUs and its log: ``log`` is the
    folder of all logs. gpus, key: as of ``build_replicas``."""
    each, key = settings.tensor_parallel_size, key or secrets.token_urlsafe(32)
    replicas = []
    for place in range(settings.replicas):
        first = settings.first_gpu + place * each
        own = tuple(range(first, first + each)) if gpus else ()
        replicas.append(
            Replica(
                f"server {place}",
                key=key,
                api=api,
                launch=replace(launch, gpus=own, log=launch.log / f"server_{place}.log"),
                model_folder=model_folder,
                start_limit_s=settings.start_limit_s,
            )
        )
    return replicas


def start(replicas: Sequence[Replica], needed_length: int) -> None:
    """Starts those that the run starts, all at a time, and waits for all. Raises ServerError, with none left running,
    where one does not come up or takes fewer tokens than ``needed_length``."""

    def ready(replica: Replica) -> None:
        replica.start() if replica.is_local else replica.wait_until_ready()
        if replica.max_length is not None and replica.max_length < needed_length:
            raise ServerError(
                f"{replica} takes {replica.max_length} tokens of prompt and response together; model.seq_length is "
                f"{needed_length}"
            )

    try:
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            list(pool.map(ready, replicas))
        if len({replica.model_name for replica in replicas}) > 1:  # of servers that others have started
            names = ", ".join(f"{replica}: {replica.model_name}" for replica in replicas)
            raise ServerError(f"the servers have different models ({names})")
    except BaseException:
        for replica in replicas:
            replica.stop()
        raise


def build_server_engine(
    cfg: RunConfig,
    replicas: Sequence[Replica],
    *,
    stop_id: int,
    vocab_size: int,
    decode: Callable[[Sequence[int]], str],
    model_folder: Path,
    progress: bool = False,
) -> ServerEngine:
    """replicas: started ones; none on every rank but the first."""
    return ServerEngine(
        replicas,
        APIS[cfg.generation.backend](),
        cfg.generation.servers,
        stop_id=stop_id,
        vocab_size=vocab_size,
        decode=decode,
        model_folder=model_folder,
        logprobs_after_temperature=_after_temperature(cfg),
        progress=progress,
    )


def _launch(cfg: RunConfig, logs: Path) -> Launch:
    settings = cfg.generation.servers
    cores = len(os.sched_getaffinity(0))
    return Launch(
        python=server_python(settings),
        host=settings.host,
        dtype=settings.dtype or ("float32" if cfg.precision.dtype == "fp32" else "bfloat16"),
        max_length=cfg.model.seq_length,
        logprobs_after_temperature=_after_temperature(cfg),
        gpus=(),
        threads=settings.threads or max(1, cores // settings.replicas),
        cpu_cache_gb=settings.cpu_cache_gb,
        memory_share=settings.memory_share,
        max_in_flight=settings.max_in_flight,
        sleeps=cfg.generation.placement == "shared",
        adapter_rank=cfg.lora.rank if cfg.lora.rank and cfg.generation.refit.lora == "adapter" else None,
        arguments=(*settings.arguments, *_transfer_arguments(cfg)),
        log=logs,
    )


def _after_temperature(cfg: RunConfig) -> bool:
    """Evaluations draw at temperature 1 and without a cut, where both kinds of log-probabilities are the same."""
    return cfg.generation.backend == VLLM.backend and cfg.sampling.top_p == 1


def _transfer_arguments(cfg: RunConfig) -> tuple[str, ...]:
    """What a vLLM server needs to be told to take weights from GPU to GPU."""
    nccl = cfg.generation.refit.transport == "nccl"
    return ("--weight-transfer-config", json.dumps({"backend": "nccl"})) if nccl else ()


def given_key(settings: ServersConfig) -> str | None:
    """The key of servers that the run does not start."""
    variable = settings.api_key_variable
    if variable is None:
        return None
    if variable not in os.environ:
        raise UserError(f"generation.servers.api_key_variable is {variable}, which the environment does not have")
    return os.environ[variable]
