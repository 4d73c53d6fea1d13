"""What answers over HTTP mean: a value, a fault that another attempt may mend, or an error that none will."""

from __future__ import annotations

import json
from typing import Any

import httpx

from nemo_edo.errors import UserError

WORTH_ANOTHER_ATTEMPT = (408, 425, 429)
"""Statuses below 500 that speak of the moment and not of the request."""
SHOWN_CHARACTERS = 500
"""Of an answer's body, in messages."""


class ServerError(UserError):
    """A server cannot be used, or has refused a request for good; says which server, what was asked and why."""


class Fault(Exception):
    """No usable answer to one request, for a reason that may pass: what came instead."""


def require_success(response: httpx.Response, server: str) -> None:
    """As ``require_status``."""
    if not response.is_success:
        request = response.request
        require_status(response.status_code, request.method, request.url.path, response.content, server)


def json_of(response: httpx.Response) -> Any:
    """As ``parsed``."""
    return parsed(response.content, response.request.url.path)


def require_status(status: int, method: str, path: str, body: bytes, server: str) -> None:
    """Raises Fault for a status that another attempt may mend, and ServerError for one that it cannot; nothing for one
    of success."""
    if 200 <= status < 300:
        return
    said = f"{path}: status {status}: {beginning(body)}"
    if status >= 500 or status in WORTH_ANOTHER_ATTEMPT:
        raise Fault(said)
    raise ServerError(f"{server}: {method} {said}")


def parsed(body: bytes, path: str) -> Any:
    """The value of a body of JSON; None for an empty one. Raises Fault for anything else."""
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError as error:  # of json, or of an encoding
        raise Fault(f"{path}: no JSON: {beginning(body)}") from error


def beginning(body: bytes) -> str:
    """What a body says first, on one line."""
    line = " ".join(body.decode(errors="replace").split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def described(error: BaseException) -> str:
    """An error of the network in words; some have no message of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
