"""Gives back the memory of what is no longer used, and spends no time on what will stay."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Inside the block Python does not look for unused objects; what it has made stays, and is never looked at again.

    For imports: while torch, Megatron and NeMo make their classes, the search takes a sixth of the time and finds
    nothing, and later it would visit each of them again. Not for a model, whose memory would never be given back.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def free_unused_memory() -> None:
    """Frees what only reference cycles keep, and returns it to the device and to the operating system.

    Megatron's models and optimizers are in cycles, which Python collects late: a model built meanwhile would need its
    memory at the same time. torch and glibc keep freed blocks for themselves unless told otherwise.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
