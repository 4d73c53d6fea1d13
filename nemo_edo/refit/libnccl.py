"""NVIDIA's NCCL by ctypes: the few functions that a refit calls, as vLLM's own wrapper has them
(``vllm/distributed/device_communicators/pynccl_wrapper.py``): torch's Python binding cannot make a communicator
(``torch.cuda.nccl.init_rank`` fails since Python 3.10). Communicators are non-blocking (nccl.h, ``ncclConfig_t``), so
that a rank that dies costs an error and not the run."""

import ctypes
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_edo.utils.http import ServerError

ID_BYTES = 128
OLDEST = 21400  # NCCL 2.14: the first with communicators that do not block
_SUCCESS, _IN_PROGRESS, _SUM = 0, 7, 0
_POLL_S = 2e-4
_TYPES = {  # ``ncclDataType_t``
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of 2.14; later versions read as much of it as ``size`` and ``version`` say."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


_FUNCTIONS: dict[str, tuple] = {  # argument types; each returns an ``ncclResult_t``
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommAbort": (c_void_p,),
}


class Library:
    """The ``libnccl.so.2`` of the servers' environment, for both ends of a refit (vLLM loads it by VLLM_NCCL_SO_PATH).
    NCCL compares versions within a communicator and refuses ranks that differ (``src/init.cc``: "Mismatched NCCL
    version detected"); two communicators of a process may belong to two versions, so torch may have any."""

    def __init__(self, path: str | Path) -> None:
        """Raises ServerError where the file is not NCCL, or older than 2.14."""
        self.path, self.version = str(path), "of unknown version"
        try:
            self._library = ctypes.CDLL(self.path)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
            self._library.ncclGetErrorString.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise ServerError(f"{self.path} is no NCCL of 2.14 or newer: {error}") from error
        code = c_int()
        self.require(self._library.ncclGetVersion(byref(code)), "ncclGetVersion")
        self.version = f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def __str__(self) -> str:
        return f"NCCL {self.version} ({self.path})"

    def __getattr__(self, name: str) -> Callable[..., int]:
        return getattr(self._library, name)

    def unique_id(self) -> bytes:
        """What the ranks of a new communicator share. This process waits for the others in the background."""
        found = _UniqueId()
        self.require(self._library.ncclGetUniqueId(byref(found)), "ncclGetUniqueId")
        return bytes(found)

    def require(self, status: int, what: str) -> None:
        """Raises ServerError, with NCCL's own words, where a call has failed."""
        if status not in (_SUCCESS, _IN_PROGRESS):
            said = self._library.ncclGetErrorString(c_int(status)).decode()
            raise ServerError(f"{what}: {said} (status {status}); NCCL_DEBUG=WARN says more. This process has {self}")


def in_words(library: Library) -> str:
    """Which NCCL is used for what."""
    own = ".".join(map(str, torch.cuda.nccl.version()[:3])) if hasattr(torch._C, "_nccl_version") else "none"
    return f"{library.version} sends weights, in trainer and servers ({library.path}); torch's own is {own}"


@dataclass(eq=False, repr=False)
class Communicator:
    """The trainer's end of a group, rank 0, or another rank. Whatever a call raises, the communicator is aborted: all
    ranks need a new one. ``check`` is called while waiting, and raises where another rank will not come."""

    library: Library
    limit_s: float  # seconds for each call
    device: torch.device
    stream: Callable[[], Any] = torch.cuda.current_stream  # the current one, on which calls are enqueued
    unique_id: bytes = b""  # of the group to join; empty: of a new one

    def __post_init__(self) -> None:
        self.unique_id = self.unique_id or self.library.unique_id()
        self._communicator: c_void_p | None = None

    def join(self, rank: int, size: int, check: Callable[[], None]) -> None:
        """Returns once all ranks have joined, and have added up a number, as vLLM's workers do first."""
        self._communicator = c_void_p()
        shared = _UniqueId.from_buffer_copy(self.unique_id)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, OLDEST, 0)
        place = byref(self._communicator)
        self._call("ncclCommInitRankConfig", check, place, size, shared, rank, byref(config), waits=False)
        self._collective("ncclAllReduce", torch.zeros(1, device=self.device), _SUM, check)

    def broadcast(self, tensor: Tensor, check: Callable[[], None]) -> None:
        """Sends a tensor from rank 0 to all other ranks, which have it in theirs when this returns."""
        self._collective("ncclBroadcast", tensor.to(self.device).contiguous(), 0, check)

    def abort(self) -> None:
        """Ends what is enqueued, and leaves the group; the others are not waited for."""
        if self._communicator:
            self.library.ncclCommAbort(self._communicator)
        self._communicator = None

    def _collective(self, name: str, tensor: Tensor, operand: int, check: Callable[[], None]) -> None:
        """operand: the root or the reduction."""
        if self._communicator is None:
            raise ServerError(f"{name} on a communicator that was aborted")
        address, stream = c_void_p(tensor.data_ptr()), c_void_p(self.stream().cuda_stream)
        number = tensor.numel(), _TYPES[tensor.dtype], operand
        self._call(name, check, address, address, *number, self._communicator, stream, waits=True)

    def _call(self, name: str, check: Callable[[], None], *arguments: object, waits: bool) -> None:
        """waits: until the stream is done, so that the tensor may be freed and a failure belongs to this call."""
        deadline, status = time.monotonic() + self.limit_s, c_int()
        try:
            self.library.require(getattr(self.library, name)(*arguments), name)
            while True:
                self.library.require(
                    self.library.ncclCommGetAsyncError(self._communicator, byref(status)), "ncclCommGetAsyncError"
                )
                self.library.require(status.value, name)
                if status.value == _SUCCESS and (not waits or self.stream().query()):
                    return
                check()
                if time.monotonic() > deadline:
                    raise ServerError(f"{name} has not ended after {self.limit_s:g} s: another rank does not take part")
                time.sleep(_POLL_S)
        except ServerError:
            self.abort()
            raise
