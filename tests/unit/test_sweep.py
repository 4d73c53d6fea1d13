"""Sweeps: what members there are, that all are checked before one runs, and what becomes of those that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from nemo_edo import sweep as sweep_module
from nemo_edo.configuration import ConfigError, compose_run, resolved_yaml
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.evaluation.run_set import sweep_members
from nemo_edo.run_folder import RunFolder
from nemo_edo.sweep import WARM_UP_SETTINGS, Member, Sweep, plan_sweep, run_sweep, share_warm_up

# Stands in for a training: does as its member's name says, and writes what it was started with.
STAND_IN = """
import os, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
print("says", name, os.environ.get("OMP_NUM_THREADS"), flush=True)
(folder / f"{name}.started").touch()
if "slow" in name:
    time.sleep(60)
if "wait" in name:
    deadline = time.monotonic() + 20
    while len(list(folder.glob("wait*.started"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(0 if len(list(folder.glob("wait*.started"))) == 2 else 1)
if "fails" in name:
    sys.exit(3)
(folder / name).mkdir()
(folder / name / "summary.json").touch()
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A sweep of stand-ins by name."""

    def command(sweep: Sweep, member: Member, processes: int = 1) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(sweep.folder), member.name]

    monkeypatch.setattr(Sweep, "command", command)
    config = "".join(f"{key}: {{}}\n" for key in WARM_UP_SETTINGS if key != "sft") + "sft: {steps: 0}\n"
    return lambda *names: Sweep(
        "quickstart", None, tmp_path / "sweep", tuple(Member(name, (), config) for name in names))


def plan(*overrides: str, folder: Path = Path("runs")) -> Sweep:
    return plan_sweep("alpha_sweep", [*overrides, f"output_dir={folder}"])


def names(*overrides: str) -> list[str]:
    return [member.name for member in plan(*overrides).members]


# --- the members ------------------------------------------------------------------------------------------------------


def test_members_are_all_combinations_in_order_named_after_the_last_parts_of_what_is_swept():
    assert names("grpo.alpha=0,1e-3", "seed=1,2", "grpo.beta=0.5") == [
        "alpha=0,seed=1", "alpha=0,seed=2", "alpha=0.001,seed=1", "alpha=0.001,seed=2"]


@pytest.mark.parametrize(("line", "expected"), [
    ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
    ("seed=choice(7,5)", ["seed=7", "seed=5"]),
    ("+threads=1,2", ["threads=1", "threads=2"]),
    ("grpo.log_ratio_floor=null,-0.1", ["log_ratio_floor=null", "log_ratio_floor=-0.1"]),
    ("arms=[grpo,noise],kl_cov", ["arms=grpo,noise", "arms=kl_cov"]),
])
def test_hydras_sweep_syntax_names(line: str, expected: list[str]):
    assert names(line) == expected


def test_keys_of_one_last_part_are_named_in_full():
    assert names("grpo.beta=1,2", "idpo.beta=3,4")[0] == "grpo.beta=1,idpo.beta=3"


def test_names_of_values_that_are_no_folder_names_stay_folder_names_and_differ():
    found = names("data.prompt='a/{question}','a:{question}'", "seed=1,2")
    assert len(set(found)) == 4
    assert all("/" not in name and len(name) < 130 for name in found)


def test_very_long_values_give_short_names_that_differ():
    prompts = ",".join(f"'{{question}}{'x' * 200}{end}'" for end in "ab")
    first, second = names(f"data.prompt={prompts}")
    assert first != second
    assert max(len(first), len(second)) <= 120


def test_a_members_overrides_compose_to_its_own_folder_and_values(tmp_path: Path):
    sweep = plan("grpo.alpha=0,0.5", "seed=3", folder=tmp_path)
    cfg = compose_run("alpha_sweep", list(sweep.members[1].overrides))
    assert (cfg.grpo.alpha, cfg.seed, cfg.name, cfg.output_dir) == (0.5, 3, "alpha=0.5", str(tmp_path / "alpha_sweep"))


@pytest.mark.parametrize("folder", ["it's", "a=b,c", "with blank", "${x}"[:1] + "dollar"])
def test_folders_with_odd_characters_survive_hydras_grammar(tmp_path: Path, folder: str):
    quoted = folder.replace("'", "\\'")
    sweep = plan_sweep("alpha_sweep", ["seed=1,2", f"output_dir='{tmp_path}/{quoted}'"])
    cfg = compose_run("alpha_sweep", list(sweep.members[0].overrides))
    assert cfg.output_dir == f"{tmp_path}/{folder}/alpha_sweep"


@pytest.mark.parametrize(("overrides", "complaint"), [
    (["seed=1"], "nothing is swept"),
    (["seed=1,2", "grpo.alhpa=0,1"], "unknown key grpo.alhpa"),
    (["grpo.beta=0.1,-1"], "grpo.beta is -1.0, expected a number of at least 0"),
    (["seed=1,2,1"], "seed=1 is listed twice"),
    (["name=a,b"], "members are named after their other settings"),
    (["seed=interval(1,2)"], "list the values"),
    (["arms=glob(*)"], "list the values"),
    (["arms=noise,nois", "seed=1"], "no config nois in group arm; did you mean noise?"),
    (["seed=1,2", "grpo.beta"], "not of Hydra's form"),
])
def test_a_mistake_in_any_member_is_told_before_one_runs(overrides: list[str], complaint: str):
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert complaint in str(caught.value)


def test_a_member_whose_folder_holds_another_run_is_refused(tmp_path: Path):
    other = compose_run("alpha_sweep", ["seed=9"])
    run = tmp_path / "alpha_sweep" / "seed=2"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(other))
    with pytest.raises(UserError, match="exists already with another config"):
        plan("seed=1,2", folder=tmp_path)


def test_command_of_a_member_runs_the_same_config_in_a_fresh_process():
    sweep = plan_sweep("alpha_sweep", ["seed=1,2"])
    command = sweep.command(sweep.members[1])
    assert command[:6] == [sys.executable, "-m", "nemo_edo", "train", "--config-name", "alpha_sweep"]
    assert command[6:] == list(sweep.members[1].overrides)
    several = sweep.command(sweep.members[1], processes=2)
    assert several[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert several[5:] == command[1:]


def test_the_module_is_the_command():
    shown = subprocess.run([sys.executable, "-m", "nemo_edo", "--version"], capture_output=True, text=True, timeout=600)
    assert shown.stdout.startswith("nemo-edo ")


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_failing_member_stops_no_other_and_is_returned_with_its_log(stand_ins):
    sweep = stand_ins("a", "fails", "b")
    [failure] = run_sweep(sweep)
    assert (failure.member.name, failure.status, failure.log) == ("fails", 3, sweep.folder / "logs" / "fails.log")
    assert [sweep.finished(member) for member in sweep.members] == [True, False, True]
    assert "says fails" in failure.log.read_text()


def test_a_sweep_started_again_runs_only_what_has_not_finished(stand_ins):
    sweep, said = stand_ins("a", "fails", "b"), []
    run_sweep(sweep)
    run_sweep(sweep, say=said.append)
    assert said[0] == "2 of 3 members have finished before"
    assert [sweep.log(member).read_text().count("says") for member in sweep.members] == [1, 2, 1]


def test_jobs_run_at_the_same_time_and_share_the_cores(stand_ins, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sweep = stand_ins("wait1", "wait2")
    assert run_sweep(sweep, jobs=2) == []
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (sweep.folder / "logs" / "wait1.log").read_text() == f"says wait1 {threads}\n"


def test_one_job_runs_one_member_after_another(stand_ins, monkeypatch):
    started = []
    start = sweep_module._start

    def spy(sweep, member, *rest):
        assert all(process.poll() is not None for process in started)
        started.append(start(sweep, member, *rest))
        return started[-1]

    monkeypatch.setattr(sweep_module, "_start", spy)
    run_sweep(stand_ins("a", "b", "c"))
    assert len(started) == 3


def test_a_stopped_sweep_stops_its_members(stand_ins, monkeypatch):
    sweep, started = stand_ins("slow", "later"), []
    start = sweep_module._start
    monkeypatch.setattr(sweep_module, "_start", lambda *args: started.append(start(*args)) or started[-1])

    def stop() -> None:
        while not (started and (sweep.folder / "slow.started").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RunStopped, match="was stopped"):
        run_sweep(sweep)
    stopper.join()
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def with_warm_up(sweep: Sweep, member: Member) -> RunFolder:
    """The folder of a member in training: its warm-up is done."""
    run = RunFolder(sweep.folder / member.name)
    run.checkpoint("warmup").mkdir(parents=True)
    (run.checkpoint("warmup") / "weights").write_text("trained")
    (run.path / "config.yaml").write_text(member.config)
    lines = ['{"kind": "sft_step", "step": 1}', '{"kind": "sft_step", "step": 2}', '{"kind": "evaluation"}']
    (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run.note("files", metrics_bytes=0)
    run.note("warmup", metrics_bytes=1)
    return run


def test_a_member_of_the_same_warm_up_is_given_it_as_if_it_had_stopped_right_after(tmp_path: Path):
    sweep = plan("grpo.alpha=0,0.1", "seed=1,2", folder=tmp_path)
    donor = with_warm_up(sweep, sweep.members[1])
    assert [share_warm_up(sweep, member) for member in sweep.members] == [None, None, None, "alpha=0,seed=2"]
    given = RunFolder(sweep.folder / "alpha=0.1,seed=2")
    given.check_free(sweep.members[3].config)
    assert not given.journal()
    assert (given.checkpoint("warmup") / "weights").read_text() == "trained"
    assert [line["step"] for line in map(json.loads, (given.path / "metrics.jsonl").open())] == [1, 2]
    assert sorted(path.name for path in sweep.folder.iterdir()) == ["alpha=0,seed=2", "alpha=0.1,seed=2"]
    assert donor.journal()


@pytest.mark.parametrize("swept", ["sft.steps=5,6", "model.seq_length=64,65", "data.arithmetic.max_operand=8,9",
                                   "precision.dtype=fp32,bf16", "seed=1,2", "sft.steps=0,600"])
def test_a_warm_up_of_other_settings_is_not_shared(tmp_path: Path, swept: str):
    sweep = plan(swept, folder=tmp_path)
    with_warm_up(sweep, sweep.members[1])
    assert share_warm_up(sweep, sweep.members[0]) is None
    assert not (sweep.folder / sweep.members[0].name).exists()


def test_a_warm_up_that_is_not_finished_and_a_member_that_has_begun_are_left_alone(tmp_path: Path):
    sweep = plan("grpo.alpha=0,0.1,0.2", folder=tmp_path)
    run = RunFolder(sweep.folder / sweep.members[0].name)
    run.checkpoint("warmup").mkdir(parents=True)
    assert share_warm_up(sweep, sweep.members[1]) is None
    with_warm_up(sweep, sweep.members[2])
    assert share_warm_up(sweep, sweep.members[0]) is None


def test_sweep_yaml_lists_the_members_of_all_sweeps_in_the_folder(stand_ins):
    first, second = stand_ins("a"), stand_ins("b")
    run_sweep(first)
    run_sweep(second)
    assert list(sweep_members(first.folder)) == ["a", "b"]
    assert yaml.safe_load((first.folder / "sweep.yaml").read_text())["config"] == "quickstart"


@pytest.mark.parametrize("text", ["- a", "members: [a]", "{", "other: 1"])
def test_a_sweep_yaml_of_something_else_is_refused(tmp_path: Path, text: str):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match="sweep.yaml"):
        sweep_members(tmp_path)
