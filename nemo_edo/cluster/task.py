"""What each task of a job runs: the trainer's processes on its node, one of them, or a node's servers.

    python -m nemo_edo.cluster.task MEMBER.json torchrun 8 [SERVER_NODES SECONDS]
    python -m nemo_edo.cluster.task MEMBER.json serve

MEMBER.json has the arguments of ``nemo-edo``. The job's script sets ``MASTER_ADDR`` and ``MASTER_PORT``, Slurm the
task's rank. With server nodes, the trainer waits up to SECONDS for their servers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_edo.cluster.serve import overrides_of_servers, serve
from nemo_edo.errors import UserError
from nemo_edo.utils.ranks import variables_of_torchrun


def torchrun(arguments: list[str], processes: int, environment: Mapping[str, str]) -> list[str]:
    """The command of a node's only task."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={environment['SLURM_STEP_NUM_NODES']}",
        f"--node-rank={environment['SLURM_NODEID']}",
        f"--nproc-per-node={processes}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={environment['MASTER_PORT']}",
        f"--log-dir={environment['NEMO_EDO_CONTROL']}/ranks_of_task_{environment['SLURM_PROCID']}",
        *("--redirects=3", "--tee=3"),
        *("-m", "nemo_edo", *arguments),
    ]


def _served(config_name: str, config_dir: str) -> int:
    try:
        serve(config_name, config_dir)
    except UserError as error:
        print(f"nemo-edo: error: {error}", file=sys.stderr)
    return 1


def main() -> None:
    member, kind, *processes = sys.argv[1:]
    arguments = json.loads(Path(member).read_text(encoding="utf-8"))
    if kind == "serve":
        place = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        sys.exit(_served(place["--config-name"], place["--config-path"]))
    if len(processes) > 1:
        arguments += overrides_of_servers(int(processes[1]), float(processes[2]))
    if kind == "torchrun":
        command, added = torchrun(arguments, int(processes[0]), os.environ), {}
    else:
        command, added = [sys.executable, "-m", "nemo_edo", *arguments], variables_of_torchrun(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execve(command[0], command, {**os.environ, **added})


if __name__ == "__main__":
    main()
