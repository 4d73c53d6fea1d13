"""How checks end: a check's process may fail in any way, and the selftest goes on; what ranks find is one finding."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_edo.checks import machine_checks
from nemo_edo.checks.machine import FAIL, Check, CheckError, Machine, failed, passed, together
from nemo_edo.checks.numbers import BOUNDS, Measured, compared
from nemo_edo.errors import UserError


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse():
    raise UserError("no such folder")


def break_down():
    raise ZeroDivisionError("of ranks")


def facts(host: str = "n1", gpus: int = 0, te: str | None = "2.20") -> dict:
    return {"host": host, "gpus": [{"name": "H100", "bytes": 80, "capability": "9.0"}] * gpus, "driver_error": None,
            "versions": {"torch": "2.13", "transformer-engine": te}}


def machine_of(folder: Path, *of_ranks: dict | None, rank: int = 0) -> Machine:
    return Machine(list(of_ranks) or [facts()], folder, folder, rank, check="a, b")


@pytest.mark.parametrize(("call", "limit_s", "said"), [
    (crash, 60, "ended with status -11"), (signal.pause, 0.5, "did not end within 0 s"),
    (refuse, 60, "no such folder"), (break_down, 60, "ZeroDivisionError: of ranks")])
def test_a_failure_is_one_line_with_the_place_of_the_output(tmp_path, call, limit_s, said):
    with pytest.raises(CheckError, match=said) as failure:
        machine_of(tmp_path).run(call, limit_s=limit_s)
    assert str(tmp_path / "a__b_rank_0.log") in str(failure.value)


@pytest.mark.parametrize(("of_ranks", "detail"), [
    ([passed("a"), failed("b", "do"), failed("c")], "rank 1: b\nrank 2: c"),
    ([passed("a"), None], "rank 1: has stopped answering"),
    ([failed("a", "do"), failed("a", "do")], "a"), ([passed("a"), passed("")], "a")])
def test_of_several_ranks_the_failures_count_and_what_all_say_is_said_once(of_ranks, detail):
    assert together(dict(enumerate(of_ranks)), lambda rank: f"rank {rank}").detail == detail


@pytest.mark.parametrize("field", ["values", "loss", "grad_norm", "after"])
@pytest.mark.parametrize("off", [10.0, float("nan")])
def test_a_number_that_is_off_or_none_fails(field, off):
    right = {"values": np.zeros((2, 1, 3)), "loss": 0.0, "grad_norm": 1.0, "after": np.zeros((1, 3))}
    expected = Measured(**right)
    assert compared(expected, expected, BOUNDS["bf16"]).status == "pass"
    found = compared(Measured(**{**right, field: right[field] + off}), expected, BOUNDS["bf16"])
    assert found.status == "fail" and field.replace("_", " ") in found.detail.partition("expected")[2]


def test_ranks_that_differ_or_are_missing_are_named_and_all_decide_by_the_least(tmp_path: Path):
    found = machine_of(tmp_path, facts("n1", 4), facts("n1", 4), facts("n2", 3, None), None, rank=1)
    assert machine_checks.same_on_all_ranks(found).detail.splitlines() == [
        "rank 3 has not reported: it did not start, or cannot connect to the first node",
        "rank 2 (node n2) has GPUs 3 H100, most have 4 H100",
        "rank 2 (node n2) has transformer-engine absent, most have 2.20"]
    assert not found.has_te and len(found.gpus) == 3 and found.world == 4
    assert machine_checks.same_on_all_ranks(machine_of(tmp_path, facts("n1", 4), facts("n2", 4))).status == "pass"


class Store(dict):
    """A TCPStore in which rank 1 answers but rank 2 does not; counts the seconds that it was asked to wait."""

    waited = 0.0

    def wait(self, keys, limit):
        if keys[0] not in self:
            self.waited += limit.total_seconds()
            raise torch.distributed.DistStoreError(keys[0])

    set, get = dict.__setitem__, dict.__getitem__


def test_a_rank_that_does_not_answer_is_waited_for_once_and_an_answer_of_none_is_an_answer(tmp_path):
    store = Store({f"checks/a, b/{name}/1": json.dumps(value) for name, value in {"x": None, "y": 5, "z": 6}.items()})
    found = replace(machine_of(tmp_path, facts(), facts(), None), store=store, limit_s=30.0)
    assert [found.exchange(name, 4) for name in "xyz"] == [[4, None, None], [4, 5, None], [4, 6, None]]
    assert found.silent == {2} and 29 < store.waited < 30.5


def test_a_node_with_fewer_gpus_than_the_job_asked_for_fails_the_check(tmp_path: Path):
    found = machine_checks.gpus(replace(machine_of(tmp_path, facts("n1", 4), facts("n2", 8)), gpus_expected=8))
    assert found.status == FAIL and "shows 4 GPUs of cluster.gpus_per_node=8" in found.detail


def test_servers_need_gpus_that_the_trainers_ranks_on_their_node_leave_over(tmp_path: Path):
    full, half = ([facts(host, gpus) for host in ("n1", "n2") for _ in range(2)] for gpus in (2, 4))
    one, none = machine_of(tmp_path, facts(gpus=4), facts(gpus=4)), machine_of(tmp_path, facts("n1"), facts("n2"))
    checks = Check("server", "here", passed, spare_gpus=1), Check("server", "there", passed, spare_gpus=1, nodes=2)
    needs = [tuple(check.lacking(machine) for check in checks)
             for machine in (machine_of(tmp_path, *full), machine_of(tmp_path, *half), one, none)]
    short, alone = "it needs 1 more GPUs on a node than the trainer has", "it needs a second node"
    assert needs == [(short, short), (None, None), (None, alone), (None, None)]
