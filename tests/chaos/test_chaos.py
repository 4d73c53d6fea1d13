"""Random faults in random runs; the command line plays more (tests/chaos/__main__.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from .faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_faults_leave_the_numbers_alone_or_stop_the_run_with_a_message_that_names_the_file():
    command = [sys.executable, "-m", "tests.chaos", "--seed", "312", "--rounds", str(len(FAULTS))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert done.stdout.count(": the same end") >= len(FAULTS) // 2
    [played] = [line for line in done.stdout.splitlines() if line.startswith("faults: ")]
    assert all(f"{name} 1" in played for name in FAULTS)
