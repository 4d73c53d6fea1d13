"""Runs that ``nemo-edo launch`` starts on a real Slurm of two nodes end as those that ``train`` starts here."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ports import free_ports

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
can_cut_off = shutil.which("unshare") and not subprocess.run(["unshare", "--net", "true"]).returncode


@pytest.fixture(scope="module")
def alone(launcher) -> str:
    """The name of a run on one process."""
    done = launcher.nemo_edo("train", *launcher.settings("alone"))
    assert done.returncode == 0, done.stderr
    return "alone"


def assert_same(launcher, name: str, expected: str, tolerance: float) -> None:
    for kind, keys in (("sft_step", ["loss", "grad_norm"]), ("train_step", ["loss", "grad_norm", "entropy"])):
        mine, others = launcher.metrics(name, kind), launcher.metrics(expected, kind)
        assert len(mine) == len(others) > 0
        for key in keys:
            assert [line[key] for line in mine] == pytest.approx([line[key] for line in others], rel=tolerance,
                                                                 abs=tolerance)


def test_training_across_two_nodes_is_that_of_one_process_and_a_chain_of_jobs_ends_where_it_does(launcher, alone):
    """torchrun on each node, which is the default. The nodes are checked before, and each process has its own log."""
    job, second = launcher.launch("data", "cluster.nodes=2", "parallelism.use_distributed_optimizer=true",
                                  "cluster.health_limit_s=60", "cluster.chain=2", "cluster.requeues=0")
    launcher.wait("data", second, "COMPLETED")
    assert_same(launcher, "data", alone, 1e-4)
    assert (launcher.folder / "data" / "report.html").is_file()
    said, later = ((launcher.folder / "data" / "launch" / f"job_{one}.log").read_text() for one in (job, second))
    assert "2 processes checked in" in said and "all healthy" in said
    assert "finished before" not in said and "finished before; nothing is left to do" in later
    attempt = launcher.folder / "data" / "launch" / "attempts" / "0" / f"{job}.0"
    for rank in range(2):
        [log] = (attempt / f"ranks_of_task_{rank}").rglob("stderr.log")
        assert "idpo" not in log.read_text()
    assert "warmup" in (attempt / "task_0.log").read_text()


def test_a_run_that_is_asked_to_stop_and_then_loses_a_node_is_queued_again_twice_and_loses_nothing(launcher, alone):
    [job] = launcher.launch("disturbed", "cluster.nodes=2", "parallelism.tensor_model_parallel_size=2")
    log = launcher.folder / "disturbed" / "launch" / f"job_{job}.log"
    launcher.wait("disturbed", job, "RUNNING")
    launcher.wait_for_steps("disturbed", 5)
    with launcher.cluster.frozen(job):
        launcher.cluster.run("scancel", "--batch", "--signal=USR1", job)  # as before the job's limit
        launcher.cluster.wait_until(lambda: "asking the run to save and end" in log.read_text(), 60)
    launcher.cluster.wait_until(lambda: launcher.cluster.job(job)["Restarts"] == "1", 300)
    assert "queued again" in log.read_text()
    launcher.wait_for_steps("disturbed", 1 + len(launcher.metrics("disturbed", "sft_step")))
    with launcher.cluster.frozen(job):
        launcher.cluster.kill("n2")
        launcher.wait("disturbed", job, "PENDING", limit_s=120)
    launcher.cluster.start_node("n2")
    launcher.wait("disturbed", job, "COMPLETED")
    assert_same(launcher, "disturbed", alone, 1e-4)


def test_a_job_that_is_cancelled_is_not_queued_again(launcher):
    [job] = launcher.launch("cancelled", "cluster.nodes=1")
    launcher.wait("cancelled", job, "RUNNING")
    launcher.wait_for_steps("cancelled", 3)
    launcher.cluster.run("scancel", job)
    log = launcher.folder / "cancelled" / "launch" / f"job_{job}.log"
    launcher.cluster.wait_until(lambda: "nemo-edo: cancelled: " in log.read_text(), 60)
    launcher.wait("cancelled", job, "CANCELLED")
    assert launcher.cluster.job(job)["Restarts"] == "0" and "queued again" not in log.read_text()


def test_a_selftest_tries_the_nodes_of_the_config(launcher):
    settings = [*launcher.SLURM, "cluster.nodes=2", "cluster.launcher=srun", f"output_dir={launcher.folder}",
                "--selftest", "--only", "machine"]
    done = launcher.nemo_edo("launch", *settings)
    assert done.returncode == 0, done.stderr
    [_, job, *_] = done.stdout.replace(":", " ").split()
    launcher.wait("selftest", job, "COMPLETED")
    log = launcher.folder / "selftest" / "launch" / "attempts" / "0" / f"{job}.0" / "task_0.log"
    assert str(log) in done.stdout and "same on all ranks" in log.read_text()
    report = json.loads((launcher.folder / "selftest" / "selftest.json").read_text())
    assert report["processes"] == 2
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert all(found[name] == "pass" for name in ("same on all ranks", "shared folder", "all-reduce"))


def test_a_run_whose_input_is_bad_fails_and_is_not_queued_again(launcher):
    """The problems are removed between the launch and the job's start."""
    problems = launcher.folder / "train.jsonl"
    problems.write_text("".join(f'{{"question": "1 + {n}", "answer": "#### {n + 1}"}}\n' for n in range(3)))
    files = [f"data.{name}={problems}" for name in ("warmup", "train", "test")]
    [job] = launcher.launch("bad", *files, f"cluster.setup=['rm {problems}']")
    launcher.wait("bad", job, "FAILED")
    assert launcher.cluster.job(job)["Restarts"] == "0"
    assert f"{problems}" in launcher.logs("bad")


@pytest.mark.skipif(not can_cut_off, reason="no process can be given its own network here")
def test_the_check_of_the_nodes_names_a_rank_whose_ports_are_blocked(launcher):
    """Rank 1 runs in its own network, where nothing can be reached."""
    wrapper = 'if [ "$SLURM_PROCID" = 1 ]; then exec unshare --net "$@"; fi; exec "$@"'
    done = launcher.cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0",
        f"--export=ALL,MASTER_ADDR=127.0.0.1,MASTER_PORT={free_ports(1)[0]}", "bash", "-c", wrapper, "check",
        sys.executable, "-m", "nemo_edo.checks.selftest", f"--folder={launcher.folder / 'blocked'}", "--limit=6",
        "--start-limit=6", "--nodes=n1,n2", check=False)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "rank 1 (node n2) has not reported" in done.stdout and "1 faults" in done.stdout


def test_a_sweep_is_an_array_with_one_report_whose_failed_members_run_again_alone(launcher):
    """Of two seeds, one's job ends at its first line, until the second launch."""
    folder = launcher.folder / "sweep"
    setup = f"[[ $SLURM_ARRAY_TASK_ID != 1 || -e {folder}/repaired ]] || exit 9"
    sweep = ["seed=1,2", "-m", "cluster.launcher=srun", f"cluster.setup=['{setup}']"]
    [_, report] = launcher.launch("sweep", *sweep, "cluster.requeues=0")
    launcher.cluster.wait_for(report, "FAILED", limit_s=300)
    said = (folder / "launch" / f"report_{report}.log").read_text()
    assert "1 of 2 members have finished" in said and "not finished: seed=2" in said
    (folder / "repaired").touch()
    _, report = launcher.launch("sweep", *sweep, "cluster.requeues=0")
    assert "#SBATCH --array=1\n" in (folder / "launch" / "job.sh").read_text()
    launcher.wait("sweep", report, "COMPLETED")
    assert json.loads((folder / "launch" / "members.json").read_text()) == {"0": "seed=1", "1": "seed=2"}
    assert "2 of 2 members have finished" in (folder / "launch" / f"report_{report}.log").read_text()
    assert (folder / "report.html").is_file()
    assert sorted(path.name for path in folder.glob("seed*")) == ["seed=1", "seed=2"]
    again = launcher.nemo_edo("launch", *launcher.settings("sweep", *launcher.SLURM, *sweep))
    assert again.returncode == 2 and "nothing is left to run" in again.stderr


def test_servers_on_one_node_and_the_trainer_on_the_other_are_one_job(launcher, vllm_environment: Path):
    [job] = launcher.launch("served", "cluster.nodes=1", "cluster.server_nodes=1", "generation=vllm",
                            f"generation.servers.python={vllm_environment}")
    launcher.wait("served", job, "COMPLETED", limit_s=600)
    log = launcher.folder / "served" / "launch" / "attempts" / "0" / f"{job}.0" / "server_node_0" / "server_0.log"
    assert "--- start 1: http://" in log.read_text()
    [first, _] = launcher.metrics("served", "collection")
    assert first["sampler_gap"] < 1e-3


def test_a_job_whose_server_cannot_listen_ends_with_its_node_and_the_end_of_its_log(launcher, vllm_environment: Path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [job] = launcher.launch("deaf", "cluster.nodes=1", "cluster.server_nodes=1", "generation=vllm",
                                f"generation.servers.python={vllm_environment}",
                                f"generation.servers.arguments=[--port,'{port}']")
        launcher.cluster.wait_for(job, "FAILED", limit_s=600)
    said = (launcher.folder / "deaf" / "launch" / "attempts" / "0" / f"{job}.0" / "task_0.log").read_text()
    assert "the servers of n2 have ended: server 0 (http://" in said and "Address already in use" in said
