"""The name by which one node reaches another."""

from __future__ import annotations

import socket

from nemo_edo.errors import UserError


def first_that_resolves(*names: str) -> str:
    """The first of a node's names that resolves here: Slurm's, which DNS may not know, and the machine's.

    Raises UserError where none does.
    """
    for name in filter(None, names):
        try:
            socket.gethostbyname(name)
        except OSError:
            continue
        return name
    raise UserError(f"none of a node's names resolves here: {', '.join(names)}")
