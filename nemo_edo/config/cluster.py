"""Where a run is launched: this machine, or a cluster's scheduler."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from nemo_edo.config.checks import one_line, one_of, positive, require

_TIME_LIMIT = re.compile(r"(\d+-)?\d{1,3}:\d\d(:\d\d)?|\d+(-\d+)?")


@dataclass
class ContainerConfig:
    """What the tasks of a job run in."""

    kind: str = "none"
    """none: the cluster's nodes as they are. pyxis: Slurm's plugin for enroot (srun --container-image). apptainer."""
    image: Optional[str] = None
    """pyxis: a registry's image (nvcr.io#... or a .sqsh file); apptainer: a .sif file."""
    mounts: list[str] = field(default_factory=list)
    """FROM:TO, in addition to the folders of the run and the snapshot, which keep their paths inside."""

    def __post_init__(self) -> None:
        one_of("cluster.container.kind", self.kind, ("none", "pyxis", "apptainer"))
        wanted = self.kind != "none"
        require((self.image is not None) == wanted, "cluster.container.image", self.image, "an image, or kind none")
        for mount in self.mounts:
            require(":" in mount, "cluster.container.mounts", mount, "FROM:TO")


@dataclass
class ClusterConfig:
    """``nemo-edo launch``: the scheduler's job. It changes no number of a run."""

    kind: str = "local"
    """local: launch refuses, use train. slurm: an sbatch script is written and submitted."""
    nodes: int = 1
    """Nodes of the trainer."""
    processes_per_node: int = 8
    """Trainer processes on each node: one for each GPU."""
    server_nodes: int = 0
    """Nodes of generation servers, in the same job; the job has nodes + server_nodes."""
    gpus_per_node: Optional[int] = None
    """GPUs requested with --gpus-per-node; null: none are requested, as nodes include theirs or have none."""
    launcher: str = "torchrun"
    """torchrun: one task per node, whose torchrun starts the processes. srun: one task per process."""
    time_limit: Optional[str] = None
    """Slurm's --time, such as 04:00:00; null: the partition's."""
    account: Optional[str] = None
    partition: Optional[str] = None
    qos: Optional[str] = None
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch: {exclusive: true, mem: 0} becomes --exclusive and --mem=0."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before anything else in the job, such as module load cuda."""
    python: Optional[str] = None
    """The interpreter of the tasks; null: the one that launches, or python3 in a container."""
    stop_before_s: int = 300
    """Seconds before the time limit at which the run is asked to save and end; it is then queued again. 0: never."""
    requeues: int = 20
    """Times that a job is queued again, after its time limit or a failure that the run did not cause. With 0, or where
    the cluster does not allow requeueing, use chain."""
    chain: int = 1
    """Jobs that are submitted one after another, each resuming where the last one ended."""
    array_limit: Optional[int] = None
    """Members of a sweep that run concurrently; null: as many as the cluster takes."""
    stalled_after_s: Optional[float] = None
    """A run that finishes no optimizer step and no part of a collection for so many seconds is ended: every process
    writes its stack
    traces, and the job is queued again. null: never. It also applies to train."""
    health_limit_s: float = 60.0
    """Seconds for the health check of all nodes before the run; 0: no check."""
    shared_folder: Optional[str] = None
    """The folder that the health check writes to from every node; null: the launch's folder."""

    def __post_init__(self) -> None:
        one_of("cluster.kind", self.kind, ("local", "slurm"))
        one_of("cluster.launcher", self.launcher, ("torchrun", "srun"))
        positive(self, "cluster", "nodes", "processes_per_node", "chain")
        for name in ("server_nodes", "stop_before_s", "requeues", "health_limit_s"):
            value = getattr(self, name)
            require(value >= 0, f"cluster.{name}", value, "a number of at least 0")
        for name in ("gpus_per_node", "array_limit", "stalled_after_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"cluster.{name}", value, "null or a number above 0")
        limit = self.time_limit
        form = "null or a time as Slurm writes it: MM, HH:MM:SS or D-HH:MM:SS"
        require(limit is None or _TIME_LIMIT.fullmatch(limit) is not None, "cluster.time_limit", limit, form)
        for name in ("account", "partition", "qos"):
            one_line(f"cluster.{name}", getattr(self, name))
        for key, value in self.options.items():
            fits = re.fullmatch(r"[a-z][a-z-]*", key) is not None and str(value).isprintable()
            require(fits, "cluster.options", f"{key}: {value}", "an option of sbatch without its dashes, on one line")
        for key in self.environment:
            require(re.fullmatch(r"[A-Za-z_]\w*", key) is not None, "cluster.environment", key, "a variable's name")
