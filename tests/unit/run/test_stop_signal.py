"""Signals ask a run to stop, and a second one ends it; a process that makes no progress ends, and says where it was."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nemo_edo.run.stop_signal import ONE_REQUEST_S, StopSignal

STUCK = """
import ctypes, signal, sys, time
from nemo_edo.run.stop_signal import ONE_REQUEST_S, StopSignal
signal.signal(signal.SIGINT, lambda *_: None)  # otherwise the first may come before the lock
with StopSignal():
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time for ever, and no handler of Python's runs"""


def test_a_process_that_is_forked_for_a_checkpoint_survives_the_signal_and_says_nothing(capfd):
    with StopSignal() as stop:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not stop._received
    assert "stopping" not in capfd.readouterr().err


@pytest.mark.timeout(100)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_second_request_ends_a_run_at_once_wherever_it_waits_but_not_one_that_comes_twice_together(sent):
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert stuck.stdout.readline() == "ready\n"
    stuck.send_signal(sent)
    stuck.send_signal(sent)
    time.sleep(ONE_REQUEST_S + 0.2)
    assert stuck.poll() is None
    stuck.send_signal(sent)
    assert stuck.wait() == 128 + sent
    assert "ended at once" in stuck.stderr.read()


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
    environment = {**os.environ, "NEMO_EDO_CONTROL": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)


def test_a_process_that_hangs_ends_with_its_stacks_written(tmp_path):
    done = run(tmp_path, 0.5, "hangs()")
    assert done.returncode == os.EX_TEMPFAIL
    assert "no progress for 0.5 s" in done.stderr
    assert "in hangs" in (tmp_path / "stacks_rank_0.txt").read_text()
    assert (tmp_path / "outcome").read_text() == "stalled\n"


@pytest.mark.parametrize("rest", ["watch.beat(); watch.close(); time.sleep(4)", "beats()"])
def test_a_process_that_makes_progress_or_has_closed_its_watch_is_left_alone(tmp_path, rest: str):
    # Longer than the limit; a busy machine may pause for less than that.
    done = run(tmp_path, 3.0, f"{rest}\nwatch.close()\nprint('the end')")
    assert done.returncode == 0 and done.stdout == "the end\n"
    assert list(tmp_path.iterdir()) == []
