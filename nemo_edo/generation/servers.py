"""Generation servers: what they need on this machine, where they are placed, and their start."""

import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nemo_edo.config import GenerationConfig, ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.generation.replica import PlainReplica, Replica
from nemo_edo.generation.server_api import APIS, ServerAPI, server_python
from nemo_edo.utils.http import ApiKey, ServerError, key_of_environment
from nemo_edo.utils.processes import package_file


def check_servers(generation: GenerationConfig, gpus: int) -> None:
    check_environment(generation.servers, APIS.get(generation.backend, ServerAPI), gpus)


def check_environment(settings: ServersConfig, api: type[ServerAPI], gpus: int) -> None:
    """Raises UserError where servers lack an environment, GPUs or a key. gpus: number of GPUs of this machine."""
    if settings.urls:
        _user_key(settings)
        return
    python = server_python(settings)
    if shutil.which(python) is None:
        raise UserError(f"generation.servers.python: there is no {python}")
    if package_file(python, api.package, "__init__.py") is None:
        raise UserError(
            f"{python} has no {api.package}: {api.install}; then set generation.servers.python to its interpreter, or "
            "generation.servers.urls to running servers"
        )
    first = settings.first_gpu or 0
    needed = first + settings.replicas * settings.tensor_parallel_size
    if gpus and needed > gpus:
        raise UserError(
            f"generation.servers: replicas={settings.replicas}, tensor_parallel_size={settings.tensor_parallel_size} "
            f"and first_gpu={first} need {needed} GPUs; this machine has {gpus} (with generation.placement=shared they "
            "use the trainer's)"
        )


def placed(generation: GenerationConfig, trainers: int) -> GenerationConfig:
    """The config with ``first_gpu`` chosen. trainers: GPUs of the trainer's processes on this machine, its first ones.

    Raises UserError where servers that are to be apart would get one of them."""
    if generation.placement != "apart" or generation.servers.urls:
        return generation
    first = generation.servers.first_gpu
    if first is not None and first < trainers:
        raise UserError(
            f"generation.servers.first_gpu={first} is a GPU of the trainer, whose processes take the first {trainers} "
            f"of this machine: set first_gpu={trainers} or leave it out, or set generation.placement=shared"
        )
    servers = replace(generation.servers, first_gpu=trainers if first is None else first)
    return replace(generation, servers=servers)


def nccl_library(generation: GenerationConfig) -> str:
    """The libnccl.so.2 of a refit from GPU to GPU, for both of its ends. Raises UserError where there is none."""
    given, python = generation.refit.nccl_library, server_python(generation.servers)
    found = given or package_file(python, "nvidia.nccl", "lib/libnccl.so.2")
    if found is None or not Path(found).is_file():
        where = given or f"the environment of {python} (its package nvidia-nccl)"
        raise UserError(
            f"generation.refit.nccl_library: there is no libnccl.so.2 in {where}: name the file that the servers load"
        )
    return found


def replicas_at_urls(settings: ServersConfig, *, plain: bool = False) -> list[Replica]:
    """Running servers of any kind. plain: endpoints that return text alone."""
    key, limit_s = _user_key(settings).value, settings.health_limit_s
    if plain:
        return [
            PlainReplica(f"endpoint {place}", url, key, ready_limit_s=limit_s, model=settings.model)
            for place, url in enumerate(settings.urls)
        ]
    return [
        Replica(f"server {place}", url, key, ready_limit_s=limit_s, has_worker_extension=settings.launched)
        for place, url in enumerate(settings.urls)
    ]


def managed_replicas(api: ServerAPI, model_folder: Path, gpus: int, key: str | None = None) -> list[Replica]:
    """Replicas of any kind that the run starts on this machine. api: the same for each except ``gpus``, and ``log``,
    which is here the folder of the logs. gpus: of this machine. key: what they ask for; None: a new one."""
    settings, each, key = api.settings, api.settings.tensor_parallel_size, key or secrets.token_urlsafe(32)
    replicas, limit_s = [], settings.start_limit_s
    for place in range(settings.replicas):
        first = (settings.first_gpu or 0) + place * each
        devices = tuple(range(first, first + each)) if gpus else ()
        own = replace(api, gpus=devices, log=api.log / f"server_{place}.log")
        replicas.append(Replica(f"server {place}", key=key, ready_limit_s=limit_s, api=own, model_folder=model_folder))
    return replicas


def start(replicas: Sequence[Replica], needed_length: int) -> None:
    """Starts the managed replicas concurrently, and waits until all are ready. Raises ServerError, with none left
    running, where one does not become ready or accepts fewer tokens than ``needed_length``."""
    with ExitStack() as unless_ready:
        for replica in replicas:
            unless_ready.callback(replica.stop)
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            list(pool.map(lambda replica: replica.start(), replicas))
        for replica in replicas:
            if replica.max_length is not None and replica.max_length < needed_length:
                raise ServerError(
                    f"{replica} accepts {replica.max_length} tokens of prompt and response; model.seq_length is "
                    f"{needed_length}"
                )
        if len({replica.model_name for replica in replicas}) > 1:  # of servers that the run does not manage
            names = ", ".join(f"{replica}: {replica.model_name}" for replica in replicas)
            raise ServerError(f"the servers have different models ({names})")
        unless_ready.pop_all()


def _user_key(settings: ServersConfig) -> ApiKey:
    """The key of servers that the run does not manage."""
    return key_of_environment("generation.servers.api_key_variable", settings.api_key_variable)
