"""A file that one process at a time owns."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""What flock says on file systems without locks: NFS without a lock daemon, FUSE, Lustre without -o flock."""


class InUse(Exception):
    """Another process owns the file; says which."""


class OwnedFile:
    """The file belongs to this process until ``close`` or its end: the system releases its lock, however the process
    ends. Where the file system has no locks, a warning says that nothing keeps other processes away. Raises InUse."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.readline().strip()
            self._file.close()
            raise InUse(owner or "another process") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                self._file.close()
                raise
            print(
                f"nemo-edo: warning: {path}: locks do not work on this file system ({error.strerror}): nothing keeps "
                "another process away (docs/reliability.md)",
                file=sys.stderr,
            )
        self._file.truncate(0)
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {began}\n")
        self._file.flush()
        os.register_at_fork(after_in_child=self._file.close)  # otherwise it would last as long as any forked process

    def close(self) -> None:
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()
