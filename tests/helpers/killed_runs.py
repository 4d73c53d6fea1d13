"""Runs ``nemo-edo`` commands, each in a process of its own that is killed on the way, and begun again, to its end.

    python killed_runs.py IN.json OUT.json

IN holds a list of {"arguments": [...], "ends": [END, ...]}. A command is run once for each END, until it comes to its
own end, and once more where none is left. END is one of

- [FUNCTION, n] or [FUNCTION, n, SIGNAL]: the process sends itself the signal (default: SIGKILL) as it calls FUNCTION
  ("module:Class.name") for the n-th time;
- a whole number n: SIGKILL at its n-th call of any function of the package;
- a number of seconds, such as 12.5: SIGKILL after them.

OUT will hold, for each command, a list of {"status": -9 after SIGKILL, "said": ...}.

The processes are forked from one that has imported everything: a start costs nothing, and the kill is a real one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import nemo_edo
import nemo_edo.runner  # noqa: F401
from nemo_edo.cli import main

PACKAGE = str(Path(nemo_edo.__file__).parent)


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


def die_at_call(number: int) -> None:
    calls, doomed = 0, os.getpid()

    def profile(frame, event, _):
        nonlocal calls
        # Not in a process that writes a checkpoint: Megatron's waits for ever for one of its own that was killed.
        if event == "call" and os.getpid() == doomed and frame.f_code.co_filename.startswith(PACKAGE):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def kill_after(seconds: float) -> None:
    doomed = os.getpid()
    if not os.fork():
        time.sleep(seconds)
        if os.getppid() == doomed:
            os.kill(doomed, signal.SIGKILL)
        os._exit(0)


def run(arguments: list[str], end: list | float | None, said: Path) -> None:
    """In the forked process, which it ends."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 1
    try:
        if isinstance(end, list):
            die_in(end[0], end[1], signal.Signals[end[2] if len(end) > 2 else "SIGKILL"])
        elif isinstance(end, int):
            die_at_call(end)
        elif end is not None:
            kill_after(end)
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def attempt(arguments: list[str], end: list | float | None) -> dict:
    said = Path(tempfile.mkdtemp()) / "said"
    child = os.fork()
    if not child:
        run(arguments, end, said)
    _, waited = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(waited), "said": said.read_text(errors="replace")}


def attempts(command: dict) -> list[dict]:
    done = []
    for end in [*command["ends"], None]:
        done.append(attempt(command["arguments"], end))
        if done[-1]["status"] not in (-signal.SIGKILL, os.EX_TEMPFAIL):
            break
    return done


if __name__ == "__main__":
    commands = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([attempts(command) for command in commands]))
