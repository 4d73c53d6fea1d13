"""Runs the checks on every rank, prints a line for each, and writes them into a file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_edo.doctor.machine import ABOUT, installed, python_version
from nemo_edo.selftest import tiny_model
from nemo_edo.selftest.check_list import CHECKS, Check
from nemo_edo.selftest.isolated import CheckError, forks_use_gpus
from nemo_edo.selftest.outcome import FAIL, IMPOSSIBLE, PASS, Outcome, worst
from nemo_edo.selftest.this_machine import Machine, machine
from nemo_edo.utils.files import replacing

WIDTH = 42
BEFORE_CHECKS = -1
"""In place of a check's number."""
IMPORTS_LIMIT_S = 120.0


def selftest(folder: Path, groups: Sequence[str] = (), checks: Sequence[Check] = CHECKS) -> bool:
    """Whether no check has failed on any rank. Every rank of a torchrun calls this; the first one prints and writes
    ``folder/selftest.json``. groups: those of ``Check.group`` to run; none: all."""
    chosen = [check for check in checks if not groups or check.group in groups]
    scratch = Path(tempfile.mkdtemp(prefix="nemo_edo_selftest_"))
    here = machine(folder.absolute(), scratch)
    begin = time.monotonic()
    here = prepare(here, chosen)
    if here.rank == 0:
        print(f"nemo-edo selftest: {len(chosen)} checks, {here.world} processes, GPUs: {len(here.gpus) or 'none'}")
    own = [_run(here, number, check) for number, check in enumerate(chosen)]
    outcomes = _of_all_ranks(here, own)
    good = here.rank > 0 or _finish(here, chosen, outcomes, time.monotonic() - begin)
    if all(outcome.status != FAIL for outcome in own):  # otherwise the messages name logs in it
        shutil.rmtree(scratch)
    return good


def prepare(here: Machine, chosen: Sequence[Check]) -> Machine:
    """The machine with what the checks need, once for all of them: models, and imports for processes that are forked,
    each of which would otherwise take longer to start than to compute."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if all(check.group == "machine" for check in chosen):  # they need no model
        return here
    if here.gpus:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise is_available() spoils a fork
        here = replace(here, isolation=replace(here.isolation, fork=_forks_use_gpus(here)))
    if here.isolation.fork:
        import nemo_edo.models  # noqa: F401
    tiny_model.write_model(here.llama)
    tiny_model.write_model(here.mixture, mixture=True)
    return here


def _forks_use_gpus(here: Machine) -> bool:
    """Tried in another process first: an import may crash."""
    try:
        return here.isolation.run(BEFORE_CHECKS, forks_use_gpus, world=False, limit_s=IMPORTS_LIMIT_S)
    except CheckError:
        return False


def _run(here: Machine, number: int, check: Check) -> Outcome:
    outcome = check.run(here, number)
    if here.rank == 0:
        print(_line(check, outcome), flush=True)
    return outcome


def _line(check: Check, outcome: Outcome) -> str:
    remedy = f"\n{'':14}do: {outcome.remedy}" if outcome.remedy else ""
    detail = outcome.detail.replace("\n", f"\n{'':14}")  # the end of a log
    return f"{outcome.status:13} {f'{check.group}: {check.name}':{WIDTH}} {detail}{remedy}"


def _of_all_ranks(here: Machine, own: list[Outcome]) -> list[Outcome]:
    """Of each check the worst outcome."""
    of_ranks = here.isolation.ranks.gathered([outcome.record() for outcome in own])
    return [worst([Outcome(**record) for record in of_check]) for of_check in zip(*of_ranks, strict=True)]


def _finish(here: Machine, chosen: Sequence[Check], outcomes: Sequence[Outcome], seconds: float) -> bool:
    for check, outcome in zip(chosen, outcomes, strict=True):
        if outcome.of_rank:  # its line told of rank 0 alone
            print(_line(check, outcome))
    counts = Counter(outcome.status for outcome in outcomes)
    said = ", ".join(f"{counts[status]} {status}" for status in (PASS, FAIL, IMPOSSIBLE))
    report = {
        "seconds": seconds,
        "processes": here.world,
        "gpus": [gpu.name for gpu in here.gpus],
        "versions": {"python": python_version(), **{name: installed(name) for name in ABOUT}},
        "checks": [
            {"group": check.group, "name": check.name, **outcome.record()}
            for check, outcome in zip(chosen, outcomes, strict=True)
        ],
    }
    try:
        here.folder.mkdir(parents=True, exist_ok=True)
        with replacing(here.folder / "selftest.json") as file:
            file.write(json.dumps(report, indent=2).encode())
        written = f"; {here.folder / 'selftest.json'}"
    except OSError as error:  # the check of the folder has said what to do
        written = f"; no selftest.json: {error.strerror}"
    print(f"{said} in {seconds:.0f} s{written}")
    return not counts[FAIL]
