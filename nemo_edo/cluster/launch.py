"""``nemo-edo launch``: checks a config, or a sweep, as ``train`` does, and submits it to Slurm by an sbatch script."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from nemo_edo.checks.preflight import check_job
from nemo_edo.config import ClusterConfig, RunConfig
from nemo_edo.config.compose import ConfigError, compose_incomplete, compose_run, resolved_yaml
from nemo_edo.config.hydra import quoted
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.experiments.sweep import SweepGrid, plan_sweep, write_members
from nemo_edo.run_folder import LAUNCH, RunFolder
from nemo_edo.utils.files import check_folder

PACKAGE = Path(__file__).parents[1]
JOBS = "jobs"
"""The file with the IDs of a launch's jobs."""
OF_THE_SCRIPT = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "NEMO_EDO_CONTROL", "NEMO_EDO_SERVER_KEY", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that a job's script sets."""
_IN_ONE_JOB = "a sweep's members are one array of jobs of the same shape"
SELFTEST_LIMIT = "00:30:00"
"""Slurm's --time of a selftest, which takes five minutes: with more, it would wait longer for its nodes."""


@dataclass(frozen=True)
class Member:
    """One run of a job."""

    config: str  # resolved
    run: Path  # the folder that it trains in
    arguments: tuple[str, ...] = ()  # of ``nemo-edo``, where they are not to train with the config


@dataclass(frozen=True)
class Launch:
    """A job to submit: a run, or a sweep's members as an array."""

    folder: Path  # for the script, the snapshot of code and config, and the files of each attempt; below the run's
    members: tuple[Member, ...]
    waiting: tuple[int, ...]  # indices of the members that are not finished
    cluster: ClusterConfig
    sweep: SweepGrid | None = None  # the members', which gets a report at its end
    cfg: RunConfig | None = None  # of the run, or of the sweep's first one


def plan(config_name: str, overrides: Sequence[str], config_dir: str | None, *, multirun: bool) -> Launch:
    """The job for a config, or for a sweep. Raises ConfigError or UserError where it cannot run; writes nothing."""
    # The run's folder is an absolute path: jobs may start in another folder.
    if multirun:
        sweep = plan_sweep(config_name, overrides, config_dir, absolute=True)
        cfg, folder = sweep.cells[0].cfg, sweep.folder
        configs = [cell.cfg for cell in sweep.cells]
        if any(one.cluster != cfg.cluster for one in configs):
            raise ConfigError(f"{_IN_ONE_JOB}, and cluster.* differs: launch a sweep for each")
        if cfg.cluster.server_nodes and any(one.generation.servers != cfg.generation.servers for one in configs):
            raise ConfigError(f"{_IN_ONE_JOB} with cluster.server_nodes, and generation.servers.* differs")
        cells = {repr((one.data, one.model, one.rewards, one.sft)): one for one in configs}.values()
        members = tuple(Member(cell.config, folder / cell.name) for cell in sweep.cells)
        left = sweep.left()
        waiting = tuple(place for place, cell in enumerate(sweep.cells) if cell in left)
        if not waiting:
            raise UserError(f"nothing is left to run: {members[0].run} and all others are finished")
    else:
        output_dir = Path(compose_run(config_name, list(overrides), config_dir).output_dir).resolve()
        cfg = compose_run(config_name, [*overrides, f"output_dir={quoted(str(output_dir))}"], config_dir)
        sweep, configs = None, [cfg]
        run, config = RunFolder(Path(cfg.output_dir) / cfg.name), resolved_yaml(cfg)
        run.check_free(config)
        if run.is_finished:
            raise UserError(f"{run.path} is finished already; choose another name=..., or remove it")
        folder, cells, members, waiting = run.path, configs, (Member(config, run.path),), (0,)
    if cfg.cluster.server_nodes and any(not o.generation.is_served or o.generation.servers.urls for o in configs):
        raise ConfigError(
            "cluster.server_nodes are for servers that the job starts: set generation=vllm, and no "
            "generation.servers.urls"
        )
    if cfg.cluster.server_nodes and any(one.generation.backend == "trtllm" for one in configs):
        raise ConfigError(
            "cluster.server_nodes: TensorRT-LLM's servers run on the trainer's first node alone; set generation=vllm, "
            "or cluster.server_nodes=0"
        )
    for one in cells:
        check_job(one)
    for one in configs:
        require_gpus_at_work(one)
    return _launchable(Launch(folder / LAUNCH, members, waiting, cfg.cluster, sweep, cfg))


def require_gpus_at_work(cfg: RunConfig) -> None:
    """Raises ConfigError where most of the job's GPUs that are to generate would have no server: a run starts servers
    on its first node alone, the job on each of ``cluster.server_nodes``."""
    cluster, servers = cfg.cluster, cfg.generation.servers
    if not cfg.generation.is_served or servers.urls:
        return
    serving = servers.replicas * servers.tensor_parallel_size
    if not cluster.server_nodes and cluster.nodes > 1:
        raise ConfigError(
            f"generation.placement={cfg.generation.placement} starts servers on the first of cluster.nodes="
            f"{cluster.nodes} nodes alone: set cluster.server_nodes, of which each has "
            "generation.servers.replicas servers, or generation=megatron, where all GPUs generate"
        )
    shared = cfg.generation.placement == "shared"
    if cluster.server_nodes and shared:
        raise ConfigError(
            "generation.placement=shared is for servers on the trainer's GPUs, and cluster.server_nodes have other "
            "ones: set generation.placement=apart"
        )
    if (cluster.server_nodes or shared) and 2 * serving <= (cluster.gpus_per_node or 0):
        each = cluster.gpus_per_node // servers.tensor_parallel_size
        where = "each of the cluster.server_nodes" if cluster.server_nodes else "the node"
        raise ConfigError(
            f"generation.servers: {servers.replicas} x {servers.tensor_parallel_size} GPUs serve on {where}, of "
            f"{cluster.gpus_per_node}: set generation.servers.replicas={each}"
        )


def plan_selftest(
    config_name: str, overrides: Sequence[str], config_dir: str | None, groups: Sequence[str] = ()
) -> Launch:
    """The job of ``nemo-edo selftest`` on every node that the config's job would have, servers' nodes too. Model and
    data need not be given. groups: of checks; none: all. Raises as ``plan`` does."""
    cfg, _ = compose_incomplete(config_name, list(overrides), config_dir)
    nodes = cfg.cluster.nodes + cfg.cluster.server_nodes
    once = {"requeues": 0, "chain": 1, "stop_before_s": 0, "time_limit": SELFTEST_LIMIT}
    cluster = replace(cfg.cluster, nodes=nodes, server_nodes=0, **once)
    folder = Path(cfg.output_dir).resolve() / "selftest"
    only = ("--only", *groups) if groups else ()
    member = Member("", folder, ("selftest", "--folder", str(folder), *only))
    return _launchable(Launch(folder / LAUNCH, (member,), (0,), cluster))


def _launchable(launch: Launch) -> Launch:
    """Raises UserError for what Slurm cannot be asked for, and where the job would not get the values of
    ``cluster.secrets``, or where others can read them."""
    cluster, folder = launch.cluster, str(launch.folder)
    if cluster.kind != "slurm":
        needed = "launch needs cluster=slurm (conf/cluster/); train runs here"
        raise ConfigError(f"cluster.kind is {cluster.kind!r}: {needed}")
    signs = "\\:" if cluster.container.kind == "none" else "\\:,"
    if not folder.isprintable() or {*signs} & {*folder}:
        raise UserError(
            f"{folder!r}: a job takes only folders whose names have printable characters and none of {' '.join(signs)} "
            "(which PYTHONPATH and containers' mounts are split at); choose another output_dir=... or name=..."
        )
    mounted = {"shared_folder": cluster.shared_folder or "", "container.mounts": cluster.container.mounts}
    for key, texts in mounted.items() if cluster.container.kind != "none" else ():
        if "," in "".join(texts):
            raise UserError(f"cluster.{key} is {texts}: containers' mounts are split at commas; choose folders without")
    export = str(cluster.options.get("export", os.environ.get("SBATCH_EXPORT", "ALL")))
    if cluster.secrets_file is not None:
        path = Path(cluster.secrets_file).expanduser()
        if not path.is_file():
            raise UserError(f"cluster.secrets_file is {path}: there is no such file")
        if mode := path.stat().st_mode & 0o077:
            raise UserError(f"cluster.secrets_file: others may read or write it (mode {mode:03o}): chmod 600 {path}")
    for name in cluster.secrets if cluster.secrets_file is None else ():
        if not os.environ.get(name):
            raise UserError(f"cluster.secrets: {name} is not set in this shell; set it, or cluster.secrets_file")
        if not {"ALL", name} & {*export.split(",")}:
            raise UserError(f"sbatch's export is {export}, and cluster.secrets has {name}: set cluster.secrets_file")
    return launch


def launch(plan: Launch, *, dry_run: bool) -> str:
    """Submits a plan and says how to follow it; dry_run: returns its script and writes nothing."""
    if dry_run:
        return script(plan, "job.sh.j2")
    check_folder(plan.folder)
    require_no_other_job(plan)
    write_snapshot(plan)
    jobs = submit(plan)
    lines = [f"submitted {', '.join(jobs)}: {plan.folder}/job.sh"]
    lines.append(f"logs: {plan.folder}/job_*.log, and of each process in {plan.folder}/attempts")
    if plan.members[0].arguments[:1] == ("selftest",):
        table = f"{plan.folder}/attempts/0/{jobs[0]}.0/task_0.log"
        lines.append(f"the selftest's table: {table}, and {plan.folder.parent}/selftest.json")
    return "\n".join(lines)


def time_plan(launch: Launch) -> str:
    """How long the doctor estimates a run to take on H100s, next to its limit; empty for jobs without GPUs."""
    cluster, gpus = launch.cluster, launch.cluster.nodes * (launch.cluster.gpus_per_node or 0)
    if launch.cfg is None or not gpus:
        return ""
    from nemo_edo.checks import doctor  # loads NumPy, for a dry run alone

    try:
        said = doctor.time(doctor.Case(launch.cfg, [], doctor.devices([], gpus, None)))
    except UserError as error:
        return f"no estimate of the time: {error}"
    return said and f"{said}the job: cluster.time_limit={cluster.time_limit}, requeued up to {cluster.requeues} times"


# --- scripts ------------------------------------------------------------------------------------------------------


def script(launch: Launch, template: str) -> str:
    """An sbatch script: job.sh.j2 trains, report.sh.j2 writes a sweep's report once all of its members have ended."""
    cluster, container = launch.cluster, launch.cluster.container
    # The run's folders have the same paths inside the container.
    folders = {str(launch.folder), *(str(member.run.parent) for member in launch.members)}
    if cluster.shared_folder:
        folders.add(cluster.shared_folder)
    mounts = [*(f"{path}:{path}" for path in sorted(folders)), *container.mounts]
    step_options, prefix = "", ""
    if container.kind == "pyxis":
        image, mounted = f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"
        # Otherwise the image's values of these variables win (NVIDIA/pyxis issue 124).
        kept = f"--container-env={','.join([*cluster.environment, *cluster.secrets, *OF_THE_SCRIPT])}"
        step_options = shlex.join([image, mounted, kept, "--no-container-mount-home"])
    elif container.kind == "apptainer":
        # --nv on every node: on one without GPUs it is a warning, and without it a node's GPUs would stay unused.
        binds = (f"--bind={mount}" for mount in mounts)
        prefix = shlex.join(["apptainer", "exec", "--nv", *binds, container.image]) + " "
    # Without escapes: it is shell, not HTML, and shlex quotes the values.
    loader = PackageLoader("nemo_edo.cluster")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(
        launch=launch,
        cluster=cluster,
        name="".join(c if c.isalnum() or c in "._=-" else "_" for c in launch.folder.parent.name),
        logs=str(launch.folder).replace("%", "%%"),  # Slurm replaces what follows a single %
        secrets_file=cluster.secrets_file and Path(cluster.secrets_file).expanduser().absolute(),
        step_options=step_options,
        run_in_container=prefix,
        python=cluster.python or (sys.executable if container.kind == "none" else "python3"),
    )


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
    for copied, *_ in os.walk(code):
        os.chmod(copied, 0o755)  # of a package that nobody may write to, the next launch could not replace the copy
    members = launch.folder / "members"
    members.mkdir(parents=True, exist_ok=True)
    for place, member in enumerate(launch.members):
        _write(members / f"{place}.yaml", member.config)
        arguments = member.arguments or ("train", "--config-path", str(members), "--config-name", str(place))
        _write(members / f"{place}.json", json.dumps(arguments))
    for place in launch.waiting:  # what was finished under this name and is to run again, such as a selftest
        (launch.folder / "finished" / str(place)).unlink(missing_ok=True)
    _write(launch.folder / "job.sh", script(launch, "job.sh.j2"))
    if launch.sweep:
        names = {place: member.run.name for place, member in enumerate(launch.members)}
        _write(launch.folder / "members.json", json.dumps(names, indent=1))
        _write(launch.folder / "report.sh", script(launch, "report.sh.j2"))


def _write(path: Path, text: str) -> None:
    """A file that its owner alone can read: a site's environment may hold what is nobody else's business."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text, encoding="utf-8")


_NO_CLUSTER = "Could not establish a configuration source"
"""What Slurm's commands say where there is neither a slurm.conf nor a server that has one."""

_FORGOTTEN = "Invalid job id"
"""squeue's words for jobs that ended long ago."""


def submit(launch: Launch) -> list[str]:
    """Submits what ``write_snapshot`` wrote; returns the job IDs. Raises UserError with sbatch's message, and the jobs
    that it has taken."""
    jobs: list[str] = []
    scripts = ["job.sh"] * launch.cluster.chain + ["report.sh"] * (launch.sweep is not None)
    try:
        for name in scripts:
            jobs.append(_sbatch(launch.folder / name, jobs[-1:]))
    except UserError as error:
        raise UserError(f"{error}; submitted before: scancel {' '.join(jobs)}" if jobs else str(error)) from error
    finally:
        if jobs:
            _write(launch.folder / JOBS, ",".join(jobs))
    return jobs


def require_no_other_job(launch: Launch) -> None:
    """Raises UserError where a job of an earlier launch is queued or running, whose code and config a new one would
    replace, or where another process has a run's folder."""
    jobs = launch.folder / JOBS
    if jobs.is_file() and shutil.which("squeue"):
        command = ["squeue", "--noheader", "--format=%A", f"--jobs={jobs.read_text(encoding='utf-8').strip()}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if there := sorted({*done.stdout.split()}):
            raise UserError(f"{launch.folder}: its jobs {' '.join(there)} are queued or running: scancel them first")
        if done.returncode and _FORGOTTEN not in done.stderr:
            raise UserError(
                f"squeue does not say whether a job is in {launch.folder}: {done.stderr.strip()}; try again"
            )
    for place in launch.waiting:
        RunFolder(launch.members[place].run).require_unused()


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
