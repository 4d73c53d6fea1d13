"""Gives back the memory of what is no longer used."""

from __future__ import annotations

import ctypes
import gc

import torch


def free_unused_memory() -> None:
    """Frees what only reference cycles keep, and returns it to the device and to the operating system.

    Megatron's models and optimizers are in cycles, which Python collects late: a model built meanwhile would need its
    memory at the same time. torch and glibc keep freed blocks for themselves unless told otherwise.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
