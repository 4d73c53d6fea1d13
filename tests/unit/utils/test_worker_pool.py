"""Tasks that hang, exhaust the memory or kill their worker cost their limits and nothing else."""

import os
import signal
import time
from threading import Timer

import psutil
import pytest

from nemo_edo.errors import UserError
from nemo_edo.rewards.verifier import MathVerifier
from nemo_edo.utils.worker_pool import CRASHED, OUT_OF_MEMORY, TIMED_OUT, Limits, TaskFailure, WorkerPool

TASKS = """
import os, signal, time
from pathlib import Path

def double(number): return 2 * number
def spin(): sum(range(10**12))
def nap(): time.sleep(600)
def exhaust(): bytearray(2**32)
def fail(): raise RecursionError
def die(): os.kill(os.getpid(), signal.SIGKILL)
def compare(once, always):
    if always or not Path(once).exists():
        Path(once).touch()
        die()
    return True, "form"
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def make(limits: Limits | None) -> WorkerPool:
        pools.append(WorkerPool(limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(("task", "outcome"), [
    ("spin", TIMED_OUT), ("exhaust", OUT_OF_MEMORY), ("fail", CRASHED),
    ("die", TaskFailure("ended its process", -signal.SIGKILL))])
def test_a_task_above_a_limit_costs_itself_and_the_pool_goes_on(pool_of, task: str, outcome: TaskFailure):
    pool = pool_of(Limits(seconds=0.5, memory_mb=1024, workers=1))
    assert pool.run(f"tasks:{task}", [()]) == [outcome]
    assert pool.run("tasks:double", [(1,), (2,)]) == [2, 4]


def test_tasks_that_hang_share_a_budget_and_take_nothing_from_the_others(pool_of):
    pool = pool_of(Limits(seconds=1, memory_mb=1024, workers=2, budget_s=2))
    begun = os.times()
    assert pool.run("tasks:spin", [()] * 8) == [TIMED_OUT] * 8
    assert pool._left_s <= 0
    assert pool.run("tasks:spin", [()]) == [TIMED_OUT]  # another part of the collection: only the first try
    assert pool.run("tasks:double", [(3,)]) == [6]
    pool.close()
    spent = os.times().children_user - begun.children_user
    assert spent < 8 * 1
    pool.begin(1)
    assert pool._left_s == 1


def test_a_worker_that_waits_for_its_turn_on_a_busy_machine_does_not_time_out(pool_of):
    pool = pool_of(Limits(seconds=0.5, memory_mb=1024, workers=1))
    pool.run("tasks:double", [(1,)])
    [worker] = psutil.Process(pool._server.pid).children()
    worker.suspend()
    Timer(1.5, worker.resume).start()
    begun = time.monotonic()
    assert pool.run("tasks:double", [(1,)]) == [2]
    assert time.monotonic() - begun > 1.4


def test_server_and_workers_end_with_the_pool_even_during_a_task(pool_of):
    pool = pool_of(None)
    pool.run("tasks:double", [(1,)])
    server = psutil.Process(pool._server.pid)
    processes = [server, *server.children()]
    pool._connection.send(("tasks:nap", [()], 600.0, 600.0))
    pool.close()
    assert [process.is_running() for process in processes] == [False, False]


def test_a_killed_server_is_told_and_replaced(pool_of):
    pool = pool_of(Limits(seconds=5, memory_mb=1024, workers=1))
    pool.run("tasks:double", [(1,)])
    pool._server.kill()
    with pytest.raises(UserError, match="rerun the command to resume"):
        pool.run("tasks:double", [(1,)])
    assert pool.run("tasks:double", [(1,)]) == [2]


def test_an_answer_whose_worker_died_is_verified_once_more(pool_of, tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_edo.rewards.verifier._EQUIVALENCE", "tasks")
    verifier = MathVerifier(Limits(seconds=60, memory_mb=1024, workers=1))
    verifier._pool = pool_of(verifier._pool.limits)
    with pytest.warns(UserWarning, match="crashed: 1"):
        once, always = verifier.verify([(str(tmp_path / "once"), ""), (str(tmp_path / "always"), "always")])
    assert once.correct and not always.correct
