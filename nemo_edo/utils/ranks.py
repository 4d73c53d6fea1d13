"""The variables by which torchrun, or a task of Slurm, tells a process its rank (a shell may have left-over ones), and
the name by which one node reaches another."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from nemo_edo.errors import RunStopped, UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
SAID_AFTER_S = 10.0  # A process that has waited for others for so long says so


def check_ranks() -> None:
    """Raises UserError for variables that nothing gives to a process that it starts."""
    given = {name: os.environ[name] for name in NUMBERS if os.environ.get(name)}
    numbers = {name: int(text) for name, text in given.items() if text.isascii() and text.isdecimal()}
    rank, world, local = (numbers.get(name, default) for name, default in zip(NUMBERS, (0, 1, 0), strict=False))
    if len(numbers) < len(given):
        wrong = "a number is expected of each"
    elif not (rank < world and local < numbers.get("LOCAL_WORLD_SIZE", world) <= world):
        wrong = f"a process of WORLD_SIZE {world} has a RANK and a LOCAL_RANK below that"
    elif world > 1 and (missing := {"RANK", "MASTER_ADDR", "MASTER_PORT"} - {*filter(os.environ.get, os.environ)}):
        wrong = f"WORLD_SIZE {world} needs {', '.join(sorted(missing))}, too"
    else:
        return
    raise UserError(f"the environment has {_shown()}: {wrong}; {_remedy()}")


def waiting(what: Callable[[], str], limit_s: float, is_asked_to_stop: Callable[[], bool]) -> Iterator[None]:
    """Yields before each try of what needs other ranks. Says once what is waited for. Raises UserError after the limit,
    and RunStopped where the process is asked to stop."""
    begun, has_said = time.monotonic(), False
    while (waited := time.monotonic() - begun) < limit_s:
        if is_asked_to_stop():
            raise RunStopped(f"asked to stop while it waited for {what()}")
        if waited > SAID_AFTER_S and not has_said:
            has_said = True
            print(f"nemo-edo: waiting for {what()}, {limit_s:g} s at most; {_remedy()}", file=sys.stderr, flush=True)
        yield
    raise UserError(f"{what()} did not come within {limit_s:g} s; the environment has {_shown()}; {_remedy()}")


def _shown() -> str:
    return " ".join(f"{name}={os.environ[name]}" for name in (*NUMBERS, "MASTER_ADDR") if name in os.environ)


def _remedy() -> str:
    return f"if this process was not started by torchrun or srun: unset {' '.join(NUMBERS)} MASTER_ADDR"


def variables_of_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for torch.distributed, of a task that is one process."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": environment["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0],
    }


def free_server(backlog: int) -> socket.socket:
    """Listens at a free port, by IPv6 too where the machine has it."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)


def first_that_resolves(*names: str) -> str:
    """The first of a node's names that resolves here: DNS may not know Slurm's. Raises UserError where none does."""
    for name in filter(None, names):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    raise UserError(f"none of a node's names resolves here: {', '.join(names)}")
