"""In a run's own process: its file operations are counted, and it waits at one of them.

The same run has the same operations in the same order, so that a fault can be repeated where it happened.
"""

import os
import resource
import signal
import sys
import warnings

EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree")


def limit_files(number: int) -> None:
    """As ``ulimit -n`` does."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def watch(folder: str, number: int, counted: str) -> None:
    """Counts operations on files of ``folder``, a byte each to the file ``counted``. Before operation
    ``number`` it stops this process (SIGSTOP) until it is told to continue; 0: at none."""
    warnings.simplefilter("default", UserWarning)  # ignored in the fork server; a run says in one what it has lost
    count, own, file = 0, os.getpid(), os.open(counted, os.O_WRONLY | os.O_APPEND)

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event not in EVENTS or os.getpid() != own or not str(args[0]).startswith(folder):
            return
        count += 1
        os.write(file, b".")
        if count == number:
            os.kill(own, signal.SIGSTOP)

    sys.addaudithook(hook)
