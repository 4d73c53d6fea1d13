"""torch.cuda of a process, over the pretended device (device.cpp). Streams run in order, on one thread.

``counts`` says what the process has asked of the device. A launch is an operator that computes or writes on the device:
views and allocations are none. Calls of Transformer Engine's and apex's extensions, of a Triton kernel, of NCCL and of
a function that torch.compile fuses are one launch each, whatever they are computed with here.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import types

CAPABILITY = (9, 0)
MEMORY = 80 << 30
chosen: list[int] = []
"""What ``torch.cuda.set_device`` was called with in this process."""

collectives: collections.Counter[str] = collections.Counter()
"""This process's collectives among several ranks: how many by name, and the "bytes" of their tensors."""


class Counts(ctypes.Structure):
    """What a process has asked of its device. ``peak``: of allocated bytes, since the last ``counts()``."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "launches", "synchronizations", "bytes_to_device", "bytes_to_host", "allocated", "peak")]  # fmt: skip


@functools.cache
def _library():
    library = ctypes.CDLL(os.environ["PRETENDED_CUDA"])
    library.pretended_cuda_operators.restype = ctypes.c_char_p
    return library


def counts() -> Counts:
    found = Counts()
    _library().pretended_cuda_counts(ctypes.byref(found))
    return found


def operators() -> collections.Counter[str]:
    """Launches by name, and synchronisations by "sync: " and their reason."""
    lines = _library().pretended_cuda_operators().decode().splitlines()
    return collections.Counter({name: int(count) for name, _, count in (line.rpartition(" ") for line in lines)})


@contextlib.contextmanager
def kernel(name: str):
    """What is done inside is one launch."""
    _library().pretended_cuda_begin_kernel(name.encode())
    try:
        yield
    finally:
        _library().pretended_cuda_end_kernel()


def as_kernel(function):
    """The function, each call of which is one launch."""

    @functools.wraps(function)
    def call(*arguments, **named):
        with kernel(function.__name__):
            return function(*arguments, **named)

    return call


def install(torch, library) -> None:
    """``library``: device.cpp's."""
    _replace_cuda(torch, library.pretended_cuda_synchronize)
    # Of Megatron's functions, whose backward passes are functions that are compiled as well.
    torch.compile = lambda function=None, **_: as_kernel(function) if function else as_kernel
    _replace_nccl(torch)


def _replace_cuda(torch, synchronize) -> None:
    properties = types.SimpleNamespace(
        name="pretended H100", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY, multi_processor_count=132,
        uuid="00000000-0000-0000-0000-000000000000",
    )  # fmt: skip

    class Stream:
        def __init__(self, device=None, priority: int = 0, **_) -> None:
            self.device, self.cuda_stream = torch.device("cuda", 0), 0

        def wait_stream(self, stream) -> None:
            pass

        def wait_event(self, event) -> None:
            pass

        def record_event(self, event=None):
            return event or Event()

        def synchronize(self) -> None:
            synchronize()

        def query(self) -> bool:
            synchronize()
            return True

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

    class Event:
        def __init__(self, *_, **__) -> None:
            pass

        def record(self, stream=None) -> None:
            pass

        def wait(self, stream=None) -> None:
            pass

        def synchronize(self) -> None:
            synchronize()

        def query(self) -> bool:
            synchronize()
            return True

        def elapsed_time(self, end) -> float:
            return 1.0

    stream = Stream()
    state = torch.random  # its generator stands in for the GPU's
    replaced = {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _check_device(torch),
        "synchronize": lambda device=None: synchronize(),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda device=None: (MEMORY * 3 // 4, MEMORY),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "get_rng_state": lambda device=None: state.get_rng_state(),
        "set_rng_state": lambda new, device=None: state.set_rng_state(new),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "default_generators": (torch.default_generator,),
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.version.cuda = "13.1"


def _check_device(torch):
    def set_device(device) -> None:
        if torch.device("cuda", device if isinstance(device, int) else torch.device(device).index or 0).index != 0:
            raise RuntimeError("CUDA error: invalid device ordinal")
        chosen.append(0)

    return set_device


def _replace_nccl(torch) -> None:
    from pretended_nccl import ProcessGroupNCCL
    from torch.distributed import distributed_c10d as c10d

    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
    torch._C._nccl_version = lambda: (2 << 32) | (28 << 16) | 9
    torch._C._nccl_version_suffix = lambda: b""


def refuse_pointers_of_the_host(interpreter) -> None:
    """Triton's interpreter would take tensors of the CPU; a kernel on a GPU cannot read them."""
    call = interpreter.GridExecutor.__call__

    def strict(self, *arguments, **named):
        for place, value in enumerate([*arguments, *named.values()]):
            if getattr(getattr(value, "device", None), "type", "cuda") != "cuda":
                raise ValueError(f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)")
        with kernel(getattr(self.fn, "__name__", "a Triton kernel")):
            return call(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = strict
