"""What a job's script asks of Slurm, that it is sound shell, and what its tasks become."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers.problem_files import write_rows, write_sums

from nemo_edo.cli import commands, main
from nemo_edo.cluster import launch as launching
from nemo_edo.cluster import task
from nemo_edo.config.compose import ConfigError
from nemo_edo.config.hydra import quoted
from nemo_edo.errors import RunStopped, UserError, WorkerFailed
from nemo_edo.run import control
from nemo_edo.utils.ranks import variables_of_torchrun

CONTAINERS = {
    "none": [],
    "pyxis": ["cluster.container.kind=pyxis", "cluster.container.image='nvcr.io#edo/nemo:1'",
              "cluster.container.mounts=['/data:/data']"],
    "apptainer": ["cluster.container.kind=apptainer", "cluster.container.image='/images/it is.sif'"],
}
GRPO = ["model=qwen2_5_7b", "model.path=/nodes/m", "data.train=/nodes/a", "data.test=/nodes/b", "cluster=slurm_gpu8"]


def plan(tmp_path, *overrides: str, multirun: bool = False):
    return launching.plan("quickstart", ["cluster=slurm", f"output_dir={tmp_path}", *overrides], None,
                          multirun=multirun)


def script(tmp_path, *overrides: str, multirun: bool = False) -> str:
    return launching.launch(plan(tmp_path, *overrides, multirun=multirun), dry_run=True)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("multirun", [False, True])
def test_scripts_are_sound_shell(tmp_path, container: str, launcher: str, multirun: bool):
    text = script(tmp_path, f"cluster.launcher={launcher}", "cluster.setup=['module load cuda']",
                  *CONTAINERS[container], "seed=1,2" if multirun else "seed=1", multirun=multirun)
    checked = subprocess.run(["shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_a_folder_that_names_the_run_is_the_one_that_train_would_take(tmp_path):
    planned = launching.plan("quickstart", ["cluster=slurm", f"output_dir={tmp_path}/${{name}}", "name=foo"], None,
                             multirun=False)
    assert planned.members[0].run == tmp_path / "foo" / "foo"
    with pytest.raises(UserError, match="cluster.shared_folder is .*a,b: .* commas"):
        script(tmp_path, *CONTAINERS["apptainer"], "cluster.shared_folder='/data/a,b'")


def run_script(tmp_path, text: str, srun: str, state="RUNNING") -> tuple[subprocess.CompletedProcess, Path]:
    """What the script says, and the attempt's folder. Slurm's commands are stand-ins; srun: what each step does."""
    shown = f"[[ $2 == job ]] && echo '   JobState={state} Reason=None' || printf 'localhost\\nother\\n'"
    stand_ins = {"scontrol": f"[[ $1 == show ]] || exit 1; {shown}", "srun": srun}
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    place = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost,other", "SLURMD_NODENAME": "localhost"}
    environment = {**os.environ, **place, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    return done, tmp_path / "quickstart" / "launch" / "attempts" / "0" / "7.0"


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_before_a_jobs_steps_stops_its_run_and_not_the_script(tmp_path, signal: str):
    text = script(tmp_path, f"cluster.setup=['kill -{signal} $$']")
    done, attempt = run_script(tmp_path, text, "echo stopped > $NEMO_EDO_CONTROL/outcome")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "asking the run to save and end" in done.stdout and (attempt / "stop").exists()


def test_a_run_that_fails_once_its_servers_have_ended_is_queued_again(tmp_path):
    text = script(tmp_path, "cluster.server_nodes=1", "generation=vllm", "cluster.health_limit_s=0")
    fails = "sleep 3; echo failed with status 2 > $NEMO_EDO_CONTROL/outcome; exit 1"
    serves = '[[ $* == *" serve" ]] && exec sleep'
    done, attempt = run_script(tmp_path, text, f"{serves} 0\n{fails}")
    assert "servers have ended" in done.stdout and "queued again" in done.stdout and done.returncode == 2
    assert (attempt / "servers_ended").exists()
    done, _ = run_script(tmp_path, text, f"{serves} 8\n{fails}")
    assert "the run failed" in done.stdout and "queued again" not in done.stdout and done.returncode == 2


@pytest.mark.parametrize(("outcome", "state", "status", "said"), [
    ("stopped", "RUNNING", 75, "queued again"), ("stopped", "COMPLETING", 75, "cancelled: the run has saved"),
    ("", "COMPLETING", 9, "cancelled: the run was lost (status 9)"), ("", "RUNNING", 9, "queued again"),
    ("failed with status 3", "RUNNING", 3, "the run failed"), ("finished", "RUNNING", 0, ""),
])
def test_a_job_ends_with_its_runs_status_and_is_queued_again_unless_it_was_cancelled(
        tmp_path, outcome: str, state: str, status: int, said: str):
    text = script(tmp_path, "cluster.health_limit_s=0")
    ends = f"echo {outcome} > $NEMO_EDO_CONTROL/outcome; exit {0 if outcome == 'finished' else 9}"
    done, _ = run_script(tmp_path, text, ends if outcome else "exit 9", state)
    assert done.returncode == status and said in done.stdout, done.stdout + done.stderr
    assert ("queued again" in done.stdout) == (said == "queued again")


def test_a_second_launch_is_refused_while_the_firsts_jobs_are_there(tmp_path, monkeypatch):
    ids = iter(["101", "102", "103"])
    monkeypatch.setattr(launching, "_sbatch", lambda *_: next(ids))
    planned, squeue = plan(tmp_path, "cluster.chain=2"), tmp_path / "squeue"
    launching.launch(planned, dry_run=False)
    squeue.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launching, "_sbatch", lambda *_: next(ids, None) or refused())
    for says, told in (
        ("[[ $* == *--jobs=101,102* ]] && echo 102", "its jobs 102 are queued or running"),
        ("echo 'Unable to contact' >&2; exit 1", "whether a job is in .*: Unable to contact; try again"),
        ("echo 'Invalid job id specified' >&2; exit 1", "no more; submitted before: scancel 103"),
        ("echo 'Invalid job id specified' >&2; exit 1", "no more$"),
    ):
        squeue.write_text(f"#!/bin/bash\n{says}\n")
        with pytest.raises(UserError, match=told):
            launching.launch(planned, dry_run=False)
    assert (planned.folder / launching.JOBS).read_text() == "103", "no empty list, which squeue takes for all jobs"


def refused():
    raise UserError("no more")


def test_a_config_becomes_what_sbatch_is_asked_for(tmp_path):
    text = script(tmp_path, "cluster=slurm_gpu8", "cluster.nodes=4", "cluster.account=lab", "cluster.partition=gpu",
                  "cluster.qos=high", "cluster.time_limit=1-12:00:00",
                  "+cluster.options={comment: 'two words', nice: null}",
                  "+cluster.environment.NCCL_IB_HCA='mlx5_0,mlx5 1'")
    assert options(text) == [
        "--job-name=quickstart", "--nodes=4", "--ntasks-per-node=8",
        f"--output={tmp_path}/quickstart/launch/job_%j.log", "--open-mode=append", "--requeue", "--signal=B:USR1@300",
        "--gpus-per-node=8", "--time=1-12:00:00", "--account=lab", "--partition=gpu", "--qos=high", "--exclusive",
        "--mem=0", "--comment='two words'"]
    assert "export NCCL_IB_HCA='mlx5_0,mlx5 1'" in text
    once = options(script(tmp_path, "cluster.requeues=0", "cluster.stop_before_s=0"))
    assert "--no-requeue" in once and not [option for option in once if "signal" in option]


def test_logs_are_in_the_runs_folder_whatever_characters_its_name_has(tmp_path):
    folder = tmp_path / "a %j $HOME 'b'"
    text = script(tmp_path, "name='%t c'", f"output_dir={quoted(str(folder))}")
    [output] = [option for option in options(text) if option.startswith("--output")]
    [slurms] = shlex.split(output)  # as sbatch reads the line
    assert slurms == f"--output={str(folder).replace('%', '%%')}/%%t c/launch/job_%j.log"
    assert "logs=${attempt//%/%%}" in text and text.count('--output="$logs/') == 2
    for name in ("a\nb", "19:00"):
        with pytest.raises(UserError, match="printable characters.*choose another output_dir"):
            script(tmp_path, f"output_dir={quoted(f'{tmp_path}/{name}')}")


def test_a_run_sees_its_folders_in_a_container(tmp_path):
    [line] = [line for line in script(tmp_path, *CONTAINERS["pyxis"]).splitlines() if "--container-image" in line]
    for part in (f"{tmp_path}:{tmp_path}", "/data:/data", "--container-image=nvcr.io#edo/nemo:1",
                 "--container-env=", ",PYTHONPATH,PYTHONSAFEPATH,NEMO_EDO_CONTROL,"):
        assert part in line
    apptainer = script(tmp_path, *CONTAINERS["apptainer"])
    # --nv without gpus_per_node, too: the partition's nodes may come with GPUs
    for part in ("apptainer exec --nv --bind=", f"--bind={tmp_path}:{tmp_path}", "'/images/it is.sif' python3 -m"):
        assert part in apptainer


def test_the_snapshot_holds_code_and_config_as_they_are_now(tmp_path):
    launching.write_snapshot(plan(tmp_path, "seed=7"))
    folder = tmp_path / "quickstart" / "launch"
    arguments = json.loads((folder / "members" / "0.json").read_text())
    assert arguments == ["train", "--config-path", str(folder / "members"), "--config-name", "0"]
    assert "seed: 7" in (folder / "members" / "0.yaml").read_text()
    assert (folder / "code" / "nemo_edo" / "cli" / "commands.py").is_file() and (folder / "code" / "conf").is_dir()
    assert not list((folder / "code").rglob("__pycache__"))
    checkout = tmp_path / "checkout" / "nemo_edo"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").write_text("")
    head = (folder / "job.sh").read_text().partition("\nlaunch=")[0]
    asked = f"{head}\n{shlex.quote(sys.executable)} -m nemo_edo --version"
    done = subprocess.run(["bash", "-c", asked], cwd=checkout.parent, capture_output=True, text=True)
    assert done.returncode == 0, "it ran what the folder of its steps has: " + done.stderr


def test_launching_needs_a_cluster_and_slurm_and_a_dry_run_tells_its_time_and_writes_nothing(
        tmp_path, capsys, monkeypatch):
    given = [*GRPO, "cluster.nodes=2", "generation=megatron", f"output_dir={tmp_path}", "cluster.time_limit=04:00:00"]
    assert main(["launch", "--config-name", "grpo_gsm8k", *given, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash\n#SBATCH ") and list(tmp_path.iterdir()) == []
    assert "an iteration of" in printed.err and "cluster.time_limit=04:00:00" in printed.err
    with pytest.raises(ConfigError, match="launch needs cluster=slurm"):
        launching.plan("quickstart", [f"output_dir={tmp_path}"], None, multirun=False)
    planned = plan(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on this machine"):
        launching.launch(planned, dry_run=False)


@pytest.mark.parametrize(("override", "named"), [
    ("cluster.time_limit=4h", "cluster.time_limit is '4h'"),
    ("cluster.time_limit=5", "cluster.time_limit is '5', expected more than cluster.stop_before_s=300"),
    ("cluster.container.kind=pyxis", "cluster.container.image is None"),
    ("+cluster.options={--mem: 3}", "cluster.options is '--mem: 3'"),
    ("+cluster.environment={a-b: c}", "cluster.environment is 'a-b'"),
    *((f"{key}='a\nrm -rf b'", rf"{key} is 'a\\nrm -rf b'") for key in
      ("name", "cluster.account", "cluster.partition", "cluster.qos")),
    ("+cluster.options={comment: 'a\nb'}", r"cluster.options is 'comment: a\\nb'"),
    ("name='a\\\\b'", "name is"), ("name=..", "name is '..'"), ("name=' a'", "name is ' a'"),
])
def test_bad_settings_are_refused_before_anything_is_submitted(tmp_path, override: str, named: str):
    with pytest.raises(ConfigError, match=named):
        script(tmp_path, override)


def test_keys_come_from_the_shell_or_a_private_file_and_are_in_no_file_of_the_job(tmp_path, monkeypatch):
    private = tmp_path / "keys"
    private.write_text("WANDB_API_KEY=sesame\n")
    private.chmod(0o644)
    named = "cluster.secrets=[WANDB_API_KEY]"
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for override, told in {
        named: "WANDB_API_KEY is not set",
        f"cluster.secrets_file={private}": "chmod 600",
        "cluster.secrets_file=/nowhere": "no such file",
        "+cluster.environment.HF_TOKEN=sesame": r"cluster\.environment is 'HF_TOKEN'.*cluster\.secrets",
        "cluster.secrets=['A=b']": "the name of a variable",
    }.items():
        with pytest.raises(UserError, match=told):
            plan(tmp_path, override)
    private.chmod(0o600)
    monkeypatch.setattr(launching, "_sbatch", lambda *_: "1")
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    for place, overrides in enumerate([[named], [named, f"cluster.secrets_file={private}"]]):
        planned = plan(tmp_path, f"name=job_{place}", *overrides)
        launching.launch(planned, dry_run=False)
        own = [path for path in planned.folder.rglob("*") if path.is_file() and "code" not in path.parts]
        assert own and not any("sesame" in path.read_text() or path.stat().st_mode & 0o077 for path in own)
        head = (planned.folder / "job.sh").read_text().partition("export PYTHONPATH")[0]
        for env, status in (({"WANDB_API_KEY": "sesame"}, 0), ({}, 0 if place else 2)):
            command = ["bash", "-c", head + "\n[[ $WANDB_API_KEY == sesame ]]"]
            assert subprocess.run(command, env=env, check=False, capture_output=True).returncode == status


@pytest.mark.parametrize(("kind", "path", "told"), [
    ("pyxis", "/data/train.jsonl", r"data\.train is /data/train\.jsonl.*mounts=\[/data:/data\]"),
    ("pyxis", "/models/train.jsonl", None), ("pyxis", "train.jsonl", "absolute path"),
    ("apptainer", "/data/train.jsonl", r"mounts=\[/data:/data\]"), ("apptainer", "train.jsonl", None),
    ("pyxis", "/modelsuite/train.jsonl", "container lacks"),
])
def test_every_path_is_looked_for_in_the_containers_mounts(tmp_path, monkeypatch, kind: str, path: str, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    overrides = [f"cluster.container.kind={kind}", "cluster.container.image=/images/a.sqsh",
                 "cluster.container.mounts=['/shared/m:/models']", f"data.train={path}", "data.test=/models/test.jsonl",
                 "sft.steps=0"]
    with pytest.raises(UserError, match=told) if told else nullcontext():
        assert options(script(tmp_path, *overrides))


@pytest.mark.parametrize(("mount", "override", "told"), [
    (None, [], None), (None, ["data.train=BAD"], 'bad.jsonl:1: has no "question"'),
    (None, ["data.test=/nowhere/x"], None), (None, ["data.test=HERE/x"], "data.test is .*there is no such file"),
    (None, ["sft.steps=1", "data.warmup=BAD"], "bad.jsonl:1: has no"),
    ("/in", ["data.train=BAD"], 'bad.jsonl:1: has no "question"'), ("/in", ["model.path=HERE/x"], "no such folder"),
])
def test_a_jobs_files_are_checked_where_it_is_submitted_by_its_mounts(
        tmp_path, tiny_qwen2, mount: str | None, override: list[str], told: str | None):
    (tmp_path / "model").symlink_to(tiny_qwen2)
    write_sums(tmp_path, lambda a, b: False)
    write_rows(tmp_path / "bad.jsonl", [{"query": "1 + 1", "answer": "#### 2"}])
    given = ["model.path=HERE/model", "model.architecture=null", "data.train=HERE/train.jsonl",
             "data.test=HERE/test.jsonl", "sft.steps=0", *override]
    inside = [one.replace("BAD", "HERE/bad.jsonl").replace("HERE", mount or str(tmp_path)) for one in given]
    container = ["cluster.container.kind=pyxis", "cluster.container.image=/a.sqsh",
                 f"cluster.container.mounts=['{tmp_path}:{mount}']"] if mount else []
    with pytest.raises(UserError, match=told) if told else nullcontext():
        assert options(script(tmp_path, *inside, *container))


SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
         "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "n1", "MASTER_PORT": "20001",
         "NEMO_EDO_CONTROL": "/shared/attempt"}


def test_a_task_becomes_torchrun_of_its_nodes_processes_or_one_of_them_that_finds_the_others():
    command = task.torchrun(["train", "seed=1"], 4, SLURM)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    place = {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-addr=n1", "--master-port=20001"}
    assert place <= {*command} and command[-4:] == ["-m", "nemo_edo", "train", "seed=1"]
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert variables_of_torchrun(SLURM) == variables


def test_a_run_that_an_earlier_attempt_finished_is_not_trained_again_and_counts_in_its_sweeps_report(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    launch, run = tmp_path / "launch", tmp_path / "sweep" / "seed=1"
    member = launch / "0.json"
    (launch / "finished").mkdir(parents=True)
    member.write_text('["train"]')
    member.with_suffix(".yaml").write_text(f"output_dir: {run.parent}\nname: {run.name}\n")
    (launch / "members.json").write_text('{"0": "seed=1", "1": "seed=2"}')
    monkeypatch.setattr(task.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    assert not task.trained_before(member) and task.report(launch, run.parent) == 1
    run.mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    monkeypatch.setattr(task.sys, "argv", ["task", str(member), "srun"])
    with pytest.raises(SystemExit) as ended:
        task.main()
    assert not ended.value.code and (tmp_path / control.OUTCOME).read_text() == "finished\n"
    (launch / "finished" / "1").touch()  # of an earlier, smaller launch: places have moved since
    capsys.readouterr()
    assert task.report(launch, run.parent) == 1
    assert "1 of 2 members have finished" in (said := capsys.readouterr().out) and "not finished: seed=2" in said


def test_the_trainer_gets_all_nodes_servers_and_waits_for_none_that_have_ended_nor_once_it_is_to_stop(
        tmp_path, monkeypatch):
    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    first, second = (tmp_path / f"servers_{place}.json" for place in (0, 1))
    first.write_text(json.dumps(["http://n3:8000", "http://n3:8001"]))
    with pytest.raises(UserError, match="the servers of n4 are not ready after 0.1 s"):
        task.overrides_of_servers(["n3", "n4"], 0.1)
    second.write_text(json.dumps(["http://n4:8000"]))
    assert task.overrides_of_servers(["n3", "n4"], 1.0) == [
        'generation.servers.urls=["http://n3:8000", "http://n3:8001", "http://n4:8000"]',
        "generation.servers.api_key_variable=NEMO_EDO_SERVER_KEY", "generation.servers.launched=true"]
    first.unlink(), second.unlink()
    (tmp_path / "server_0.log").write_text("loading\n")  # killed by Slurm as the other failed
    (tmp_path / "server_1.log").write_text(f"{task.ERROR} server 0: Address already in use\n")
    (tmp_path / "stop").touch()
    with pytest.raises(RunStopped, match="n3, n4"):
        task.overrides_of_servers(["n3", "n4"], 60.0)
    (tmp_path / "servers_ended").touch()
    with pytest.raises(UserError, match="^the servers of n4 have ended: server 0: Address already in use$"):
        task.overrides_of_servers(["n3", "n4"], 60.0)


def test_a_job_asks_by_a_file_and_the_runs_first_rank_tells_how_it_ended(tmp_path, monkeypatch):
    assert not control.stop_is_asked()  # no job
    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    assert not control.stop_is_asked()
    (tmp_path / "stop").touch()
    assert control.stop_is_asked()
    for rank in ("1", "0"):
        assert not (tmp_path / "outcome").exists()
        monkeypatch.setenv("RANK", rank)
        assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert (tmp_path / "outcome").read_text() == "failed with status 2\n"


def test_a_run_that_lost_a_worker_tells_its_job_nothing_so_that_it_is_queued_again(tmp_path, monkeypatch):
    def lost(args):
        raise WorkerFailed("rank 1 on n2 has ended during train_step")

    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    monkeypatch.setitem(commands.RUN, "train", lost)
    assert main(["train"]) == 1 and not (tmp_path / "outcome").exists()


@pytest.mark.parametrize(("overrides", "named"), [
    (["cluster.nodes=1,2"], "cluster.* differs"),
    (["generation.servers.replicas=1,2", "cluster.server_nodes=1", "generation=vllm"], "generation.servers.* differs"),
])
def test_a_sweep_whose_members_need_other_nodes_is_no_one_job(tmp_path, overrides, named):
    with pytest.raises(ConfigError, match=named):
        plan(tmp_path, *overrides, multirun=True)


@pytest.mark.parametrize("multirun", [False, True])
def test_what_a_config_says_of_its_output_folder_is_absolute_too(tmp_path, monkeypatch, multirun):
    monkeypatch.chdir(tmp_path)
    launch = launching.plan("quickstart", [
        "cluster=slurm", "output_dir=out/${name}", "name=foo", "cluster.shared_folder=${output_dir}",
        *(["seed=1,2"] if multirun else [])], None, multirun=multirun)  # fmt: skip
    assert launch.cfg.cluster.shared_folder == launch.cfg.output_dir
    assert launch.members[0].run == tmp_path / "out" / "foo" / "foo" / ("seed=1" if multirun else "")


def test_a_jobs_folder_is_the_one_that_is_given_and_one_that_a_container_can_mount(tmp_path):
    elsewhere = launching.plan("quickstart", ["cluster=slurm", f"++output_dir={tmp_path}"], None, multirun=False)
    assert elsewhere.folder.is_relative_to(tmp_path)
    assert plan(tmp_path, "name='alpha=0,seed=1'").folder.parent.name == "alpha=0,seed=1"
    with pytest.raises(UserError, match="a job takes only folders"):
        plan(tmp_path, "name='alpha=0,seed=1'", *CONTAINERS["pyxis"])


@pytest.mark.parametrize(("overrides", "named"), [
    (["cluster.nodes=16", "generation=vllm", "generation.placement=shared"],
     "generation.placement=shared .* first of cluster.nodes=16 nodes alone: set cluster.server_nodes"),
    (["cluster.server_nodes=1", "generation=trtllm"], "TensorRT-LLM's servers run on the trainer's first node"),
    (["cluster.nodes=2", "generation=vllm"], "generation.placement=apart .* cluster.nodes=2"),
    (["cluster.nodes=2", "cluster.server_nodes=2", "generation=vllm", "generation.servers.replicas=4"],
     "4 x 1 GPUs serve on each .* of 8: set generation.servers.replicas=8"),
    (["generation=vllm", "generation.placement=shared", "generation.servers.tensor_parallel_size=4"],
     "1 x 4 GPUs serve on the node, of 8: set generation.servers.replicas=2"),
    (["cluster.nodes=2", "cluster.server_nodes=2", "generation=vllm", "generation.placement=shared",
      "generation.servers.replicas=8"], "generation.placement=shared .* set generation.placement=apart"),
])
def test_a_job_whose_servers_leave_most_gpus_idle_is_refused(tmp_path, overrides, named):
    with pytest.raises(ConfigError, match=named):
        launching.plan("grpo_gsm8k", [*GRPO, f"output_dir={tmp_path}", *overrides], None, multirun=False)
