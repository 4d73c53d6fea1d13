"""sbatch scripts for runs and sweeps, and their submission."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from nemo_edo.config import ClusterConfig
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.experiments.sweep import Sweep, write_members

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Member:
    """One run of a job: its name, its resolved config, and the folder that it trains in. arguments: of ``nemo-edo``,
    where they are not to train with the config."""

    name: str
    config: str
    run: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A job to submit: a run, or a sweep's members as an array."""

    name: str
    folder: Path
    """Contains the script, the snapshot of code and config, and the files of each attempt."""
    members: tuple[Member, ...]
    waiting: tuple[int, ...]
    """Indices of the members that are not finished."""
    cluster: ClusterConfig
    server_limit_s: float
    """Seconds until servers must be ready."""
    sweep: Sweep | None = None
    """The members' sweep, which gets a report at its end."""

    @property
    def is_selftest(self) -> bool:
        return self.members[0].arguments[:1] == ("selftest",)


# --- scripts ------------------------------------------------------------------------------------------------------


def job_script(launch: Launch) -> str:
    """The sbatch script that trains."""
    cluster = launch.cluster
    per_node = cluster.processes_per_node
    options = [
        f"--job-name={_job_name(launch)}",
        f"--nodes={cluster.nodes + cluster.server_nodes}",
        f"--ntasks-per-node={per_node}",
        _output(launch, "job_%A_%a.log" if launch.sweep else "job_%j.log"),
        "--open-mode=append",
        "--requeue" if cluster.requeues else "--no-requeue",
    ]
    if launch.sweep:
        limit = f"%{cluster.array_limit}" if cluster.array_limit else ""
        options.append(f"--array={','.join(map(str, launch.waiting))}{limit}")
    if cluster.stop_before_s:
        options.append(f"--signal=B:USR1@{cluster.stop_before_s}")
    if cluster.gpus_per_node:
        options.append(f"--gpus-per-node={cluster.gpus_per_node}")
    if cluster.time_limit:
        options.append(f"--time={cluster.time_limit}")
    options += _site(cluster)
    options += [_option(key, value) for key, value in cluster.options.items() if value is not False]
    return _render(
        launch,
        "job.sh.j2",
        options=options,
        members=launch.sweep is not None,
        nodes=cluster.nodes,
        server_nodes=cluster.server_nodes,
        server_limit_s=f"{launch.server_limit_s:g}",
        processes_per_node=per_node,
        tasks_per_node=1 if cluster.launcher == "torchrun" else per_node,
        launcher=cluster.launcher,
        requeues=cluster.requeues,
        health_limit_s=f"{cluster.health_limit_s:g}" if cluster.health_limit_s else "",
        shared_folder=cluster.shared_folder or str(launch.folder),
    )


def report_script(launch: Launch) -> str:
    """The sbatch script that writes a sweep's report once all of its members have ended."""
    name, place = f"--job-name={_job_name(launch)}-report", ("--nodes=1", "--ntasks=1")
    return _render(
        launch,
        "report.sh.j2",
        options=[name, *place, _output(launch, "report_%j.log"), *_site(launch.cluster)],
        arguments=shlex.join([str(launch.folder), str(launch.sweep.folder)]),
    )


def _render(job: Launch, template: str, **values: Any) -> str:
    """A script, with what is common to all."""
    cluster, container = job.cluster, job.cluster.container
    # The run's folders have the same paths inside the container.
    folders = {str(job.folder), *(str(member.run.parent) for member in job.members)}
    if cluster.shared_folder:
        folders.add(cluster.shared_folder)
    mounts = [*(f"{path}:{path}" for path in sorted(folders)), *container.mounts]
    step_options, prefix = "", ""
    if container.kind == "pyxis":
        image, mounted = f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"
        step_options = shlex.join([image, mounted, "--no-container-mount-home"])
    elif container.kind == "apptainer":
        # --nv on every node: on one without GPUs it is a warning, and without it a node's GPUs would stay unused.
        binds = (f"--bind={mount}" for mount in mounts)
        prefix = shlex.join(["apptainer", "exec", "--nv", *binds, container.image]) + " "
    environment = Environment(
        loader=PackageLoader("nemo_edo.cluster"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: shlex quotes the values
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(template).render(
        launch=str(job.folder),
        setup=cluster.setup,
        environment=sorted(cluster.environment.items()),
        secrets=cluster.secrets,
        secrets_file=cluster.secrets_file and str(Path(cluster.secrets_file).expanduser().absolute()),
        code=str(job.folder / "code"),
        step_options=step_options,
        run_in_container=prefix,
        python=cluster.python or (sys.executable if container.kind == "none" else "python3"),
        **values,
    )


def _site(cluster: ClusterConfig) -> list[str]:
    given = {"account": cluster.account, "partition": cluster.partition, "qos": cluster.qos}
    return [_option(key, value) for key, value in given.items() if value is not None]


def _output(launch: Launch, name: str) -> str:
    """name: with Slurm's placeholders, such as %j; a % of the folder's name is none."""
    return _option("output", str(launch.folder).replace("%", "%%") + f"/{name}")


def _option(key: str, value: object) -> str:
    return f"--{key}" if value is True else f"--{key}={shlex.quote(str(value))}"


def _job_name(launch: Launch) -> str:
    return "".join(c if c.isalnum() or c in "._=-" else "_" for c in launch.name)


# --- submission ---------------------------------------------------------------------------------------------------


def write_snapshot(launch: Launch) -> None:
    """Writes the scripts, and copies code and configs, so that later edits do not change the job."""
    if launch.sweep:
        write_members(launch.sweep)
    code = launch.folder / "code"
    shutil.rmtree(code, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, code / "nemo_edo", ignore=ignored)
    if not (PACKAGE / "conf").is_dir():
        shutil.copytree(shipped_config_dir(), code / "conf", ignore=ignored)
    members = launch.folder / "members"
    members.mkdir(parents=True, exist_ok=True)
    for place, member in enumerate(launch.members):
        _write(members / f"{place}.yaml", member.config)
        arguments = member.arguments or ("train", "--config-path", str(members), "--config-name", str(place))
        _write(members / f"{place}.json", json.dumps(arguments))
    for place in launch.waiting:  # what was finished under this name and is to run again, such as a selftest
        (launch.folder / "finished" / str(place)).unlink(missing_ok=True)
    _write(launch.folder / "job.sh", job_script(launch))
    if launch.sweep:
        names = {place: member.name for place, member in enumerate(launch.members)}
        _write(launch.folder / "members.json", json.dumps(names, indent=1))
        _write(launch.folder / "report.sh", report_script(launch))


def _write(path: Path, text: str) -> None:
    """A file that its owner alone can read: a site's environment may hold what is nobody else's business."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text, encoding="utf-8")


_NO_CLUSTER = "Could not establish a configuration source"
"""What Slurm's commands say where there is neither a slurm.conf nor a server that has one."""


def submit(launch: Launch) -> list[str]:
    """Submits what ``write_snapshot`` wrote; returns the job IDs. Raises UserError with sbatch's message."""
    jobs: list[str] = []
    for _ in range(launch.cluster.chain):
        jobs.append(_sbatch(launch.folder / "job.sh", jobs[-1:]))
    if launch.sweep:
        jobs.append(_sbatch(launch.folder / "report.sh", jobs[-1:]))
    return jobs


def _sbatch(script: Path, after: Sequence[str]) -> str:
    dependency = [f"--dependency=afterany:{':'.join(after)}"] if after else []
    try:
        done = subprocess.run(["sbatch", "--parsable", *dependency, str(script)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(f"no sbatch on this machine: submit {script} from a node that has Slurm") from error
    if done.returncode:
        reason = done.stderr.strip()
        alone = "; this machine belongs to no Slurm cluster: submit from a node of one" if _NO_CLUSTER in reason else ""
        raise UserError(f"sbatch refused {script}: {reason}{alone}")
    return done.stdout.strip().partition(";")[0]
