"""A file that one process at a time owns, also where the file system has no locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import IO
from weakref import WeakSet

import psutil

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""What flock says on file systems without locks: NFS without a lock daemon, FUSE, Lustre without -o flock."""
LOCAL = ("localflock", "nolock", "local_lock=all", "local_lock=flock")
"""Options of Lustre's and NFS' mounts with which another machine sees no lock."""
BEAT_S = 10.0  # where locks do not work, an owner touches its file this often...
ALIVE_S = 60.0  # ...and counts as alive for so long after, seen from another machine
SETTLE_S = 2.0  # without locks, two processes that began together see each other's name within it


class InUse(Exception):
    """Another process owns the file; says which."""


_owned: WeakSet[OwnedFile] = WeakSet()


def _close_in_child() -> None:
    """A lock would otherwise last as long as any forked process."""
    for owned in _owned:
        owned._file.close()


os.register_at_fork(after_in_child=_close_in_child)


class OwnedFile:
    """The file belongs to this process until ``close`` or its end. flock decides where it works: the system releases
    it, however the process ends. Elsewhere the file's text does: it names the owner, whose life a process on the same
    machine sees, and others by the file's time. Raises InUse."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+", encoding="utf-8")
        self._closed = threading.Event()
        try:
            without_locks = _lock(self._file, path)
            if without_locks and (owner := _living_owner(self._file, path)):
                raise InUse(owner)
            name = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            own = f"{name}\n{_machine()} {os.getpid()} {_began(os.getpid())}\n"
            self._file.truncate(0)
            self._file.write(own)
            self._file.flush()
            if without_locks:
                time.sleep(SETTLE_S)
                if (now := path.read_text(encoding="utf-8")) != own:
                    raise InUse(now.partition("\n")[0] or "another process")
        except BaseException:
            self._file.close()
            raise
        _owned.add(self)
        if without_locks:
            _warn(path.parent, without_locks)
            threading.Thread(target=self._beat, daemon=True, name="owner").start()

    def close(self) -> None:
        self._closed.set()
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or for now out of reach
                os.utime(self._file.fileno())


def _lock(file: IO[str], path: Path) -> str:
    """Why locks do not work there; empty where the file is locked now. Raises InUse where another process has it."""
    try:
        if not _flock(file):
            file.seek(0)
            raise InUse(file.readline().strip() or "another process")
        with path.open("a", encoding="utf-8") as again:  # refused to the owner, too, unless locks do nothing
            return "a locked file can be locked again" if _flock(again) else _local_option(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return f"errno {error.errno}, {error.strerror}"


def _local_option(path: Path) -> str:
    """The option of the path's mount by which locks hold on each machine alone; empty: there is none."""
    options = {mount.mountpoint: mount.opts.split(",") for mount in psutil.disk_partitions(all=True)}
    own = next((options[str(one)] for one in path.resolve().parents if str(one) in options), [])
    return next((f"it is mounted with {option}" for option in own if option in LOCAL), "")


@cache
def _warn(folder: Path, why: str) -> None:
    print(
        f"nemo-edo: warning: {folder}: locks do not work on this file system ({why}); the text and time of files keep "
        f"other processes away instead (docs/reliability.md)",
        file=sys.stderr,
    )


def _flock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living_owner(file: IO[str], path: Path) -> str:
    """The process that the file names, if it may be alive; otherwise empty."""
    file.seek(0)
    name, _, rest = file.read().partition("\n")
    if not rest:  # nobody's, or from a version without this line, whose owners had a lock
        return ""
    machine, pid, began = rest.split()
    if machine == _machine():
        return name if _began(int(pid)) == began else ""
    with tempfile.TemporaryFile(dir=path.parent) as now:  # by the file server's clock
        age = os.fstat(now.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
    return f"{name} (seen {max(age, 0):.0f} s ago; it counts as ended after {ALIVE_S:g} s)" if age < ALIVE_S else ""


def _machine() -> str:
    """This boot of this machine, and the container whose process numbers these are."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str:
    """When the process began, which tells it from a later one of its number; empty: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
