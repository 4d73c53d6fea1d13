"""Where a run is launched: this machine, or a cluster's scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from nemo_edo.config.checks import (
    Constraint,
    NonNegative,
    NonNegativeInt,
    OneLine,
    Positive,
    PositiveInt,
    Rule,
    Section,
    one_of,
    require,
)

_TIME_LIMIT = re.compile(r"(\d+-)?\d{1,3}:\d\d(:\d\d)?|\d+(-\d+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|credentials?)($|_)")
"""Names of variables that hold keys; none of NCCL's or torch's is like these."""
SlurmTime = Annotated[
    str,
    Constraint(lambda text: bool(_TIME_LIMIT.fullmatch(text)), "a time as Slurm writes it: MM, HH:MM:SS or D-HH:MM:SS"),
]


@dataclass
class ContainerConfig(Section):
    """What the tasks of a job run in."""

    kind: Annotated[str, one_of("none", "pyxis", "apptainer")] = "none"
    """none: the cluster's nodes as they are. pyxis: Slurm's plugin for enroot (srun --container-image). apptainer."""
    image: Optional[str] = None
    """pyxis: a registry's image (nvcr.io#... or a .sqsh file); apptainer: a .sif file."""
    mounts: list[Annotated[str, Constraint(lambda mount: ":" in mount, "FROM:TO")]] = field(default_factory=list)
    """FROM:TO, in addition to the folders of the run and the snapshot, which keep their paths inside."""

    def rules(self) -> Iterator[Rule]:
        yield (self.image is not None) == (self.kind != "none"), "image", "an image, or kind none"


@dataclass
class ClusterConfig(Section):
    """``nemo-edo launch``: the scheduler's job. It changes no number of a run."""

    kind: Annotated[str, one_of("local", "slurm")] = "local"
    """local: launch refuses, use train. slurm: an sbatch script is written and submitted."""
    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    processes_per_node: PositiveInt = 8
    """Trainer processes on each node: one for each GPU."""
    server_nodes: NonNegativeInt = 0
    """Nodes of generation servers, in the same job; the job has nodes + server_nodes."""
    gpus_per_node: Optional[PositiveInt] = None
    """GPUs requested with --gpus-per-node; null: none are requested, as nodes include theirs or have none."""
    launcher: Annotated[str, one_of("torchrun", "srun")] = "torchrun"
    """torchrun: one task per node, whose torchrun starts the processes. srun: one task per process."""
    time_limit: Optional[SlurmTime] = None
    """Slurm's --time, such as 04:00:00; null: the partition's."""
    account: Optional[OneLine] = None
    partition: Optional[OneLine] = None
    qos: Optional[OneLine] = None
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch: {exclusive: true, mem: 0} becomes --exclusive and --mem=0."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task. They are written into the job's script: keys belong into ``secrets``."""
    secrets: list[str] = field(default_factory=list)
    """Names of variables, such as WANDB_API_KEY, that the job takes from ``secrets_file`` or from the shell that
    submits it. Their values are written nowhere."""
    secrets_file: Optional[str] = None
    """A file with lines NAME=VALUE, as a shell reads them, that its owner alone may read; where the site does not hand
    on the environment of the shell."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before anything else in the job, such as module load cuda."""
    python: Optional[str] = None
    """The interpreter of the tasks; null: the one that launches, or python3 in a container."""
    stop_before_s: NonNegativeInt = 300
    """Seconds before the time limit at which the run is asked to save and end; it is then queued again. 0: never."""
    requeues: NonNegativeInt = 20
    """Times that a job is queued again, after its time limit or a failure that the run did not cause. With 0, or where
    the cluster does not allow requeueing, use chain."""
    chain: PositiveInt = 1
    """Jobs that are submitted one after another, each resuming where the last one ended."""
    array_limit: Optional[PositiveInt] = None
    """Members of a sweep that run concurrently; null: as many as the cluster takes."""
    stalled_after_s: Optional[Positive] = None
    """A run that finishes no optimizer step and no response for so many seconds is ended: every process writes its
    stack traces, and the job is queued again. With servers at least the time that a response may take. null: never. It
    also applies to train."""
    health_limit_s: NonNegative = 60.0
    """Seconds for the health check of all nodes before the run; 0: no check."""
    shared_folder: Optional[str] = None
    """The folder that the health check writes to from every node; null: the launch's folder."""

    def rules(self) -> Iterable[Rule]:
        for key, value in self.options.items():
            fits = re.fullmatch(r"[a-z][a-z-]*", key) is not None and str(value).isprintable()
            require(fits, "cluster.options", f"{key}: {value}", "an option of sbatch without its dashes, on one line")
        known = {"environment": self.environment, "secrets": self.secrets}
        for setting, name in ((setting, name) for setting, names in known.items() for name in names):
            require(_VARIABLE.fullmatch(name) is not None, f"cluster.{setting}", name, "the name of a variable")
        for name in self.environment:
            expected = "no key, which files of the job would hold; name it in cluster.secrets"
            require(_SECRET.search(name) is None, "cluster.environment", name, expected)
        return ()
