"""A pseudo-terminal of 80 columns for a command of ``helpers.cli.Cli``: what is on it, and keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading

COLUMNS, ROWS = 80, 24


class Terminal:
    """Use as a context manager. keys: text -> what is typed as soon as the text appears, in this order."""

    def __init__(self, keys: dict[str, bytes] | None = None) -> None:
        self._keys = list((keys or {}).items())
        self._written = b""

    def __enter__(self) -> Terminal:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_) -> None:
        os.close(self._slave)
        self._reader.join(10)
        os.close(self._master)

    @property
    def attached(self) -> tuple[str, str]:
        """A call for ``before`` of the command."""
        return "helpers.terminal:attach", os.ttyname(self._slave)

    @property
    def drawn(self) -> list[str]:
        """Each line in the order in which it was drawn, those that others replaced included, without colours."""
        text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", self._written.decode(errors="replace"))
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 4096)
            except OSError:  # nobody has the other side open
                return
            if not part:
                return
            self._written += part
            if self._keys and self._keys[0][0].encode() in self._written:
                os.write(self._master, self._keys.pop(0)[1])


def attach(path: str) -> None:
    """Makes the terminal, and its input and output, those of this process: it leads a session that has none yet."""
    terminal = os.open(path, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(terminal, standard)
    os.environ.pop("COLUMNS", None)
    os.environ["TERM"] = "xterm"
