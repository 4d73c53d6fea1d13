"""What answers over HTTP mean: a value, a fault that another attempt may mend, or an error that none will."""

from __future__ import annotations

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
    """Raises Fault for a status that another attempt may mend, and ServerError for one that it cannot."""
    if response.is_success:
        return
    said = f"{response.request.url.path}: status {response.status_code}: {beginning(response.text)}"
    if response.status_code >= 500 or response.status_code in WORTH_ANOTHER_ATTEMPT:
        raise Fault(said)
    raise ServerError(f"{server}: {response.request.method} {said}")


def json_of(response: httpx.Response) -> Any:
    """The parsed body; None for an empty one. Raises Fault for anything else than JSON."""
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError as error:  # of json, or of an encoding
        raise Fault(f"{response.request.url.path}: no JSON: {beginning(response.text)}") from error


def beginning(text: str) -> str:
    """On one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def described(error: BaseException) -> str:
    """An error of the network in words; some of httpx's have no message of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
