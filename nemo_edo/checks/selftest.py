"""``nemo-edo selftest`` runs the checks on every rank, prints a line for each, and writes them into a file
(docs/first_day.md). A Slurm job tries its nodes before its training by some of them, as a step of the job:

    srun ... python -m nemo_edo.checks.selftest --folder SHARED --limit 60 --nodes n1,n2

which exits with status 0 if all nodes are healthy, otherwise with 4. The first process prints a line that begins with
"nemo-edo:" for each fault.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from nemo_edo.checks import numbers
from nemo_edo.checks.check_list import CHECKS
from nemo_edo.checks.installed import versions
from nemo_edo.checks.machine import (
    FAIL,
    IMPOSSIBLE,
    NODES,
    PASS,
    SELFTEST,
    Check,
    CheckError,
    Finding,
    Machine,
    failed,
    forks_use_gpus,
    impossible,
    together,
)
from nemo_edo.utils.files import write_text
from nemo_edo.utils.ranks import variables_of_torchrun

WIDTH = 42
WAIT_S = 600.0  # how long a rank waits for others, whose checks may hang until their limits
IMPORTS_LIMIT_S = 120.0
UNHEALTHY = 4
START_LIMIT_S = 300.0  # for the last process of a job to start: a node may have to load the container's image


def selftest(folder: Path, groups: Sequence[str] = ()) -> bool:
    """Returns whether no check has failed on any rank. Every rank of a torchrun calls this; the first one prints and
    writes ``folder/selftest.json``. groups: the values of ``Check.group`` to run; none: all."""
    chosen = [check for check in CHECKS if SELFTEST in check.runs_in and (not groups or check.group in groups)]
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
        write_text(path, json.dumps(report, indent=2))
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
    for name in numbers.MODELS:
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


def check_nodes() -> int:
    from torch.distributed import DistError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--start-limit", type=float, default=START_LIMIT_S, help="seconds for the last rank to start")
    parser.add_argument("--nodes", default="", help="the nodes' names in the order of their ranks")
    args = parser.parse_args()
    os.environ.update(variables_of_torchrun(os.environ))
    nodes, begin = tuple(filter(None, args.nodes.split(","))), time.monotonic()
    faults: list[str] = []
    try:
        # Half of it for a rank that stops answering: the check ends with that. Containers start at different times.
        machine = Machine.of_ranks(args.folder, limit_s=args.limit / 2, nodes=nodes, start_limit_s=args.start_limit)
        for check in [check for check in CHECKS if NODES in check.runs_in]:
            finding = carried_out(check, machine)
            if finding.status == FAIL:  # the checks after it would wait for the ranks at fault
                faults = finding.detail.splitlines()
                break
            if machine.rank == 0 and finding.status == PASS:
                print(f"nemo-edo: {check.name}: {finding.detail}")
        machine.leave()
    except DistError as error:
        rank, place = os.environ["RANK"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = "cannot listen on" if rank == "0" else "cannot reach the first process at"
        print(f"nemo-edo: rank {rank} {what} {place}: {str(error).splitlines()[0][:200]}")
        return UNHEALTHY
    if machine.rank == 0:
        verdict = f"{len(faults)} faults" if faults else "all healthy"
        faults.append(f"{machine.world} processes checked in {time.monotonic() - begin:.1f} s: {verdict}")
        print(*(f"nemo-edo: {line}" for line in faults), sep="\n", flush=True)
    if finding.status == FAIL:
        return UNHEALTHY
    shutil.rmtree(machine.scratch)
    return 0


if __name__ == "__main__":
    sys.exit(check_nodes())
