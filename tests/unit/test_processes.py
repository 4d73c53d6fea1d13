"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

STARTER = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "from nemo_edo.processes import end_with_torchrun; import time; "
                            "end_with_torchrun(); print('ready', flush=True); time.sleep(120)"])
time.sleep(120)"""


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_what_torchrun_started_ends_with_it_and_other_processes_do_not(by_torchrun: bool):
    environment = {**os.environ, **({"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {})}
    if not by_torchrun:
        environment.pop("TORCHELASTIC_RUN_ID", None)
    starter = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdout=subprocess.PIPE, text=True)
    assert starter.stdout.readline() == "ready\n"
    (started,) = (int(pid) for pid in open(f"/proc/{starter.pid}/task/{starter.pid}/children").read().split())
    starter.kill()
    starter.wait()
    if by_torchrun:
        assert starter.stdout.read() == ""  # to the end of the file: nobody is left to write into it
    else:
        time.sleep(0.5)
        os.kill(started, signal.SIGKILL)  # an error where it has ended


def test_a_parent_that_has_ended_before_it_was_asked_for_counts_too():
    code = "from nemo_edo.processes import end_with; import os; end_with(os.getppid() + 1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
