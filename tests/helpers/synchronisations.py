"""Counts how often a block makes the host wait for a device: operators that read a tensor's values."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::item",
           "aten::masked_select", "aten::_unique2"}  # fmt: skip


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        indices = args[1] if name.startswith("aten::index") and isinstance(args[1], (list, tuple)) else ()
        if name in READING or any(x is not None and x.dtype == torch.bool for x in indices):
            self.asked[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with _Counting() as mode:
        yield mode.asked
