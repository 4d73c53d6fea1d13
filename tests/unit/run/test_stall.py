"""A process that makes no progress ends, and says where it was."""

import os
import subprocess
import sys

import pytest

BODY = """
import time
from pathlib import Path
from nemo_edo.run import stop_signal
stop_signal.GRACE_S = 0.3
watch = stop_signal.StallWatch({limit_s}, Path({folder!r}))
def beats():
    for _ in range(10):
        watch.beat()
        time.sleep(0.4)
def hangs():
    watch.beat()
    time.sleep(60)
{rest}
"""


def run(tmp_path, limit_s: float, rest: str) -> subprocess.CompletedProcess[str]:
    code = BODY.format(folder=str(tmp_path), limit_s=limit_s, rest=rest)
    environment = {**os.environ, "NEMO_EDO_CONTROL": str(tmp_path), "RANK": "3"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)


def test_a_process_that_hangs_ends_with_its_stacks_written(tmp_path):
    done = run(tmp_path, 0.5, "hangs()")
    assert done.returncode == os.EX_TEMPFAIL
    assert "no progress for 0.5 s" in done.stderr
    assert "in hangs" in (tmp_path / "stacks_rank_3.txt").read_text()
    assert (tmp_path / "outcome").read_text() == "stalled\n"


@pytest.mark.parametrize("rest", ["watch.beat(); watch.close(); time.sleep(4)", "beats()"])
def test_a_process_that_makes_progress_or_has_closed_its_watch_is_left_alone(tmp_path, rest: str):
    # Longer than the limit; a busy machine may pause for less than that.
    done = run(tmp_path, 3.0, f"{rest}\nwatch.close()\nprint('the end')")
    assert done.returncode == 0 and done.stdout == "the end\n"
    assert list(tmp_path.iterdir()) == []
