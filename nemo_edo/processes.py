"""Processes that end with the one that started them: none goes on writing or training when nobody waits for it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that the system sends to this process when the thread that started it ends."""


def end_with(parent: int) -> None:
    """The system kills this process as soon as its parent, process ``parent``, has ended, however that came about; at
    once if it has already. Linux alone can do this: elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before it was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_torchrun() -> None:
    """A process that torchrun started ends with it: else it would keep the run's folder to itself, and train on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
