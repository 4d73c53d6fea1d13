"""Verdicts on disk, by request: no run sends a request twice, even after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError

WAIT_S = 60.0
"""How long to wait for other processes that are writing."""
_TABLE = """CREATE TABLE IF NOT EXISTS replies (
    key TEXT NOT NULL, verdict INTEGER, reply TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL)"""
_INDEX = "CREATE UNIQUE INDEX IF NOT EXISTS verdicts ON replies (key) WHERE verdict IS NOT NULL"
"""Earlier versions also stored replies without a verdict, any number for a request."""


@dataclass(frozen=True)
class Reply:
    """A judge's answer."""

    verdict: bool | None
    """Whether the response is correct; None: the reply has no verdict."""
    text: str
    prompt_tokens: int
    completion_tokens: int


def request_key(body: Mapping[str, Any]) -> str:
    """Equal for equal requests: model, prompt with question and answers, and sampling."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """Replies with a verdict in a SQLite file, each on disk before ``put`` returns; several processes may use it
    concurrently. All methods raise UserError for a damaged file."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where the file cannot be created, or is not a cache."""
        self.path = path
        with self._usable():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit. Threads use it one at a time.
            self._file = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            self._file.execute(_TABLE)
            self._file.execute(_INDEX)

    def get(self, key: str) -> bool | None:
        """The verdict; None where there is none yet."""
        asked = "SELECT verdict FROM replies WHERE key = ? AND verdict IS NOT NULL"
        with self._usable():
            row = self._file.execute(asked, (key,)).fetchone()
        return None if row is None else bool(row[0])

    def put(self, key: str, reply: Reply) -> None:
        """reply: has a verdict. Keeps the verdict of another process that was faster."""
        row = key, int(reply.verdict), reply.text, reply.prompt_tokens, reply.completion_tokens
        with self._usable():
            self._file.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?)", row)

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"rewards.judge.cache: {self.path} cannot be used ({error}); remove it, or set another file"
            ) from error
