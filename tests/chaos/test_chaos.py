"""Random faults in random runs; the command line plays more (tests/chaos/__main__.py)."""

import pytest

from .__main__ import main
from .faults import FAULTS


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_faults_leave_the_numbers_alone_or_stop_the_run_with_a_message_that_names_the_file(capsys):
    status, said = main(["--seed", "312", "--rounds", str(len(FAULTS))]), capsys.readouterr().out
    assert status == 0, said[-20_000:]
    assert said.count(": the same end") >= len(FAULTS) // 2
    [played] = [line for line in said.splitlines() if line.startswith("faults: ")]
    assert all(f"{name} 1" in played for name in FAULTS)
