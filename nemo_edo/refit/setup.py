"""Builds the refit of servers from the config, and checks it before a run begins."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

import torch

from nemo_edo.config import RunConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.errors import UserError
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.generation.servers import nccl_library
from nemo_edo.interfaces import WeightSync
from nemo_edo.refit.disk import AdapterSync, DiskSync, RestartSync, WeightFolders, require_room
from nemo_edo.refit.libnccl import Communicator, Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.refit.servers import SleepOnTrainersGPUs
from nemo_edo.worker.dispatch import Workers

SHARED_MEMORY = Path("/dev/shm")
FOLDERS_AT_ONCE = 2
"""Folders of weights that exist while servers change from one to the next."""


def check_refit(cfg: RunConfig, run: Path) -> None:
    """Raises UserError where the config's refit is not possible. run: the run's folder."""
    generation, refit = cfg.generation, cfg.generation.refit
    on_gpu = torch.cuda.is_available()
    if generation.placement == "shared" and not on_gpu:
        raise UserError(
            "generation.placement is shared, but there is no GPU to share: on a CPU, vLLM's sleep mode frees no "
            "memory; set generation.placement=apart"
        )
    if refit.transport == "nccl" and not on_gpu:
        raise UserError("generation.refit.transport is nccl, which needs GPUs, and there is none here; set it to disk")
    if refit.transport == "nccl":
        Library(nccl_library(cfg))
    if refit.lora == "adapter" and not cfg.lora.rank:
        raise UserError("generation.refit.lora is adapter, and lora.rank is 0: there are no adapters; set it to merged")
    if refit.transport == "disk" and cfg.model.path is not None:  # the built-in model is small
        model_folder = Path(cfg.model.path)
        require_room(refit_root(cfg, run), FOLDERS_AT_ONCE * weight_bytes(cfg, model_folder))


def build_server_sync(
    cfg: RunConfig, run: Path, model_folder: Path, workers: Workers, engine: ServerEngine
) -> WeightSync:
    """The WeightSync of a policy. Its first push replaces whatever weights the servers have."""
    refit = cfg.generation.refit
    if refit.transport == "nccl":
        gpu = torch.device("cuda", torch.cuda.current_device())
        library, name = Library(nccl_library(cfg)), f"{run.name}/{secrets.token_hex(4)}"
        return NCCLSync(
            engine,
            workers,
            lambda: Communicator(library, refit.limit_s, gpu),
            name=name,
            attempts=refit.attempts,
            limit_s=refit.limit_s,
            bucket_bytes=refit.bucket_mib * 2**20,
        )
    size, adapters = weight_bytes(cfg, model_folder), refit.lora == "adapter"
    folders = WeightFolders(refit_root(cfg, run), workers, size, adapters_only=adapters)
    kind = RestartSync if cfg.generation.backend == "trtllm" else AdapterSync if adapters else DiskSync
    sleep = None if cfg.generation.placement == "apart" else build_sleep(cfg, workers)
    return kind(engine, folders, attempts=refit.attempts, limit_s=refit.limit_s, sleep=sleep)


def refit_root(cfg: RunConfig, run: Path) -> Path:
    """The parent of the run's folders of weights; absolute, as servers have other working directories."""
    run, given = run.absolute(), cfg.generation.refit.folder
    own = f"nemo_edo_{hashlib.blake2b(str(run).encode(), digest_size=6).hexdigest()}"
    if given is not None:
        return Path(given).absolute() / own
    near = SHARED_MEMORY.is_dir() and not cfg.generation.servers.urls
    return SHARED_MEMORY / own if near else run / "refit"


def weight_bytes(cfg: RunConfig, model_folder: Path) -> int:
    """Size of the model's weights in the precision of their export."""
    config = model_folder / "config.json"
    shape = ModelShape.from_hf(json.loads(config.read_text(encoding="utf-8")), str(config))
    return shape.parameters * (4 if cfg.precision.dtype == "fp32" else 2)


def build_sleep(cfg: RunConfig, workers: Workers) -> SleepOnTrainersGPUs:
    """For servers that share the trainer's GPUs."""
    servers = cfg.generation.servers
    gpus = servers.replicas * servers.tensor_parallel_size
    each = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return SleepOnTrainersGPUs(int(gpus * servers.memory_share * each), workers)
