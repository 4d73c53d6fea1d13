"""The memory of this machine, as far as its control group lets this process have it (a container's or a job's), and
how this process gives back what it no longer uses."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
NAMES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""A control group's limit and use in version 2 (True) and 1."""


def total_bytes() -> int:
    """The machine's memory, or the lowest limit of this process's control groups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """What a process can still allocate without swapping: the kernel's estimate (MemAvailable), or what is left below
    a control group's limit, where files that the kernel can drop do not count as used."""
    lines = (PROC / "meminfo").read_text().splitlines()
    [of_machine] = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([of_machine, *(limit - used for limit, used in _limits())]))


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group of this process that has a limit; Linux alone has such groups."""
    groups = PROC / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        number, controllers, path = line.split(":", 2)
        second = number == "0"
        if not second and "memory" not in controllers.split(","):
            continue
        top = CGROUPS if second else CGROUPS / "memory"
        inside = top / path.lstrip("/")
        # A container may see its own group as the top, under which the host's path does not exist.
        for group in [inside, *inside.parents]:
            if group.is_relative_to(top) and (group / NAMES[second][0]).is_file():
                limit, used = ((group / name).read_text().strip() for name in NAMES[second])
                if limit != "max":
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                    yield int(limit), int(used) - droppable


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Inside the block Python does not look for unused objects; what it has made stays, and is never looked at again.
    For imports: while torch, Megatron and NeMo make their classes, the search takes a sixth of the time and finds
    nothing, and later it would visit each of them again. Not for a model, whose memory would never be given back."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def free_unused_memory() -> None:
    """Frees what only reference cycles keep, and returns it to the device and to the operating system. Megatron's
    models and optimizers are in cycles, which Python collects late: a model built meanwhile would need its memory at
    the same time. torch and glibc keep freed blocks for themselves unless told otherwise."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
