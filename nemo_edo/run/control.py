"""What a job and the run in it tell each other, by files in a folder that both see.

Files and not signals or exit codes: torchrun keeps a worker's code to itself and gives it 30 s after a signal, which
is less than a large checkpoint takes.
"""

import os
from pathlib import Path

VARIABLE = "NEMO_EDO_CONTROL"
"""The environment variable that has the folder's path."""
STOP, OUTCOME = "stop", "outcome"
FINISHED, STOPPED, STALLED = "finished", "stopped", "stalled"


def control_folder() -> Path | None:
    """The folder of the job that this process belongs to."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def stop_is_asked() -> bool:
    """Whether the job has asked its run to save and end."""
    folder = control_folder()
    return folder is not None and (folder / STOP).exists()


def outcome_of(status: int) -> str:
    """The text by which a job learns that its run has ended with an exit status."""
    return {0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}")


def status_of(outcome: str) -> int:
    """The exit status of ``outcome_of``'s text; 1 of any other."""
    return next((status for status in range(256) if outcome_of(status) == outcome.strip()), 1)


def tell_outcome(outcome: str) -> None:
    """Tells the job how its run came out, where there is a job."""
    folder = control_folder()
    if folder is not None:
        (folder / OUTCOME).write_text(outcome + "\n", encoding="utf-8")
