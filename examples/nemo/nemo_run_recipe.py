"""A recipe for NeMo-Run: a run as a partial on this machine, and as a task of torchrun on Slurm.

    python examples/nemo/nemo_run_recipe.py --processes 2 quickstart seed=2
    python examples/nemo/nemo_run_recipe.py --slurm --account research --partition batch --nodes 2 --image edo.sqsh \
        --mounts /models,/data grpo_gsm8k model.path=/models/llama3-8b data.train=/data/train.jsonl \
        data.test=/data/test.jsonl

``--dryrun`` shows what it would start. On Slurm, ``nemo-edo launch`` does more: it checks the config and the nodes,
places servers, and requeues a job whose time is over.
"""

import argparse
import os

import nemo_run as run

from nemo_edo.api import train


def partial(config_name: str, overrides: list[str], processes: int) -> run.Partial:
    """A run as a Python call, for this machine: it starts its processes itself."""
    return run.Partial(train, config_name=config_name, overrides=overrides, processes=processes)


def task(config_name: str, overrides: list[str]) -> run.Script:
    """``nemo-edo train`` as each rank of a torchrun calls it, for executors that have one."""
    return run.Script("nemo_edo", args=["train", "--config-name", config_name, *overrides], entrypoint="python", m=True)


def slurm(
    account: str, partition: str, nodes: int, image: str | None, mounts: list[str], time: str
) -> run.SlurmExecutor:
    """Eight GPUs a node, in an image that has nemo_edo. Ten minutes before the limit the run gets SIGTERM and saves its
    state; the same command resumes it."""
    return run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=nodes,
        ntasks_per_node=8,
        gpus_per_node=8,
        time=time,
        signal="TERM@600",
        container_image=image,
        container_mounts=[f"{mount}:{mount}" for mount in mounts],
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        launcher="torchrun",
        packager=run.Packager(),  # the image has the code
        tunnel=run.LocalTunnel(job_dir=os.path.abspath("nemo_run_jobs")),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1, help="on this machine")
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--account", default="")
    parser.add_argument("--partition", default="")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--image")
    parser.add_argument("--mounts", default="")
    parser.add_argument("--time", default="04:00:00")
    parser.add_argument("--dryrun", action="store_true")
    parser.add_argument("config_name")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    if given.slurm:
        mounts = [mount for mount in given.mounts.split(",") if mount]
        executor = slurm(given.account, given.partition, given.nodes, given.image, mounts, given.time)
        job = task(given.config_name, given.overrides)
    else:
        executor, job = run.LocalExecutor(), partial(given.config_name, given.overrides, given.processes)
    run.run(job, executor=executor, name="nemo_edo", dryrun=given.dryrun, detach=given.slurm)
