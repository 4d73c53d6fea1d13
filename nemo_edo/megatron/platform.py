"""Everything between a fresh process and a model: CUDA with NCCL or CPU cores with gloo, and process groups.

``enter`` is called once, explicitly, before a model is built. On a machine with CUDA it chooses this process's GPU; on
one without, ``cpu/without_cuda.py`` answers where Megatron assumes CUDA, or Transformer Engine. ``layer_spec.py``
chooses a model's kernels by the device that it returns, and nothing else asks.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.cpu import without_cuda
from nemo_edo.megatron.splits import check_world
from nemo_edo.utils.processes import end_with_torchrun

NEVER_USED = ("wandb", "sklearn")
"""Packages that megatron-core and transformers import where they are installed, at 2 CPU seconds for every process."""

_entered: torch.device | None = None


def enter(threads: int | None = None) -> torch.device:
    """Makes this process ready for Megatron and returns the device that models live on. Later calls change nothing.
    threads: CPU threads of this process; None leaves torch's choice (torchrun sets OMP_NUM_THREADS=1)."""
    global _entered
    if _entered is None:
        # Megatron overlaps tensor-parallel communication in the order of one queue. CUDA reads it as it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with unimportable(NEVER_USED):
            if torch.cuda.is_available():
                _entered = _enter_a_gpu()
            else:
                require_no_unused_gpu()
                if threads is not None:
                    torch.set_num_threads(threads)
                without_cuda.adapt()  # before Megatron is imported
                _entered = torch.device("cpu")
    return _entered


def require_no_unused_gpu(driver: Path = Path("/dev/nvidiactl")) -> None:
    """Raises UserError where a torch for CUDA finds none of the machine's GPUs: a run would take days on the CPU."""
    if torch.version.cuda and driver.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        raise UserError(
            f"this machine has NVIDIA GPUs, and torch (for CUDA {torch.version.cuda}) cannot use them: `nvidia-smi` "
            "shows the driver's CUDA version, which must not be older; to train on the CPU, set CUDA_VISIBLE_DEVICES="
        )


def _enter_a_gpu() -> torch.device:
    device = local_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if find_spec("transformer_engine") is None:
        without_cuda.import_bridge()
        return device
    try:  # Megatron would compute without it, and Megatron-Bridge would end halfway through its imports
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"Transformer Engine is installed and cannot be imported: {error}; install what it lacks "
            "(pip install onnxscript 'transformer-engine[pytorch]'), or uninstall it to train with torch's kernels"
        ) from error
    import megatron.bridge  # noqa: F401

    return device


@contextlib.contextmanager
def unimportable(names: tuple[str, ...]) -> Iterator[None]:
    """Inside the block an import of these packages fails as if they were not installed, unless they are loaded."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def local_gpu(local_rank: int) -> torch.device:
    """The GPU of a node's process. Where a scheduler shows each process one GPU only, that one.

    Raises UserError where there are several, but fewer than processes."""
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise UserError(
            f"this process is number {local_rank + 1} on its node, where {visible} GPUs are visible: start at most "
            f"{visible} processes on a node (torchrun --nproc-per-node, cluster.processes_per_node), or see to "
            "CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank if visible > 1 else 0)


def init_process_group(device: torch.device) -> None:
    """torch.distributed over torchrun's environment, or a world of one process where there is none."""
    if torch.distributed.is_initialized():
        return
    end_with_torchrun()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        torch.distributed.init_process_group(backend)
    else:  # a store in memory: no port that could be taken
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


def device_and_groups(parallelism: ParallelismConfig, seed: int, threads: int | None) -> torch.device:
    """Everything between a fresh process and ``build_model``."""
    device = enter(threads)
    init_process_group(device)
    initialize_parallel_state(parallelism, seed)
    return device


def initialize_parallel_state(parallelism: ParallelismConfig, seed: int) -> None:
    """Megatron's process groups for this world, and its random-number tracker. Groups of these sizes are reused: torch
    keeps the threads and connections of every group to the end, also of those that Megatron has forgotten."""
    from megatron.core import parallel_state, tensor_parallel

    check_world(parallelism, torch.distributed.get_world_size())
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {kind: getattr(parallelism, f"{kind}_parallel_size") for kind in kinds}
    sizes["expert_tensor"] = sizes["expert_tensor"] or sizes["tensor_model"]
    if not parallel_state.is_initialized() or any(
        getattr(parallel_state, f"get_{kind}_parallel_world_size")() != size for kind, size in sizes.items()
    ):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**{f"{kind}_parallel_size": size for kind, size in sizes.items()})
    virtual = parallelism.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if virtual is None else 0)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


# --- copies between host and device, which with memory that is not pinned would each wait for a GPU's queue ----------


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


def fetched(*tensors: Tensor) -> list[Tensor]:
    """The device's tensors on the host, which waits once for all of them."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return copies
