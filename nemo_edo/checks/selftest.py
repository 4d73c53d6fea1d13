"""``nemo-edo selftest``: runs the checks on every rank, prints a line for each, and writes them into a file
(docs/first_day.md)."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from nemo_edo.checks.check_list import CHECKS
from nemo_edo.checks.findings import FAIL, IMPOSSIBLE, PASS, Check, Finding, RunsIn, failed, impossible, together
from nemo_edo.checks.installed import versions
from nemo_edo.checks.machine import CheckError, Machine, forks_use_gpus
from nemo_edo.utils.files import replacing

WIDTH = 42
WAIT_S = 600.0
"""How long a rank waits for others, whose checks may hang until their limits."""
IMPORTS_LIMIT_S = 120.0


def selftest(folder: Path, groups: Sequence[str] = (), checks: Sequence[Check] = CHECKS) -> bool:
    """Returns whether no check has failed on any rank. Every rank of a torchrun calls this; the first one prints and
    writes ``folder/selftest.json``. groups: the values of ``Check.group`` to run; none: all."""
    chosen = [check for check in checks if RunsIn.SELFTEST in check.runs_in and (not groups or check.group in groups)]
    machine, begin = Machine.of_ranks(folder.absolute(), limit_s=WAIT_S), time.monotonic()
    machine = prepared(machine, chosen)
    if machine.rank == 0:
        count = f"{len(chosen)} checks, {machine.world} processes"
        print(f"nemo-edo selftest: {count}, GPUs: {len(machine.gpus) or 'none'}")
    findings: list[tuple[Check, Finding]] = []
    for check in chosen:
        finding = carried_out(check, machine)
        findings.append((check, finding))
        if machine.rank == 0:
            print(line(check, finding), flush=True)
        if None in machine.facts:  # the first check has named the ranks; without them the others would wait
            break
    machine.leave()
    good = all(finding.status != FAIL for _, finding in findings)
    if good:  # otherwise the messages name logs in it
        shutil.rmtree(machine.scratch)
    if machine.rank > 0:  # whose failure torchrun would answer by ending the first rank, which has yet to write
        return True
    seconds = time.monotonic() - begin
    report = {
        "seconds": seconds,
        "processes": machine.world,
        "gpus": [gpu.name for gpu in machine.gpus],
        "versions": versions(),
        "checks": [{"group": check.group, "name": check.name, **asdict(finding)} for check, finding in findings],
    }
    path = machine.folder / "selftest.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(report, indent=2).encode())
        written = f"; {path}"
    except OSError as error:  # the check of the folder has said what to do
        written = f"; no selftest.json: {error.strerror}"
    counts = Counter(finding.status for _, finding in findings)
    print(f"{', '.join(f'{counts[s]} {s}' for s in (PASS, FAIL, IMPOSSIBLE))} in {seconds:.0f} s{written}")
    return good


def prepared(machine: Machine, chosen: Sequence[Check]) -> Machine:
    """The machine with what the checks need, once for all of them: models, and imports for processes that are forked,
    each of which would otherwise take longer to start than to compute."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if all(check.group == "machine" for check in chosen):  # they need no model
        return machine
    if machine.gpus:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise is_available() spoils a fork
        try:  # in another process first: an import may crash
            forks = replace(machine, check="forks").run(forks_use_gpus, limit_s=IMPORTS_LIMIT_S)
        except CheckError:
            forks = False
        machine = replace(machine, forks=forks)
    if machine.forks:
        import nemo_edo.models  # noqa: F401
    from nemo_edo.checks import numbers

    for name in (numbers.LLAMA, numbers.MIXTURE):
        numbers.write_model(machine.scratch / name)
    return machine


def carried_out(check: Check, machine: Machine) -> Finding:
    """The finding of all ranks, each of which calls this."""
    machine = replace(machine, check=check.name)
    if why := check.needs(machine):
        finding = impossible(why)
    elif machine.rank > 0 and not check.every_rank:
        finding = impossible("it runs on rank 0")
    else:
        try:
            finding = check.run(machine)
        except CheckError as error:
            finding = failed(str(error))
    if finding.status == FAIL and not finding.remedy:
        finding = replace(finding, remedy=check.remedy)
    answers = [answer and Finding(**answer) for answer in machine.exchange("finding", asdict(finding))]
    if not check.every_rank:
        return answers[0]
    # The first check names the ranks that have not reported.
    reported = {rank: answer for rank, answer in enumerate(answers) if machine.facts[rank] is not None}
    return together(reported, machine.named)


def line(check: Check, finding: Finding) -> str:
    """A row of the table; further lines are indented."""
    remedy = f"\ndo: {finding.remedy}" if finding.remedy else ""
    text = (finding.detail + remedy).replace("\n", f"\n{'':14}")
    return f"{finding.status:13} {f'{check.group}: {check.name}':{WIDTH}} {text}"
