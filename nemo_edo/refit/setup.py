"""Builds the refit of servers from the config, and checks it before a run begins."""

import hashlib
import json
import secrets
from pathlib import Path

import torch

from nemo_edo.config import GenerationConfig, LoRAConfig, ServersConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.errors import UserError
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.generation.servers import nccl_library
from nemo_edo.interfaces import WeightSync
from nemo_edo.refit.disk import AdapterSync, DiskSync, RestartSync, WeightFolders
from nemo_edo.refit.libnccl import Communicator, Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.refit.servers import SleepOnTrainersGPUs
from nemo_edo.rollouts.store import require_room
from nemo_edo.worker.dispatch import Workers

SHARED_MEMORY = Path("/dev/shm")
FOLDERS_AT_ONCE = 2  # folders of weights that exist while servers change from one to the next


def check_refit(generation: GenerationConfig, lora: LoRAConfig, model_path: str | None, dtype: str, run: Path) -> None:
    """Raises UserError where the config's refit is not possible. dtype: of the weights. run: the run's folder."""
    refit, on_gpu = generation.refit, torch.cuda.is_available()
    if generation.placement == "shared" and not on_gpu:
        raise UserError(
            "generation.placement is shared, but there is no GPU to share: on a CPU, vLLM's sleep mode frees no "
            "memory; set generation.placement=apart"
        )
    if refit.transport == "nccl" and not on_gpu:
        raise UserError("generation.refit.transport is nccl, which needs GPUs, and there is none here; set it to disk")
    if refit.transport == "nccl":
        Library(nccl_library(generation))
    if refit.lora == "adapter" and not lora.rank:
        raise UserError("generation.refit.lora is adapter, and lora.rank is 0: there are no adapters; set it to merged")
    if refit.transport == "disk" and model_path is not None:  # the built-in model is small
        needed = FOLDERS_AT_ONCE * weight_bytes(Path(model_path), dtype)
        require_room("generation.refit.folder", refit_root(generation, run), needed)


def build_server_sync(
    generation: GenerationConfig, run: Path, weights: int, workers: Workers, engine: ServerEngine
) -> WeightSync:
    """The WeightSync of a policy. Its first push replaces whatever weights the servers have. weights: bytes of them."""
    refit = generation.refit
    if refit.transport == "nccl":
        gpu = torch.device("cuda", torch.cuda.current_device())
        library, name = Library(nccl_library(generation)), f"{run.name}/{secrets.token_hex(4)}"
        return NCCLSync(
            engine,
            workers,
            lambda: Communicator(library, refit.limit_s, gpu),
            name=name,
            attempts=refit.attempts,
            limit_s=refit.limit_s,
            bucket_bytes=refit.bucket_mib * 2**20,
        )
    adapters = refit.lora == "adapter"
    folders = WeightFolders(refit_root(generation, run), workers, weights, adapters_only=adapters)
    kind = RestartSync if generation.backend == "trtllm" else AdapterSync if adapters else DiskSync
    sleep = None if generation.placement == "apart" else build_sleep(generation.servers, workers)
    return kind(engine, folders, attempts=refit.attempts, limit_s=refit.limit_s, sleep=sleep)


def refit_root(generation: GenerationConfig, run: Path) -> Path:
    """The parent of the run's folders of weights; absolute, as servers have other working directories."""
    run, given = run.absolute(), generation.refit.folder
    own = f"nemo_edo_{hashlib.blake2b(str(run).encode(), digest_size=6).hexdigest()}"
    if given is not None:
        return Path(given).absolute() / own
    near = SHARED_MEMORY.is_dir() and not generation.servers.urls
    return SHARED_MEMORY / own if near else run / "refit"


def weight_bytes(model_folder: Path, dtype: str) -> int:
    """Size of the model's weights in the precision of their export. dtype: that they are trained in."""
    config = model_folder / "config.json"
    shape = ModelShape.from_hf(json.loads(config.read_text(encoding="utf-8")), str(config))
    return shape.parameters * (4 if dtype == "fp32" else 2)


def build_sleep(servers: ServersConfig, workers: Workers) -> SleepOnTrainersGPUs:
    """The sleep of servers that share the trainer's GPUs."""
    each = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return SleepOnTrainersGPUs(int(servers.tensor_parallel_size * servers.memory_share * each), workers)
