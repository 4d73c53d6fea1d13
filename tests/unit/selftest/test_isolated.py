"""A check's process may fail in any way: the selftest goes on, and its line says what happened."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nemo_edo.cli.arguments import GROUPS
from nemo_edo.doctor.machine import Gpu
from nemo_edo.errors import UserError
from nemo_edo.selftest import CHECKS, runner
from nemo_edo.selftest.devices import alike
from nemo_edo.selftest.isolated import CheckError, Isolation, Ranks, forks_use_gpus
from nemo_edo.selftest.numbers import OF, SameNumbers, compared
from nemo_edo.selftest.outcome import failed, impossible, passed, worst
from nemo_edo.selftest.this_machine import Machine
from nemo_edo.selftest.tiny_model import Measured, Setting


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(1000)


def refuse():
    raise UserError("no such folder")


def break_down():
    raise ZeroDivisionError("of ranks")


@pytest.fixture
def isolation(tmp_path: Path) -> Isolation:
    return Isolation(Ranks(), tmp_path, fork=True)


@pytest.mark.parametrize(
    ("call", "limit_s", "said"),
    [
        (crash, 60, "ended with status -11"),
        (hang, 0.5, "did not end within 0 s"),
        (refuse, 60, "no such folder"),
        (break_down, 60, "ZeroDivisionError: of ranks"),
    ],
)
def test_a_failure_is_one_line_with_the_place_of_the_output(isolation, tmp_path, call, limit_s, said):
    with pytest.raises(CheckError, match=said) as failure:
        isolation.run(3, call, world=False, limit_s=limit_s)
    assert str(tmp_path / "check_3_rank_0.log") in str(failure.value)


@pytest.mark.parametrize(("probe", "forks"), [(True, True), (False, False), (CheckError("a crash"), False)])
def test_checks_are_forked_where_a_fork_can_use_the_gpu_and_started_anew_otherwise(
    tmp_path, isolation, monkeypatch, probe, forks
):
    def run(self, number, call, *_, **how):
        assert call is forks_use_gpus and not how["world"] and not self.fork
        if isinstance(probe, CheckError):
            raise probe
        return probe

    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_DEVICE_MAX_CONNECTIONS"):  # as they were, afterwards
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "nemo_edo.models", ModuleType("nemo_edo.models") if forks else None)
    monkeypatch.setattr(Isolation, "run", run)
    monkeypatch.setattr(runner.tiny_model, "write_model", lambda *_, **__: None)
    found = Machine(tmp_path, tmp_path, replace(isolation, fork=False), [Gpu("H100", 80, "9.0")], [{}], rank=0)
    assert runner.prepare(found, CHECKS).isolation.fork == forks
    assert runner.prepare(found, [check for check in CHECKS if check.group == "machine"]) is found


def test_a_check_alone_does_not_see_the_ranks_of_torchrun(isolation, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert isolation.run(0, os.environ.get, "RANK", world=False, limit_s=60) is None
    assert os.environ["RANK"] == "1"


def test_of_several_ranks_the_first_failure_counts():
    assert worst([passed("a"), failed("b", "do"), failed("c", "do")]).detail == "rank 1: b"
    assert worst([failed("a", "do"), passed("b")]).detail == "a"
    assert worst([passed("a"), passed("")]) == passed("a")
    assert worst([impossible("a"), impossible("a")]).status == "not possible"


@pytest.mark.parametrize("field", ["values", "loss", "grad_norm", "after"])
@pytest.mark.parametrize("off", [10.0, float("nan")])
def test_a_number_that_is_off_or_none_fails(field, off):
    right = {"values": np.zeros((2, 1, 3)), "loss": 0.0, "grad_norm": 1.0, "after": np.zeros((1, 3))}
    expected = Measured(**right)
    assert compared(expected, expected, OF["bf16"], "do").status == "pass"
    found = compared(Measured(**{**right, field: right[field] + off}), expected, OF["bf16"], "do")
    assert found.status == "fail" and field.replace("_", " ") in found.detail.partition("expected")[2]


def test_ranks_that_differ_are_named_and_all_decide_by_the_least(tmp_path: Path, isolation):
    def facts(host: str, gpus: int, te: str | None) -> dict:
        versions = {"torch": "2.10", "transformer-engine": te}
        return {"host": host, "gpus": [["H100", 80, "9.0"]] * gpus, "versions": versions, "no_server": None}

    of_ranks = [facts("n1", 4, "2.10"), facts("n1", 4, "2.10"), facts("n2", 3, None)]
    found = Machine(tmp_path, tmp_path, isolation, [], of_ranks, rank=1)
    assert found.odd_ones() == ["rank 2 (n2) has GPUs 3 H100, most have 4 H100",
                                "rank 2 (n2) has transformer-engine not installed, most have 2.10"]  # fmt: skip
    assert not found.has_te and found.world == 3
    outcome = alike(found, 0)
    assert outcome.status == "fail" and "rank 2 (n2)" in outcome.detail and "(and 1 more)" in outcome.detail
    same = Machine(tmp_path, tmp_path, isolation, [], of_ranks[:2], rank=0)
    assert same.odd_ones() == [] and same.has_te and alike(same, 0).status == "pass"


def test_rank_0_meets_the_others_also_where_it_cannot_compute_its_reference(tmp_path: Path):
    """They would wait for it until the store's limit."""
    met = []

    class Failing:
        def run(self, number, call, *arguments, world, limit_s):
            if not world:
                raise CheckError("out of memory")
            met.append(number)

    machine = Machine(tmp_path, tmp_path, Failing(), [], [{}, {}], rank=0)
    outcome = SameNumbers(lambda machine: Setting(), "do", world=True)(machine, 5)
    assert (outcome.status, outcome.detail) == ("fail", "out of memory") and met == [5]


def test_the_command_offers_the_groups_that_there_are():
    assert dict.fromkeys(check.group for check in CHECKS) == dict.fromkeys(GROUPS)
