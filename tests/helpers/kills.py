"""Ends of ``nemo-edo`` commands in the middle, and the same command again until it comes to its own end.

An END is one of

- [FUNCTION, n] or [FUNCTION, n, SIGNAL]: the process sends itself the signal (default: SIGKILL) as it calls FUNCTION
  ("module:Class.name", a public one) for the n-th time;
- [GLOB, n] or [GLOB, n, SIGNAL]: as it puts the n-th file or folder of a matching path in place, or removes one.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from fnmatch import fnmatch

from helpers.cli import Call, Cli

LIMIT_S = 1500.0


def attempts(cli: Cli, arguments: Sequence[str], ends: Sequence, before: Sequence[Call] = ()) -> list[dict]:
    """Runs a command once for each END, until it comes to its own end, and once more where none is left: what each
    attempt's status was (-9 after SIGKILL), and what it said."""
    found = []
    for end in [*ends, None]:
        calls = [*before, *([("helpers.kills:prepare", end)] if end is not None else [])]
        done = cli(*arguments, before=calls, limit_s=LIMIT_S)
        found.append({"status": done.returncode, "said": done.stdout + done.stderr})
        if done.returncode not in (-signal.SIGKILL, os.EX_TEMPFAIL):
            break
    return found


# --- in the command's process -------------------------------------------------------------------------------------


def prepare(end: list) -> None:
    die = die_in if ":" in end[0] else die_at_path
    die(end[0], end[1], signal.Signals[end[2] if len(end) > 2 else "SIGKILL"])


def die_in(function: str, number: int, sent: int) -> None:
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), sent)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def die_at_path(pattern: str, number: int, sent: int) -> None:
    changes, doomed = 0, os.getpid()

    def hook(event: str, args: tuple) -> None:
        nonlocal changes
        if event not in ("os.rename", "os.remove", "shutil.rmtree") or os.getpid() != doomed:
            return
        path = args[1] if event == "os.rename" else args[0]
        if fnmatch(os.fspath(path), pattern):
            changes += 1
            if changes == number:
                os.kill(doomed, sent)

    sys.addaudithook(hook)
