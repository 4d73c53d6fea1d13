"""Runs that ``nemo-edo launch`` starts on a real Slurm of two nodes end as those that ``train`` starts here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)
can_cut_off = shutil.which("unshare") and not subprocess.run(["unshare", "--net", "true"]).returncode
LAYOUTS = {
    "tensor": ["parallelism.tensor_model_parallel_size=2", "cluster.launcher=srun"],
    "data": ["parallelism.use_distributed_optimizer=true"],
}


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_across_two_nodes_is_that_of_one_process(launcher, alone: str, layout: str):
    [job] = launcher.launch(layout, "cluster.nodes=2", *LAYOUTS[layout])
    launcher.wait(layout, job, "COMPLETED")
    assert_same(launcher, layout, alone, 1e-4)
    assert (launcher.folder / layout / "report.html").is_file()
    said = (launcher.folder / layout / "launch" / f"job_{job}.log").read_text()
    assert "2 processes checked in" in said and "all is well" in said


def test_each_process_has_a_log_of_its_own(launcher, alone: str):
    [job] = launcher.launch("logs", "cluster.nodes=2", "cluster.processes_per_node=1")
    launcher.wait("logs", job, "COMPLETED")
    attempt = launcher.folder / "logs" / "launch" / "attempts" / "0" / f"{job}.0"
    for rank in range(2):
        [log] = (attempt / f"ranks_of_task_{rank}").rglob("stderr.log")
        assert "idpo" not in log.read_text()
    assert "warm-up" in (attempt / "task_0.log").read_text()


def test_a_run_asked_to_stop_before_its_limit_is_queued_again_and_ends_with_the_same_numbers(launcher):
    launcher.nemo_edo("train", *launcher.settings("long alone", "sft.steps=80"))
    [job] = launcher.launch("long", "cluster.nodes=2", "parallelism.tensor_model_parallel_size=2", "sft.steps=80")
    launcher.wait("long", job, "RUNNING")
    launcher.wait_for_steps("long", 5)
    launcher.cluster.run("scancel", "--batch", "--signal=USR1", job)
    launcher.wait("long", job, "COMPLETED")
    assert launcher.cluster.job(job)["Restarts"] == "1"
    said = (launcher.folder / "long" / "launch" / f"job_{job}.log").read_text()
    assert "asking the run to save and end" in said and "queued again" in said
    assert_same(launcher, "long", "long alone", 1e-4)


def test_a_run_whose_node_is_lost_is_queued_again_and_loses_nothing(launcher):
    launcher.nemo_edo("train", *launcher.settings("lost alone", "sft.steps=80"))
    [job] = launcher.launch("lost", "cluster.nodes=2", "parallelism.tensor_model_parallel_size=2", "sft.steps=80")
    launcher.wait("lost", job, "RUNNING")
    launcher.wait_for_steps("lost", 5)
    launcher.cluster.kill("n2")
    launcher.wait("lost", job, "PENDING", limit_s=120)
    launcher.cluster.start_node("n2")
    launcher.wait("lost", job, "COMPLETED")
    assert_same(launcher, "lost", "lost alone", 1e-4)


def test_a_chain_of_jobs_ends_where_its_run_does(launcher):
    first, second = launcher.launch("chain", "cluster.chain=2", "cluster.requeues=0")
    launcher.wait("chain", second, "COMPLETED")
    logs = [(launcher.folder / "chain" / "launch" / f"job_{job}.log").read_text() for job in (first, second)]
    assert "finished before" not in logs[0] and "finished before; nothing is left to do" in logs[1]


def test_a_run_whose_input_is_bad_fails_and_is_not_queued_again(launcher):
    """The problems are removed between the launch and the job's start."""
    problems = launcher.folder / "train.jsonl"
    problems.write_text("".join(f'{{"question": "1 + {n}", "answer": "#### {n + 1}"}}\n' for n in range(3)))
    files = [f"data.{name}={problems}" for name in ("warmup", "train", "test")]
    [job] = launcher.launch("bad", *files, f"cluster.setup=['rm {problems}']")
    launcher.wait("bad", job, "FAILED")
    assert launcher.cluster.job(job)["Restarts"] == "0"
    assert "cannot be read" in launcher.logs("bad")


@pytest.mark.parametrize("overrides", [
    [], ["cluster.launcher=srun"], ["cluster.container.kind=apptainer", "cluster.container.image=/images/edo.sif"]])
def test_slurm_takes_the_scripts(launcher, tmp_path, overrides: list[str]):
    done = launcher.nemo_edo("launch", "cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=1",
                             f"output_dir={tmp_path}", *overrides, "--dry-run")
    script = tmp_path / "job.sh"
    script.write_text(done.stdout)
    launcher.cluster.run("sbatch", "--test-only", str(script))


@pytest.mark.skipif(not can_cut_off, reason="no process can be given a network of its own here")
def test_the_check_of_the_nodes_names_a_rank_whose_ports_are_blocked(launcher):
    """Rank 1 runs in a network of its own, where nothing can be reached."""
    said = check_nodes(launcher, "blocked", 'if [ "$SLURM_PROCID" = 1 ]; then exec unshare --net "$@"; fi; exec "$@"')
    assert "rank 1 (node n2) has not reported" in said and "1 faults" in said


def test_the_check_of_the_nodes_names_a_rank_without_the_shared_folder(launcher):
    """Rank 1 sees another folder in its place."""
    wrapper = 'if [ "$SLURM_PROCID" = 1 ]; then exec "$@" --folder /nowhere; fi; exec "$@"'
    said = check_nodes(launcher, "missing", wrapper)
    assert "rank 1 (node n2)" in said and "cannot write to the shared folder /nowhere" in said


def test_the_check_of_the_nodes_names_a_rank_with_other_versions(launcher):
    said = check_nodes(launcher, "versions", 'if [ "$SLURM_PROCID" = 1 ]; then PYTHONPATH=$ODD:$PYTHONPATH exec "$@"; '
                                             'fi; exec "$@"')
    assert "rank 1 (node n2) has transformers 0.0.1, most have" in said


def check_nodes(launcher, name: str, wrapper: str) -> str:
    """The check by itself, each of its two processes started by a shell's words; what it says."""
    folder = launcher.folder / name
    odd = folder / "odd" / "transformers-0.0.1.dist-info"
    odd.mkdir(parents=True)
    (odd / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    port = launcher.free_port()
    done = launcher.cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0",
        f"--export=ALL,MASTER_ADDR=127.0.0.1,MASTER_PORT={port},ODD={odd.parent}", "bash", "-c", wrapper, "check",
        sys.executable, "-m", "nemo_edo.cluster.health", f"--folder={folder}", "--limit=40", "--nodes=n1,n2",
        check=False)
    assert done.returncode == 4, done.stdout + done.stderr
    return done.stdout


def test_a_sweep_is_an_array_with_one_report(launcher):
    array, report = launcher.launch("sweep", "grpo.alpha=0,1e-3", "seed=1,2", "-m")
    launcher.wait("sweep", report, "COMPLETED")
    folder = launcher.folder / "sweep"
    assert (folder / "report.html").is_file()
    assert sorted(path.name for path in folder.glob("alpha*")) == [
        "alpha=0,seed=1", "alpha=0,seed=2", "alpha=0.001,seed=1", "alpha=0.001,seed=2"]
    assert "4 of 4 members have finished" in (folder / "launch" / f"report_{report}.log").read_text()
    again = launcher.nemo_edo("launch", *launcher.settings("sweep", "cluster=slurm", "cluster.processes_per_node=1",
                                                           "grpo.alpha=0,1e-3", "seed=1,2", "-m"))
    assert again.returncode == 2 and "nothing is left to run" in again.stderr


def test_failed_members_are_named_and_run_again_alone(launcher):
    """Of two seeds, one's job ends at its first line, until the second launch."""
    folder = launcher.folder / "failing"
    setup = f"cluster.setup=['[[ $SLURM_ARRAY_TASK_ID != 1 || -e {folder}/mended ]] || exit 9']"
    [array, report] = launcher.launch("failing", "seed=1,2", "-m", "cluster.requeues=0", setup)
    launcher.cluster.wait_for(report, "FAILED", limit_s=300)
    said = (folder / "launch" / f"report_{report}.log").read_text()
    assert "1 of 2 members have finished" in said and "not finished: seed=2" in said
    (folder / "mended").touch()
    array, report = launcher.launch("failing", "seed=1,2", "-m", "cluster.requeues=0", setup)
    script = (folder / "launch" / "job.sh").read_text()
    assert "#SBATCH --array=1\n" in script
    launcher.wait("failing", report, "COMPLETED")
    assert json.loads((folder / "launch" / "members.json").read_text()) == {"0": "seed=1", "1": "seed=2"}


def test_servers_on_one_node_and_the_trainer_on_the_other_are_one_job(launcher, vllm_environment: Path):
    [job] = launcher.launch("served", "cluster.nodes=1", "cluster.server_nodes=1", "generation=vllm",
                            f"generation.servers.python={vllm_environment}")
    launcher.wait("served", job, "COMPLETED", limit_s=600)
    log = launcher.folder / "served" / "launch" / "attempts" / "0" / f"{job}.0" / "server_node_0" / "server_0.log"
    assert "start 1 of server 0" in log.read_text()
    [first, _] = launcher.metrics("served", "collection")
    assert first["sampler_gap"] < 1e-3
