"""A process of two that import a Hugging Face folder, split in two; prints what its memory grows by meanwhile.

Usage: import_worker.py FOLDER PARALLELISM(json)
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.megatron import build
from nemo_edo.tracking import quiet_libraries

CLEAR_PEAK = "5"
"""Written to clear_refs: the peak of the resident memory is what it is now."""


def resident(kind: str) -> int:
    """Bytes of VmRSS, or of VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def main() -> None:
    quiet_libraries()
    folder, parallelism = Path(sys.argv[1]), ParallelismConfig(**json.loads(sys.argv[2]))
    device = build.device_and_groups(parallelism, 0, 1)
    load, grown = build._load_weights, []

    def watched(bridge, chunks):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what the import takes
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        before = resident("VmRSS")
        loaded = load(bridge, chunks)
        grown.append(resident("VmHWM") - before)
        return loaded

    build._load_weights = watched
    chunks = build.build_model(folder, parallelism, PrecisionConfig(), device, seed=0).chunks
    held = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    print(json.dumps({"held": held, "grown": grown[0]}), flush=True)


if __name__ == "__main__":
    main()
