"""``nemo-edo launch``: checks a config as ``train`` does, and submits it as a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_edo.checks.mounts import require_mounted
from nemo_edo.checks.preflight import check_settings
from nemo_edo.cluster import slurm
from nemo_edo.cluster.slurm import Launch, Member
from nemo_edo.config import ClusterConfig, RunConfig
from nemo_edo.config.compose import ConfigError, arm_configs, compose_incomplete, compose_run, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.experiments.grid import quoted
from nemo_edo.experiments.sweep import plan_sweep
from nemo_edo.run.folder import LAUNCH, RunFolder
from nemo_edo.utils.files import check_folder

SELFTEST_LIMIT = "00:30:00"
"""Slurm's --time of a selftest, which takes five minutes: with more, it would wait longer for its nodes."""


def plan(config_name: str, overrides: Sequence[str], config_dir: str | None, *, multirun: bool) -> Launch:
    """The job for a config, or for a sweep. Raises ConfigError or UserError where it cannot run; writes nothing."""
    # An absolute path: jobs may start in another folder.
    named = [override for override in overrides if override.startswith("output_dir=")]
    given = compose_incomplete(config_name, named, config_dir)[0].output_dir
    overrides = [*overrides, f"output_dir={quoted(str(Path(given).resolve()))}"]
    if multirun:
        sweep = plan_sweep(config_name, overrides, config_dir)
        cfg, name, folder = sweep.cells[0].cfg, sweep.folder.name, sweep.folder
        members = tuple(Member(cell.name, cell.config, folder / cell.name) for cell in sweep.cells)
        left = sweep.left()
        waiting = tuple(place for place, cell in enumerate(sweep.cells) if cell in left)
        if not waiting:
            raise UserError(f"nothing is left to run: {members[0].run} and all others are finished")
    else:
        sweep, cfg = None, compose_run(config_name, overrides, config_dir)
        arm_configs(cfg)
        name, run = cfg.name, RunFolder(Path(cfg.output_dir) / cfg.name)
        config, folder = resolved_yaml(cfg), run.path
        run.check_free(config)
        if run.is_finished:
            raise UserError(f"{run.path} is finished already; choose another name=..., or remove it")
        members, waiting = (Member(name, config, folder),), (0,)
    if cfg.cluster.server_nodes and (not cfg.generation.is_served or cfg.generation.servers.urls):
        raise ConfigError(
            "cluster.server_nodes are for servers that the job starts: set generation=vllm, and no "
            "generation.servers.urls"
        )
    require_mounted(cfg)
    check_settings(cfg)
    require_gpus_at_work(cfg)
    limit_s = cfg.generation.servers.start_limit_s
    launch = Launch(name, folder / LAUNCH, members, waiting, cfg.cluster, limit_s, sweep)
    _require_launchable(launch)
    return launch


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
    if cluster.server_nodes and 2 * serving <= (cluster.gpus_per_node or 0):
        each = cluster.gpus_per_node // servers.tensor_parallel_size
        raise ConfigError(
            f"generation.servers: {servers.replicas} x {servers.tensor_parallel_size} GPUs serve on each of the "
            f"cluster.server_nodes, which have {cluster.gpus_per_node}: set generation.servers.replicas={each}"
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
    member = Member("selftest", "", folder, ("selftest", "--folder", str(folder), *only))
    launch = Launch("selftest", folder / LAUNCH, (member,), (0,), cluster, cfg.generation.servers.start_limit_s)
    _require_launchable(launch)
    return launch


def _require_launchable(launch: Launch) -> None:
    if launch.cluster.kind != "slurm":
        raise ConfigError(
            f"cluster.kind is {launch.cluster.kind!r}: launch needs cluster=slurm (conf/cluster/); train runs here"
        )
    _check_secrets(launch.cluster)
    if not str(launch.folder).isprintable() or "\\" in str(launch.folder):
        raise UserError(
            f"{str(launch.folder)!r}: Slurm takes only folders whose names have printable characters and no \\; choose "
            "another output_dir=... or name=..."
        )


def _check_secrets(cluster: ClusterConfig) -> None:
    """Raises UserError where the job would not get the values of ``cluster.secrets``, or where others can read them."""
    if cluster.secrets_file is not None:
        path = Path(cluster.secrets_file).expanduser()
        if not path.is_file():
            raise UserError(f"cluster.secrets_file is {path}: there is no such file")
        if mode := path.stat().st_mode & 0o077:
            raise UserError(f"cluster.secrets_file: others may read or write it (mode {mode:03o}): chmod 600 {path}")
        return
    export = str(cluster.options.get("export", os.environ.get("SBATCH_EXPORT", "ALL")))
    for name in cluster.secrets:
        if not os.environ.get(name):
            raise UserError(f"cluster.secrets: {name} is not set in this shell; set it, or cluster.secrets_file")
        if not {"ALL", name} & {*export.split(",")}:
            raise UserError(f"sbatch's export is {export}, and cluster.secrets has {name}: set cluster.secrets_file")


def launch(plan: Launch, *, dry_run: bool) -> str:
    """Submits a plan and says how to follow it; dry_run: returns its script and writes nothing."""
    if dry_run:
        return slurm.job_script(plan)
    check_folder(plan.folder)
    slurm.write_snapshot(plan)
    jobs = slurm.submit(plan)
    lines = [f"submitted {', '.join(jobs)}: {plan.folder}/job.sh"]
    lines.append(f"logs: {plan.folder}/job_*.log, and of each process in {plan.folder}/attempts")
    if plan.is_selftest:
        table = f"{plan.folder}/attempts/0/{jobs[0]}.0/task_0.log"
        lines.append(f"the selftest's table: {table}, and {plan.folder.parent}/selftest.json")
    return "\n".join(lines)
