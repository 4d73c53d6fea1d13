"""Random faults in random runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.xfail(
    reason="known: an emptied responses file of a finished evaluation goes unnoticed; two messages on metrics.jsonl "
    "and config.yaml do not say what to do (seed 4, rounds 20, 26, 28)", strict=False,
)  # fmt: skip
def test_thirty_random_faults_leave_the_numbers_alone_or_stop_the_run_with_a_message_that_names_the_file():
    command = [sys.executable, "-W", "ignore", "-m", "tests.chaos", "--seed", "4", "--rounds", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert done.stdout.count(": the same end") >= 20
