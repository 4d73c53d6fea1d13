class UserError(ValueError):
    """An error of the user's input, shown without a traceback; everything else is a bug and keeps its traceback."""


class StoppedByGuard(Exception):
    """A guard has ended the run: what it measured, where, its threshold and what to do. Everything is saved."""


class RunStopped(Exception):
    """The run was asked to stop (SIGTERM), has saved where it stands, and can be gone on with."""
