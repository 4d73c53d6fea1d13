"""The tasks of a job: a node's trainer processes, one of them, or a node's servers; and the end of a sweep.

    python -m nemo_edo.cluster.task MEMBER.json torchrun 8 [NODE,NODE SECONDS]
    python -m nemo_edo.cluster.task MEMBER.json serve
    python -m nemo_edo.cluster.task report LAUNCH SWEEP

MEMBER.json has the arguments of ``nemo-edo``, MEMBER.yaml the config. The job's script sets ``MASTER_ADDR`` and
``MASTER_PORT``, Slurm the task's rank. Each node of servers starts ``generation.servers.replicas`` of them, and writes
their URLs to the attempt's folder once they are ready; the trainer gets the nodes' names, and waits up to SECONDS for
the URLs of all. The script makes their key, sets it in the environment of servers and trainers, and writes
``servers_ended`` once their step ends.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_edo.config.compose import compose_run
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.run.control import FINISHED, STOPPED, control_folder, stop_is_asked, tell_outcome
from nemo_edo.run_folder import RunFolder
from nemo_edo.utils.files import end_of_log, read_mapping, write_text
from nemo_edo.utils.ranks import first_that_resolves, variables_of_torchrun

KEY = "NEMO_EDO_SERVER_KEY"  # the environment variable with the servers' key
ERROR = "nemo-edo: error:"
POLL_EVERY_S = 0.5


def main() -> None:
    member, kind, *processes = sys.argv[1:]
    if member == "report":
        sys.exit(report(Path(kind), Path(processes[0])))
    if kind == "serve":
        try:
            serve(Path(member))
        except UserError as error:
            sys.exit(f"{ERROR} {error}")
    arguments = json.loads(Path(member).read_text(encoding="utf-8"))
    if arguments[0] == "train" and trained_before(Path(member)):
        tell_outcome(FINISHED)
        sys.exit()
    if len(processes) > 1:
        try:
            arguments += overrides_of_servers(processes[1].split(","), float(processes[2]))
        except RunStopped as stopped:
            tell_outcome(STOPPED)
            sys.exit(f"nemo-edo: {stopped}")
        except UserError as error:
            tell_outcome("failed: no servers")
            sys.exit(f"{ERROR} {error}")
    if kind == "torchrun":
        command, added = torchrun(arguments, int(processes[0]), os.environ), {}
    else:
        command, added = [sys.executable, "-m", "nemo_edo", *arguments], variables_of_torchrun(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execve(command[0], command, {**os.environ, **added})


def trained_before(member: Path) -> bool:
    """Whether an attempt has finished the run and ended before the script took note of it: to train would be to train
    again."""
    config = read_mapping(member.with_suffix(".yaml"))
    return RunFolder(Path(config["output_dir"]) / config["name"]).is_finished


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


def serve(member: Path) -> None:
    """Starts this node's servers and watches them. Raises UserError once one of them has ended."""
    import torch

    from nemo_edo.generation import servers
    from nemo_edo.run.build import Builder
    from nemo_edo.run.inputs import with_seq_length, write_builtin_files

    attempt, node = control_folder(), os.environ["SLURM_PROCID"]
    cfg = compose_run(member.stem, ["generation.servers.host=0.0.0.0"], member.parent)  # the trainer is on other nodes
    own = RunFolder(attempt / f"server_node_{node}")
    if cfg.model.path is None:  # the first refit sends the trainer's weights
        write_builtin_files(cfg, own)
    cfg = with_seq_length(cfg)
    gpus = torch.cuda.device_count()
    servers.check_servers(cfg.generation, gpus)
    replicas = Builder(cfg, own).replicas(cfg.generation, own.path, gpus, key=os.environ[KEY])
    servers.start(replicas, cfg.model.seq_length)
    address = first_that_resolves(os.environ.get("SLURMD_NODENAME", ""), socket.gethostname())
    urls = [f"http://{address}:{replica.url.rpartition(':')[2]}" for replica in replicas]
    write_text(attempt / f"servers_{node}.json", json.dumps(urls))
    while True:
        for replica in replicas:
            if replica.has_ended:
                raise UserError(f"{replica}: {replica.ending()}")
        time.sleep(POLL_EVERY_S)


def overrides_of_servers(nodes: list[str], limit_s: float) -> list[str]:
    """The trainer's overrides with the servers' URLs, once those of all ``nodes`` are ready. Raises UserError with the
    end of their logs after the limit, or once their step has ended, and RunStopped where the job is to end."""
    attempt, deadline = control_folder(), time.monotonic() + limit_s
    urls = {node: attempt / f"servers_{place}.json" for place, node in enumerate(nodes)}
    logs = {node: attempt / f"server_{place}.log" for place, node in enumerate(nodes)}
    while missing := [node for node, path in urls.items() if not path.is_file()]:
        have_ended = (attempt / "servers_ended").exists()
        if have_ended or time.monotonic() > deadline:
            why = "have ended" if have_ended else f"are not ready after {limit_s:g} s"
            # Where one has failed, Slurm has killed the others.
            texts = {node: logs[node].read_text(errors="replace") if logs[node].is_file() else "" for node in missing}
            failed = [node for node in missing if ERROR in texts[node]]
            ends = "".join(f":{texts[node].rpartition(ERROR)[2].rstrip()}" for node in failed)
            failed, ends = failed or missing, ends or "".join(end_of_log(logs[node]) for node in missing)
            raise UserError(f"the servers of {', '.join(failed)} {why}{ends}")
        if stop_is_asked():
            raise RunStopped(f"asked to stop while it waited for the servers of {', '.join(missing)}")
        time.sleep(POLL_EVERY_S)
    all_urls = [url for path in urls.values() for url in json.loads(path.read_text(encoding="utf-8"))]
    section = "generation.servers"
    return [f"{section}.urls={json.dumps(all_urls)}", f"{section}.api_key_variable={KEY}", f"{section}.launched=true"]


def report(launch: Path, sweep: Path) -> int:
    """Lists the members of a sweep that have finished and those that have not, and reports on the former."""
    names = json.loads((launch / "members.json").read_text(encoding="utf-8"))
    missing = {place: name for place, name in names.items() if not RunFolder(sweep / name).is_finished}
    print(f"{len(names) - len(missing)} of {len(names)} members have finished")
    for place, name in missing.items():
        attempts = launch / "attempts" / place
        where = f"see {attempts}" if attempts.exists() else "it never ran"
        print(f"not finished: {name}, {where}; the same launch resumes it")
    sys.stdout.flush()
    if len(missing) == len(names):
        return 1
    # Not the sweep's folder: it may have members of another launch, with other settings.
    finished = [str(sweep / name) for place, name in names.items() if place not in missing]
    command = [sys.executable, "-m", "nemo_edo", "report", *finished, "--out", str(sweep / "report.html")]
    status = subprocess.run(command, check=False).returncode
    return status or (1 if missing else 0)


if __name__ == "__main__":
    main()
