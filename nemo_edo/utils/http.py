"""Meaning of HTTP answers: a value, a fault after which a retry may succeed, or a final error. A server is not trusted:
what it sends is read up to a limit, and shown without the key that it was sent."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.utils.api_key import ApiKey

RETRIABLE = (408, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
SHOWN_CHARACTERS = 500
"""Characters of an answer's body that messages show."""
UNENCODED = {"Accept-Encoding": "identity"}
"""Headers of every request: a few compressed bytes can stand for gigabytes, so encoded answers are not read."""
LEAST_LIMIT = 2**20
BYTES_PER_TOKEN = 2**10
"""Of an answer; a token with its text and log-probability takes about 100."""


class ServerError(UserError):
    """A server cannot be used, or has refused a request for good; names server, request and reason."""


class Fault(Exception):
    """A request got no usable answer, but a retry may succeed; says what came instead."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """retry_after_s: seconds for which the server asks for no requests."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


def body_limit(tokens: int = 0) -> int:
    """Bytes that an answer about so many tokens may have."""
    return LEAST_LIMIT + BYTES_PER_TOKEN * tokens


class IncomingAnswer:
    """An answer whose body arrives in pieces."""

    def __init__(
        self, request: str, status: int, headers: Mapping[str, str], key: ApiKey, limit: int = LEAST_LIMIT
    ) -> None:
        """request: its path, for messages. headers: the answer's, by names in any case. key: what the request sent.
        limit: bytes of the body."""
        self.status = status
        self._request = request
        self._headers = headers
        self._key = key
        self._limit = limit
        self._body = bytearray()

    def add(self, piece: bytes) -> None:
        """Raises Fault where the body is encoded or becomes larger than the limit: the rest need not be read."""
        encoding = self._headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            shown = self._key.hide(encoding)[:SHOWN_CHARACTERS]
            raise self._fault(f"status {self.status}: a body in {shown!r}, expected one without encoding")
        self._body += piece
        if len(self._body) > self._limit:
            raise self._fault(f"status {self.status}: a body of more than {self._limit:,} bytes")

    def value(self, server: str) -> Any:
        """The value of the JSON body; None for an empty body. Raises Fault where a retry may succeed, otherwise
        ServerError, which names the server."""
        self.require_success(server)
        if not self._body:
            return None
        try:
            return json.loads(self._key.hide(bytes(self._body)), object_pairs_hook=_object)
        except RecursionError:
            raise self._fault(f"JSON that is nested too deeply: {self.beginning()}") from None
        except _RepeatedKeyError:
            raise self._fault(f"JSON of an object that has a key twice: {self.beginning()}") from None
        except ValueError:  # of json, or of an encoding
            raise self._fault(f"not JSON: {self.beginning()}") from None

    def require_success(self, server: str) -> None:
        """Returns for a status of success; raises as ``value``."""
        if 200 <= self.status < 300:
            return
        said = f"status {self.status}: {self.beginning()}"
        if self.status >= 500 or self.status in RETRIABLE:
            raise self._fault(said)
        raise ServerError(f"{server}: {self._request}: {said}")

    def beginning(self) -> str:
        """The beginning of the body, on one line, without the key."""
        line = " ".join(self._key.hide(bytes(self._body)).decode(errors="replace").split())
        return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."

    def _fault(self, said: str) -> Fault:
        return Fault(f"{self._request}: {said}", _retry_after(self._headers.get("retry-after", "")))


class _RepeatedKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises _RepeatedKeyError: of a key's two values, JSON readers silently take the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _RepeatedKeyError
    return made


def described(error: BaseException) -> str:
    """A network error as text; some have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(value: str) -> float:
    """Seconds, from a number or a date (RFC 9110, 10.2.3); 0 where the header is absent or neither."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
