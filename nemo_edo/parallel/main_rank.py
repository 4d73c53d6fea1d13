"""What one rank decides for all of them, and what they share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nemo_edo.errors import UserError

T = TypeVar("T")


def on_main(work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0, the only one that calls it, on every rank. A UserError, or what the system says
    of a file, is raised on all of them: none waits for a rank that has failed."""
    outcome: list[tuple[T | None, UserError | OSError | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
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


def gathered(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """The ranks' values; every rank of the group (None: of all) calls it."""
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank calls it."""
    if torch.distributed.get_world_size() == 1:
        return flag
    device = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    flags = torch.full((1,), int(flag), device=device)  # a tensor from a list would be a copy, and wait for the GPU
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags.item())
