"""A two-node Slurm for the whole suite, and launches in it."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from helpers.cli import Cli

from .cluster import SlurmCluster, missing

TINY = [
    "threads=1", "sft.steps=40", "sft.batch_size=8", "sft.micro_batch_size=8", "sft.optimizer.lr=4e-3",
    "data.arithmetic.num_operands=2", "data.arithmetic.warmup_problems=64", "data.arithmetic.train_problems=8",
    "data.arithmetic.test_problems=4", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10",
    "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10", "grpo.iterations=2",
    "grpo.problems_per_iteration=4", "grpo.minibatch_size=8", "grpo.micro_batch_size=8", "checkpoint.every_steps=2",
    "~arms", "replicate_baseline=false",
]
"""The quickstart's training in seconds."""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if absent := missing():
        pytest.skip(f"needs {', '.join(absent)}: apt-get install slurm-wlm munge")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def healthy_nodes(slurm):
    """What a test breaks is repaired before the next, also where the test fails."""
    yield
    slurm.restore()


class Launcher:
    """``nemo-edo`` with a folder for its runs. The nodes are checked where a test asks for it."""

    SLURM = ("cluster=slurm", "cluster.processes_per_node=1", "cluster.health_limit_s=0")

    def __init__(self, cluster, folder: Path, cli: Cli) -> None:
        self.cluster, self.folder, self.cli = cluster, folder, cli

    def nemo_edo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.cli(*arguments, cwd=self.folder, before=[("helpers.cli:export", self.cluster.environment)])

    def settings(self, name: str, *overrides: str) -> list[str]:
        return [f"name={name}", f"output_dir={self.folder}", *TINY, *overrides]

    def launch(self, name: str, *overrides: str) -> list[str]:
        """The numbers of the jobs that are submitted."""
        done = self.nemo_edo("launch", *self.settings(name, *self.SLURM, *overrides))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0].removeprefix("submitted ").partition(":")[0].split(", ")

    def wait(self, name: str, job: str, *states: str, limit_s: float = 300) -> None:
        """Until the job is in one of the states; shows its logs where it comes to another end."""
        found = self.cluster.wait_for(job, *states, "FAILED", "CANCELLED", "COMPLETED", limit_s=limit_s)
        assert found in states, f"{found}: {self.logs(name)}"

    def wait_for_steps(self, name: str, count: int, limit_s: float = 500) -> None:
        """Until the run has logged so many steps of its warm-up."""
        until = time.monotonic() + limit_s
        while len(self.metrics(name, "sft_step")) < count:
            assert time.monotonic() < until, self.logs(name)
            time.sleep(0.1)

    def logs(self, name: str) -> str:
        found = sorted((self.folder / name / "launch").rglob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in found)

    def metrics(self, name: str, kind: str) -> list[dict]:
        path = self.folder / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["kind"] == kind]


@pytest.fixture(scope="session")
def launcher(slurm, tmp_path_factory, nemo_edo) -> Launcher:
    return Launcher(slurm, tmp_path_factory.mktemp("runs"), nemo_edo)
