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

import xxhash

from nemo_edo.errors import UserError

WAIT_S = 60.0
"""How long to wait for other processes that are writing."""
_TABLE = """CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, verdict INTEGER NOT NULL, reply TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, checksum TEXT NOT NULL) WITHOUT ROWID"""


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


def _checksum(key: str, verdict: int, reply: str) -> str:
    """What binds a verdict to its request: a flipped bit makes no other verdict."""
    return xxhash.xxh3_128_hexdigest(f"{key} {verdict} {reply}".encode(errors="surrogatepass"))


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

    def get(self, key: str) -> bool | None:
        """The verdict; None where there is none yet, or not with its checksum."""
        asked = "SELECT verdict, reply, checksum FROM verdicts WHERE key = ?"
        with self._usable():
            row = self._file.execute(asked, (key,)).fetchone()
        return None if row is None or row[2] != _checksum(key, *row[:2]) else bool(row[0])

    def put(self, key: str, reply: Reply) -> None:
        """reply: has a verdict. Keeps the verdict of another process that was faster."""
        verdict = int(reply.verdict)
        row = (
            key,
            verdict,
            reply.text,
            reply.prompt_tokens,
            reply.completion_tokens,
            _checksum(key, verdict, reply.text),
        )
        # What ``get`` does not take for a verdict gives way.
        how = "INSERT OR IGNORE" if self.get(key) is not None else "INSERT OR REPLACE"
        with self._usable():
            self._file.execute(f"{how} INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", row)

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
