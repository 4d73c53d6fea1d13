"""Processes that end with the one that started them."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from nemo_edo.utils.processes import end_family, kept

STARTED = """
import nemo_edo.cli.commands as cli, time
cli.parse = lambda *_: print("ready", flush=True) or time.sleep(120)
cli.main()"""
STARTER = f"""
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", {STARTED!r}])
time.sleep(120)"""


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_command_that_torchrun_started_ends_with_it_before_any_import_and_others_do_not(monkeypatch, by_torchrun):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout.readline() == "ready\n"
    [started] = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait()
    if by_torchrun:
        assert starter.stdout.read() == ""  # to the end of the file: nobody is left to write into it
    else:
        time.sleep(0.5)
        started.kill()  # an error where it has ended


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
GROUP = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {DEAF!r}]); "
SESSION = GROUP.replace("])", "], start_new_session=True)")
KEEPS = f"""
import subprocess, sys, threading, time
from nemo_edo.utils.processes import kept
command = kept([sys.executable, "-c", {GROUP + "time.sleep(120)"!r}])
thread = threading.Thread(target=subprocess.Popen, args=(command,))
thread.start()
thread.join()
time.sleep(120)"""


def below(pid: int, number: int) -> list[psutil.Process]:
    """The processes below one, once there are so many."""
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(pid).children(recursive=True)) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def assert_gone(processes: list[psutil.Process]) -> None:
    psutil.wait_procs(processes, timeout=30)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_a_kept_command_and_what_it_started_end_with_the_process_that_wanted_it_not_with_its_thread():
    run = subprocess.Popen([sys.executable, "-c", KEEPS])
    processes = below(run.pid, 3)
    assert len(processes) == 3
    time.sleep(1.0)  # the thread that started them is long gone
    assert all(process.is_running() for process in processes)
    run.kill()
    run.wait()
    assert_gone(processes)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_keeper_takes_the_command_with_it_and_what_a_killed_one_leaves_is_in_its_session(sent: signal.Signals):
    keeper = subprocess.Popen(kept([sys.executable, "-c", GROUP + "time.sleep(120)"]))
    command, started = below(keeper.pid, 2)
    keeper.send_signal(sent)
    keeper.wait()
    assert_gone([command])
    if sent == signal.SIGKILL:
        end_family(keeper.pid)
    assert_gone([started])


@pytest.mark.parametrize("starts", [GROUP, SESSION])
def test_a_kept_command_that_ends_leaves_its_status_and_nothing_that_it_started(starts: str):
    keeper = subprocess.Popen(kept([sys.executable, "-c", starts + "time.sleep(2); raise SystemExit(7)"]))
    processes = below(keeper.pid, 2)
    assert keeper.wait() == 7
    assert_gone(processes)


def test_a_process_ends_where_a_thread_fails_that_it_would_wait_for():
    script = ("import threading\nfrom nemo_edo.utils.processes import start_vital_thread\n"
              "start_vital_thread('answers', [].pop)\nthreading.Event().wait(60)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "pop from empty list" in done.stderr
