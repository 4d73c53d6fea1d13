import errno

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says of a full disk, a used up quota, and a place that may not be written to."""


RESTORE = "restore it from a copy"
"""The remedy for a damaged file that cannot be made again."""


class UserError(ValueError):
    """An error of the user's input, shown without a traceback; everything else is a bug and keeps its traceback."""


class DamagedFile(UserError):
    """A file that was written whole is missing or has other content."""

    def __init__(self, fault: str) -> None:
        """fault: the file, and what is wrong with it."""
        super().__init__(f"{fault}; {RESTORE}")


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those that were written."""


class StoppedByGuard(Exception):
    """A guard has ended the run: what it measured, where, its threshold and what to do. Everything is saved."""


class RunStopped(Exception):
    """The run was asked to stop (SIGTERM); its state is saved, and the same command resumes it."""


class WorkerFailed(RuntimeError):
    """A rank's worker has failed, ended, or answered another call than the last."""


class Partly(UserError):
    """An engine or a scorer gave up on some of what it was asked for."""

    def __init__(self, message: str, responses: list) -> None:
        """responses: those that were ready by then, in the order of their requests."""
        super().__init__(message, responses)
        self.responses = responses

    def __str__(self) -> str:
        return self.args[0]


class PartlyGenerated(Partly):
    """An engine gave up; ``responses`` are rollouts."""


class PartlyScored(Partly):
    """A judge or a user's function gave up; ``responses`` are scored rollouts."""
