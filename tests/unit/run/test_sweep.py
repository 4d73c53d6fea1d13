"""Sweeps: what members there are, that all are checked before one runs, and what becomes of those that fail."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from nemo_edo.config.compose import ConfigError, compose_run
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.report.run_set import sweep_members
from nemo_edo.run import sweep as sweep_module
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.sweep import WARM_UP_SETTINGS, Member, Sweep, plan_sweep, run_sweep, share_warm_up

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


@pytest.mark.parametrize(("line", "expected"), [
    (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
    (["+threads=1,2"], ["threads=1", "threads=2"]),
    (["grpo.log_ratio_floor=null,-0.1"], ["log_ratio_floor=null", "log_ratio_floor=-0.1"]),
    (["arms=[grpo,noise],kl_cov"], ["arms=grpo,noise", "arms=kl_cov"]),
    (["grpo.alpha=0,1e-3", "seed=1,2", "idpo.beta=0.5"],
     ["alpha=0,seed=1", "alpha=0,seed=2", "alpha=0.001,seed=1", "alpha=0.001,seed=2"]),
    (["grpo.beta=1,2", "idpo.beta=3"], ["beta=1", "beta=2"]),
    (["grpo.beta=1,2", "idpo.beta=3,4"],
     [f"grpo.beta={one},idpo.beta={other}" for one in (1, 2) for other in (3, 4)]),
])
def test_names_follow_hydras_sweep_syntax_with_whole_keys_only_where_they_are_needed(line, expected: list[str]):
    assert names(*line) == expected


def test_values_that_cannot_be_folder_names_give_names_that_can_and_that_differ():
    prompts = ["a/{question}", "a:{question}", *(f"{{question}}{'x' * 200}{end}" for end in "ab")]
    found = names("data.prompt=" + ",".join(f"'{prompt}'" for prompt in prompts))
    assert len(set(found)) == 4
    assert all("/" not in name and len(name) < 130 for name in found)


@pytest.mark.parametrize("folder", ["plain", "it's", "a=b,c", "with blank", "$dollar"])
def test_a_members_overrides_compose_to_its_own_folder_and_values(tmp_path: Path, folder: str):
    quoted = folder.replace("'", "\\'")
    sweep = plan_sweep("alpha_sweep", ["grpo.alpha=0,0.5", "seed=3", f"output_dir='{tmp_path}/{quoted}'"])
    cfg = compose_run("alpha_sweep", list(sweep.members[1].overrides))
    assert (cfg.grpo.alpha, cfg.seed, cfg.name) == (0.5, 3, "alpha=0.5")
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
    (["seed=1,2", "grpo.beta"], "not in Hydra's form"),
])
def test_a_mistake_in_any_member_is_reported_before_one_runs(overrides: list[str], complaint: str):
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert complaint in str(caught.value)


def test_a_member_whose_folder_holds_another_run_is_refused(tmp_path: Path):
    (tmp_path / "alpha_sweep" / "seed=2").mkdir(parents=True)
    (tmp_path / "alpha_sweep" / "seed=2" / "config.yaml").write_text("seed: 9")
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


def test_a_failing_member_stops_no_other_and_is_the_only_one_that_is_run_again(stand_ins, monkeypatch):
    sweep, said, started = stand_ins("a", "fails", "b"), [], []
    start = sweep_module._start

    def spy(*args):
        assert all(process.poll() is not None for process in started), "one job runs one member after another"
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(sweep_module, "_start", spy)
    [failure] = run_sweep(sweep)
    assert (failure.member.name, failure.status, failure.log) == ("fails", 3, sweep.folder / "logs" / "fails.log")
    assert [sweep.finished(member) for member in sweep.members] == [True, False, True]
    run_sweep(sweep, say=said.append)
    assert said[0] == "2 of 3 members finished earlier"
    assert [sweep.log(member).read_text().count("says") for member in sweep.members] == [1, 2, 1]


def test_jobs_run_at_the_same_time_and_share_the_cores(stand_ins, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sweep = stand_ins("wait1", "wait2")
    assert run_sweep(sweep, jobs=2) == []
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (sweep.folder / "logs" / "wait1.log").read_text() == f"says wait1 {threads}\n"


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


def test_an_unfinished_warm_up_is_not_shared_and_a_member_that_has_begun_gets_none(tmp_path: Path):
    sweep = plan("grpo.alpha=0,0.1,0.2", folder=tmp_path)
    RunFolder(sweep.folder / sweep.members[0].name).checkpoint("warmup").mkdir(parents=True)
    assert share_warm_up(sweep, sweep.members[1]) is None
    with_warm_up(sweep, sweep.members[2])
    assert share_warm_up(sweep, sweep.members[0]) is None


def test_sweep_yaml_lists_the_members_of_all_sweeps_in_the_folder_and_anything_else_is_refused(stand_ins):
    first, second = stand_ins("a"), stand_ins("b")
    run_sweep(first)
    run_sweep(second)
    assert list(sweep_members(first.folder)) == ["a", "b"]
    assert yaml.safe_load((first.folder / "sweep.yaml").read_text())["config"] == "quickstart"
    for text in ("- a", "members: [a]", "{", "other: 1"):
        (first.folder / "sweep.yaml").write_text(text)
        with pytest.raises(UserError, match="sweep.yaml"):
            sweep_members(first.folder)
