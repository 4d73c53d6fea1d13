"""NCCL of pretended GPUs: gloo carries the numbers. As with NCCL, tensors of the CPU are refused; and so is a process
that has chosen no GPU: NCCL would put its objects and barriers on the first one, like every other process's."""

from __future__ import annotations

import pretended_cuda
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo


def _finished(result: object = None):
    future = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)] if isinstance(value, (list, tuple)) else []


class ProcessGroupNCCL(ProcessGroup):
    """Every operation copies its tensors to the host, has gloo do it, waits, and copies the first argument's back: that
    is where results are."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    supports_coalescing = False

    def __init__(self, store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._sent: list[tuple] = []
        self._name, self._gloo = options.group_name, ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(ProcessGroup.BackendType.GLOO)
        gloo = ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._gloo._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    getBackendName = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device) -> ProcessGroupNCCL:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def barrier(self, opts=None):
        torch.cuda.synchronize()
        return self.allreduce([torch.zeros(1, device="cuda")])

    def _over_gloo(self, operation: str, *arguments: object):
        """The operation's tensors may be in lists, and in lists of lists."""
        if not pretended_cuda.chosen:
            raise RuntimeError(f"NCCL's {operation} before torch.cuda.set_device: this process has chosen no GPU")
        there: dict[int, tuple[Tensor, Tensor]] = {}

        def on_host(value: object) -> object:
            if isinstance(value, (list, tuple)):
                return [on_host(part) for part in value]
            if not isinstance(value, Tensor):
                return value
            if not value.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {value.device.type}: NCCL's "
                                   f"{operation} got a tensor of size {tuple(value.shape)}")  # fmt: skip
            if id(value) not in there:
                there[id(value)] = value, value.detach().cpu()
            return there[id(value)][1]

        if self._size > 1:
            # A gather's results and a scatter's inputs are larger than what a rank gives or gets.
            sizes = (sum(tensor.nbytes for tensor in _flat(value)) for value in arguments)
            pretended_cuda.collectives.update({operation: 1, "bytes": max(sizes)})
        with pretended_cuda.kernel(f"nccl {operation}"):
            work = getattr(self._gloo, operation)(*map(on_host, arguments))
            if operation == "send":  # the receiver may send first
                self._sent.append((work, there))
                return work
            work.wait()
            results = _flat(arguments[0])
            with torch.no_grad():
                for tensor in results:
                    tensor.copy_(there[id(tensor)][1])
            return _finished(results)


def _operation(name: str):
    def method(self, *arguments, **named):
        return self._over_gloo(name, *arguments, *named.values())

    return method


for _name in (
    "allgather", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced", "allreduce",
    "allreduce_coalesced", "all_to_all_single", "alltoall", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "scatter", "send",
):  # fmt: skip
    setattr(ProcessGroupNCCL, _name, _operation(_name))
