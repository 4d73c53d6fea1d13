"""What a process's memory grows by while it imports a Hugging Face folder. Run by a WorkerPool."""

import ctypes
import gc
from pathlib import Path
from unittest import mock

from nemo_edo.config import ParallelismConfig, PrecisionConfig

CLEAR_PEAK = "5"
"""Written to clear_refs: the peak of the resident memory is what it is now."""


def resident(kind: str) -> int:
    """Bytes of VmRSS, or of VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def memory_of_import(folder: Path, sizes: dict) -> dict[str, int]:
    """Bytes: of the parameters that this rank has, and what its memory grew by at most while it loaded them."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    from nemo_edo.megatron import bridge, process_groups

    parallelism = ParallelismConfig(**sizes)
    device = process_groups.device_and_groups(parallelism, 0, 1)
    load, grown = MegatronModelBridge.load_weights_hf_to_megatron, []

    def watched(loader, *arguments, **settings):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what the import takes
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        before = resident("VmRSS")
        loaded = load(loader, *arguments, **settings)
        grown.append(resident("VmHWM") - before)
        return loaded

    with mock.patch.object(MegatronModelBridge, "load_weights_hf_to_megatron", watched):
        chunks = bridge.build_model(folder, parallelism, PrecisionConfig(), device, seed=0).chunks
    held = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    return {"held": held, "grown": grown[0]}
