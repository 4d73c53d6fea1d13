"""Processes that end with their parent, so that none continues to write or train unattended."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # for prctl(2): descendants whose parent has ended become children of this process
_PR_SET_PDEATHSIG = 1  # for prctl(2): the signal to this process when the thread that started it ends


def end_with(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent, process ``parent``, has ended; immediately if it already
    has. On Linux only: elsewhere it does nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def start_vital_thread(name: str, target: Callable[..., None], *args: Any) -> None:
    """Starts a thread whose failure ends the process, which would wait for ever for what it no longer does."""

    def run() -> None:
        try:
            target(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, daemon=True, name=name).start()


def end_with_torchrun() -> None:
    """Ends a process with the torchrun that started it: otherwise it would keep training, and keep the run locked."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def process_began() -> float:
    """What the monotonic clock showed when this process was started."""
    import psutil  # absent where only the functions are installed

    return time.monotonic() - (time.time() - psutil.Process().create_time())


POLLS_PER_SECOND = 5  # how often a keeper checks that its parent is alive
KILLED_WITHIN_S = 60.0


def kept(command: Sequence[str]) -> list[str]:
    """The command line of a keeper: a process that runs ``command``, and kills it with all its descendants once the
    calling process has ended, the keeper gets SIGTERM, or the command has ended. Its exit status is the command's.
    Unlike ``end_with``, any thread of the caller may start it, and grandchildren end too, in whatever session. They are
    in the keeper's session otherwise, so that ``end_family`` finds them where the keeper itself was killed."""
    # -I: import neither from this folder, whose modules could shadow the standard library's, nor from PYTHONPATH.
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def _keep(parent: int, command: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    keeper = os.getpid()
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    running = subprocess.Popen(command, preexec_fn=lambda: end_with(keeper))
    try:
        while os.getppid() == parent and running.poll() is None:
            time.sleep(1 / POLLS_PER_SECOND)
    finally:
        end_family(keeper)
    try:
        return running.wait(1.0)
    except subprocess.TimeoutExpired:
        return 1


def end_family(root: int) -> None:
    """Kills all that descends from a keeper, process ``root``, or is in its session. Again and again: a process may
    have been forked meanwhile. Not for ever: one that waits for a driver or a dead file system does not end."""
    until = time.monotonic() + KILLED_WITHIN_S
    while (pids := _family(root)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _family(root: int) -> set[int]:
    above = {}  # the parent and the session of every living process
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in "ZX":
                above[int(path.parent.name)] = {int(parent), int(session)}
    family = {root}
    while more := {pid for pid, ancestors in above.items() if ancestors & family} - family:
        family |= more
    return family - {root}


def package_file(python: str, package: str, file: str) -> str | None:
    """The path of a package's file in an interpreter's environment; None where there is none."""
    probe = (
        "import importlib.util as util, sys; name = sys.argv[1]; "
        "spec = util.find_spec(name.partition('.')[0]) and util.find_spec(name); "
        "print(*(spec.submodule_search_locations if spec else ()), sep='\\n')"
    )
    # -I: neither this folder's modules nor PYTHONPATH's
    done = subprocess.run([python, "-I", "-c", probe, package], capture_output=True, text=True)
    found = (Path(folder) / file for folder in done.stdout.splitlines())
    return next((str(path) for path in found if path.is_file()), None)


if __name__ == "__main__":
    sys.exit(_keep(int(sys.argv[1]), sys.argv[2:]))
