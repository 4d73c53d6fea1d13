"""Processes that end with the one that started them: none goes on writing or training when nobody waits for it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

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


LOOKS_PER_SECOND = 5
"""How often a keeper looks whether its parent is still there."""


def kept(command: Sequence[str]) -> list[str]:
    """The command line of a process, a keeper, that runs ``command`` and all that it starts in a process group of their
    own, and kills the group once the process that calls this has ended, the keeper is told to (SIGTERM), or the command
    itself has ended. Its exit status is the command's.

    Unlike ``end_with`` it does not matter which thread of the caller starts it, and grandchildren end with it.
    """
    # -I: neither this folder, whose types.py is not the standard library's, nor PYTHONPATH is looked into.
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def _keep(parent: int, command: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    keeper = os.getpid()
    running = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: end_with(keeper))
    try:
        while os.getppid() == parent and running.poll() is None:
            time.sleep(1 / LOOKS_PER_SECOND)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(running.pid, signal.SIGKILL)
    return running.wait()


if __name__ == "__main__":
    sys.exit(_keep(int(sys.argv[1]), sys.argv[2:]))
