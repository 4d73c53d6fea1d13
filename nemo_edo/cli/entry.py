"""Runs one command; turns errors into a message and an exit status."""

from __future__ import annotations

import os
import signal
import sys

from nemo_edo.checks.installed import what_trainer_lacks
from nemo_edo.cli.arguments import parse
from nemo_edo.cli.commands import RUN, say
from nemo_edo.errors import CANNOT_WRITE, RunStopped, StoppedByGuard, UserError
from nemo_edo.run.control import FINISHED, STOPPED, tell_outcome
from nemo_edo.utils.processes import end_with_torchrun

ANOTHER_IS_GONE = ("gloo/transport", "ncclRemoteError", "remote server shutdown")
"""What gloo, NCCL and torch's store say in a process whose neighbour has ended, or does not answer."""
STOPPED_BY_GUARD = 3
"""The exit status."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0 on success; 1 where a member of a sweep failed; 2 for an error in
    the user's input; 3 where a guard stopped the run; 75 (EX_TEMPFAIL) where a run was asked to stop and can resume;
    130 where Ctrl-C ended another command."""
    end_with_torchrun()  # before the imports, which take a while
    status = _run(argv)
    tell_outcome({0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}"))
    return status


def _run(argv: list[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    args, rest = parse(given)
    args.given, args.own_process = given, argv is None
    try:
        return RUN[args.command](args, rest) or 0
    except UserError as error:
        print(f"nemo-edo: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        lacking = what_trainer_lacks()
        if lacking is None:  # not for want of an installation
            raise
        print(f"nemo-edo: error: {args.command} needs {error.name}, and {lacking}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror}; make room or give access, and rerun the command"
        print(f"nemo-edo: error: {message}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not any(words in str(error) for words in ANOTHER_IS_GONE):
            raise
        said, rank = str(error).partition("\n")[0], os.environ.get("RANK", "0")
        gone = f"this process (rank {rank}) has lost another one, whose message tells why; rerun the command to resume"
        print(f"nemo-edo: error: {gone} ({said})", file=sys.stderr)
        return 1
    except StoppedByGuard as stopped:
        hint = "its state is saved; the same command resumes it, if necessary with other guards.* settings"
        say(f"nemo-edo: stopped by a guard: {stopped}\nnemo-edo: {hint}", file=sys.stderr)
        return STOPPED_BY_GUARD
    except RunStopped as stopped:
        say(f"nemo-edo: {stopped}; the same command resumes the run", file=sys.stderr)
        return os.EX_TEMPFAIL
    except KeyboardInterrupt:  # where no run is in progress: while it starts, or in a command that has no state
        say("nemo-edo: interrupted; what was finished is saved, and the same command resumes", file=sys.stderr)
        return 128 + signal.SIGINT
