"""What one rank decides for all of them, and what they share."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from nemo_edo.errors import UserError

T = TypeVar("T")
MEET_EVERY_S = 60.0
"""NCCL's ranks wait ten minutes for each other."""


def is_main() -> bool:
    return torch.distributed.get_rank() == 0


def on_main(work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0, the only one that calls it, on every rank. A UserError, or what the system says
    of a file, is raised on all of them: none waits for a rank that has failed."""
    outcome: list[tuple[T | None, UserError | OSError | None]] = [(None, None)]
    if is_main():
        try:
            outcome = [(work(), None)]
        except UserError as error:
            outcome = [(None, error)]
        except OSError as error:  # libraries' subclasses need not survive the way to the other ranks
            outcome = [(None, OSError(error.errno, error.strerror or str(error), error.filename))]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(outcome)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def on_main_for_long(work: Callable[[], T]) -> T:
    """Like ``on_main``, for work that may take longer than a process group waits for its ranks: a thread does it, and
    all ranks meet once a minute. In a thread other than the main one, such as that in which rank 0 generates ahead, the
    caller is alone, and does the work itself."""
    if torch.distributed.get_world_size() == 1 or threading.current_thread() is not threading.main_thread():
        return work()
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work) if is_main() else None
        while not on_main(lambda: bool(concurrent.futures.wait([future], MEET_EVERY_S).done)):
            pass
        return on_main(lambda: future.result())


def in_shares(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, in their order and on every rank, of which each calls its share. All ranks have the same
    tasks, and none fails."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    own = [task() for task in tasks[rank::ranks]]
    if ranks == 1:
        return own
    found: list[list[T]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(found, own)
    return [found[place % ranks][place // ranks] for place in range(len(tasks))]


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank calls it."""
    if torch.distributed.get_world_size() == 1:
        return flag
    device = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    flags = torch.tensor([int(flag)], device=device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags.item())
