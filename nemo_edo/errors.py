class UserError(ValueError):
    """An error of the user's input, shown without a traceback; everything else is a bug and keeps its traceback."""


class StoppedByGuard(Exception):
    """A guard has ended the run: what it measured, where, its threshold and what to do. Everything is saved."""


class RunStopped(Exception):
    """The run was asked to stop (SIGTERM), has saved where it stands, and can be gone on with."""


class PartlyDrawn(UserError):
    """An engine has given up on some of its requests."""

    def __init__(self, message: str, drawn: list) -> None:
        """drawn: the responses that it had by then, in the order of their requests."""
        super().__init__(message, drawn)
        self.drawn = drawn

    def __str__(self) -> str:
        return self.args[0]
