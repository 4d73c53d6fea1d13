"""The check of a Slurm job's nodes before its training, as a step of the job:

    srun ... python -m nemo_edo.checks.node_step --folder SHARED --limit 60 --nodes n1,n2

Exits with status 0 if all nodes are healthy, otherwise with 4. The first process prints a line that begins with
"nemo-edo:" for each fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistError

from nemo_edo.checks.check_list import CHECKS
from nemo_edo.checks.findings import FAIL, PASS, RunsIn
from nemo_edo.checks.machine import Machine
from nemo_edo.checks.selftest import carried_out
from nemo_edo.utils.ranks import variables_of_torchrun

UNHEALTHY = 4
START_LIMIT_S = 300.0
"""How long the first process to start waits for the last one: a node may have to load the container's image."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--start-limit", type=float, default=START_LIMIT_S, help="seconds for the last rank to start")
    parser.add_argument("--nodes", default="", help="the nodes' names in the order of their ranks")
    args = parser.parse_args(argv)
    os.environ.update(variables_of_torchrun(os.environ))
    nodes, begin = tuple(filter(None, args.nodes.split(","))), time.monotonic()
    faults: list[str] = []
    try:
        # Half of it for a rank that stops answering: the check ends with that. Containers start at different times.
        machine = Machine.of_ranks(args.folder, limit_s=args.limit / 2, nodes=nodes, start_limit_s=args.start_limit)
        for check in CHECKS:
            if RunsIn.NODES not in check.runs_in:
                continue
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
        for fault in faults:
            print(f"nemo-edo: {fault}")
        verdict = f"{len(faults)} faults" if faults else "all healthy"
        print(f"nemo-edo: {machine.world} processes checked in {time.monotonic() - begin:.1f} s: {verdict}")
    sys.stdout.flush()
    if faults:
        return UNHEALTHY
    shutil.rmtree(machine.scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
