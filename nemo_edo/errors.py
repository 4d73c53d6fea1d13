class UserError(ValueError):
    """An error of the user's input, shown without a traceback; everything else is a bug and keeps its traceback."""


class RunStopped(Exception):
    """The run was asked to stop (SIGTERM), has saved where it stands, and can be gone on with."""
