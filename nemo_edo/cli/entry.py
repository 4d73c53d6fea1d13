"""Runs one command; turns errors into a message and an exit status."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys

from nemo_edo.checks.installed import what_trainer_lacks
from nemo_edo.cli.arguments import parse
from nemo_edo.cli.commands import RUN, say
from nemo_edo.errors import CANNOT_WRITE, RunStopped, StoppedByGuard, UserError, WorkerFailed
from nemo_edo.run.control import FINISHED, STOPPED, tell_outcome
from nemo_edo.utils.processes import end_with_torchrun
from nemo_edo.utils.ranks import check_ranks
from nemo_edo.utils.wording import printable

WITH_WORKERS = ("train", "collect", "evaluate", "search", "export", "replay")
"""Commands that rank 0 runs, and the other ranks of torchrun work for."""
OPEN_FILES = 1024
"""How many files a run may open at least."""
STOPPED_BY_GUARD = 3
"""The exit status."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0 on success; 1 where a member of a sweep failed; 2 for an error in
    the user's input; 3 where a guard stopped the run; 75 (EX_TEMPFAIL) where a run was asked to stop and can resume;
    130 where Ctrl-C ended another command."""
    end_with_torchrun()  # before the imports, which take a while
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    args.given, args.own_process = given, argv is None
    has_workers = args.command in WITH_WORKERS and os.environ.get("WORLD_SIZE", "1") != "1"
    is_worker = has_workers and os.environ.get("RANK", "0") != "0"
    if not is_worker and args.command in WITH_WORKERS and (few := _few_files()):
        _tell(f"nemo-edo: error: {few}")
        return 2
    status = _run(args, is_worker=is_worker)
    if is_worker:
        return status
    if has_workers:
        dismiss(status)
    tell_outcome({0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}"))
    return status


def _few_files() -> str | None:
    """The error where this process may open too few files, after its limit was raised as far as the system allows."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        if limit != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, OPEN_FILES), most))
        return None
    return f"ulimit -n is {most}: a run opens more files than that; raise it to {OPEN_FILES} or more"


def serve() -> int:
    """Works for the first rank's command until it ends."""
    # Where that command ends before the ranks have met, torch would print a stack of C++ behind its message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from nemo_edo.run.tracking import quiet_libraries

    quiet_libraries()
    from nemo_edo.worker.serve import serve as serve_calls

    return serve_calls()


def dismiss(status: int) -> None:
    """Lets the other ranks end. Where the command failed before they had work, torchrun ends them."""
    if status and "nemo_edo.worker.dispatch" not in sys.modules:
        return
    from nemo_edo.worker.dispatch import dismiss as dismiss_workers

    dismiss_workers(met_only=status != 0)


def _run(args: argparse.Namespace, *, is_worker: bool) -> int:
    try:
        check_ranks()
        return serve() if is_worker else RUN[args.command](args) or 0
    except UserError as error:
        _tell(f"nemo-edo: error: {error}")
        return 2
    except ModuleNotFoundError as error:
        lacking = what_trainer_lacks()
        if lacking is None:  # not for want of an installation
            raise
        _tell(f"nemo-edo: error: {args.command} needs {error.name}, and {lacking}")
        return 2
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror}; make room or give access, and rerun the command"
        _tell(f"nemo-edo: error: {message}")
        return 2
    except WorkerFailed as failed:
        _tell(f"nemo-edo: error: {failed}\nnemo-edo: rerun the command to resume")
        return 1
    except StoppedByGuard as stopped:
        hint = "its state is saved; the same command resumes it, if necessary with other guards.* settings"
        _tell(f"nemo-edo: stopped by a guard: {stopped}\nnemo-edo: {hint}", main_only=True)
        return STOPPED_BY_GUARD
    except RunStopped as stopped:
        say(f"nemo-edo: {stopped}; the same command resumes the run", file=sys.stderr)
        return os.EX_TEMPFAIL
    except KeyboardInterrupt:  # where no run is in progress: while it starts, or in a command that has no state
        say("nemo-edo: interrupted; what was finished is saved, and the same command resumes", file=sys.stderr)
        return 128 + signal.SIGINT


def _tell(message: str, *, main_only: bool = False) -> None:
    """Prints an error: what it quotes of files and servers reaches the terminal escaped."""
    if not main_only or os.environ.get("RANK", "0") == "0":
        print(printable(message), file=sys.stderr)
