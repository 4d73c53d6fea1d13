"""The command line: what it hands on, and how it speaks of the user's mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nemo_edo
from nemo_edo.cli import main
from nemo_edo.errors import StoppedByGuard, UserError


class Runner(SimpleNamespace):
    """Stands in for nemo_edo.runner and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str):
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    fake = Runner()
    monkeypatch.setattr(nemo_edo, "runner", fake, raising=False)
    return fake


def trained(runner: Runner):
    [(name, cfg)] = runner.calls
    assert name == "train"
    return cfg


def test_train_hands_the_composed_config_to_the_runner(runner: Runner):
    assert main(["train", "--config-name", "quickstart", "seed=7"]) == 0
    assert (trained(runner).name, trained(runner).seed) == ("quickstart", 7)


def test_overrides_before_and_after_an_option_all_arrive_in_order(runner: Runner):
    assert main(["train", "seed=1", "~arms", "--config-name", "quickstart", "seed=2", "+threads=3"]) == 0
    cfg = trained(runner)
    assert (cfg.seed, cfg.arms, cfg.threads) == (2, {}, 3)


def test_on_bad_rows_is_the_setting_of_that_name(runner: Runner):
    assert main(["train", "--on-bad-rows=skip"]) == 0
    assert trained(runner).data.on_bad_rows == "skip"


def test_without_on_bad_rows_the_config_decides(runner: Runner):
    assert main(["train", "data.on_bad_rows=skip"]) == 0
    assert trained(runner).data.on_bad_rows == "skip"


def test_config_path_is_where_the_config_is_read(runner: Runner, tmp_path: Path):
    config = "defaults: [{model: tiny_llama}, _self_]\nsampling: {max_new_tokens: 8}\nname: own\n"
    (tmp_path / "own.yaml").write_text(config)
    assert main(["train", "--config-path", str(tmp_path), "--config-name=own"]) == 0
    assert trained(runner).name == "own"


def test_evaluate_hands_on_the_run_the_arm_and_the_overrides(runner: Runner):
    assert main(["evaluate", "runs/a", "--arm", "ed_grpo", "evaluation.samples=4"]) == 0
    assert runner.calls == [("evaluate", Path("runs/a"), "ed_grpo", ["evaluation.samples=4"])]


def test_evaluate_of_a_config_hands_on_the_config(runner: Runner, capsys):
    handed = []
    runner.evaluate_model = lambda cfg: handed.append(cfg) or ["a line"]
    arguments = ["model.path=DIR", "data=math500", "data.test=FILE", "evaluation.samples=8", "--on-bad-rows=skip"]
    assert main(["evaluate", *arguments, "--config-name=evaluate"]) == 0
    [cfg] = handed
    assert (cfg.algorithm, cfg.data.train, cfg.data.test, cfg.data.tested_on) == ("none", None, "FILE", "math500")
    assert (cfg.evaluation.samples, cfg.evaluation.rollouts, cfg.data.on_bad_rows) == (8, 1, "skip")
    assert capsys.readouterr().out == "a line\n" and not runner.calls


@pytest.fixture
def search_run(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for nemo_edo.search_run and keeps what it was called with."""
    calls = []
    fake = SimpleNamespace(
        calls=calls,
        search=lambda *arguments: calls.append(arguments) or ["a line"],
        search_model=lambda cfg: calls.append(cfg) or ["another line"],
    )
    monkeypatch.setattr(nemo_edo, "search_run", fake, raising=False)
    return fake


def test_search_hands_on_the_run_the_arm_and_the_overrides(search_run: SimpleNamespace, capsys):
    assert main(["search", "runs/a", "--arm", "ed_grpo", "search.width=2"]) == 0
    assert search_run.calls == [(Path("runs/a"), "ed_grpo", ["search.width=2"])]
    assert capsys.readouterr().out == "a line\n"


def test_search_of_a_config_hands_on_the_config(search_run: SimpleNamespace, capsys):
    arguments = ["model.path=DIR", "data.test=FILE", "search.reward_model=PRM", "search.width=2", "--on-bad-rows=skip"]
    assert main(["search", *arguments, "--config-name=search"]) == 0
    [cfg] = search_run.calls
    assert (cfg.algorithm, cfg.search.reward_model, cfg.search.width) == ("none", "PRM", 2)
    assert cfg.data.on_bad_rows == "skip" and capsys.readouterr().out == "another line\n"


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "name the folder of one run, or a config with --config-name; given are 0 runs"),
    (["search.width=2"], "name the folder of one run"),
    (["runs/a", "runs/b"], "given are 2 runs"),
    (["runs/a", "--config-path=DIR"], "--config-path and --on-bad-rows go with --config-name"),
    (["runs/a", "--on-bad-rows=skip"], "--config-path and --on-bad-rows go with --config-name"),
    (["runs/a", "--config-name=search"], "runs/a: with --config-name the run is the config's own"),
    (["--config-name=search", "--arm=a"], "--arm: with --config-name the run is the config's own"),
    (["--config-name=search"], "model.path"),
])  # fmt: skip
def test_search_of_what_it_does_not_take_is_an_error(search_run, capsys, arguments: list[str], message: str):
    assert main(["search", *arguments]) == 2
    assert message in capsys.readouterr().err and not search_run.calls


def test_evaluate_of_stored_responses_takes_several_runs_and_no_runner(runner: Runner, monkeypatch, tmp_path: Path):
    from nemo_edo import evaluator_run

    handed = []
    monkeypatch.setattr(evaluator_run, "evaluate_stored", lambda *arguments: handed.append(arguments) or [])
    swept = tmp_path / "grpo.alpha=0.1"
    swept.mkdir()
    assert main(["evaluate", "runs/a", str(swept), "--stored", "evaluation.samples=4", "--arm", "x"]) == 0
    assert handed == [([Path("runs/a"), swept], "x", ["evaluation.samples=4"])] and not runner.calls


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "name the folder of a run, or a config with --config-name"),
    (["evaluation.samples=4"], "name the folder of a run"),
    (["runs/a", "runs/b"], "evaluate takes one run at a time, not 2; several go with --stored"),
    (["runs/a", "--config-name=evaluate"], "runs/a: with --config-name the run is the config's own"),
    (["--stored", "--config-name=evaluate"], "--stored: with --config-name"),
    (["--arm=x", "--config-name=evaluate"], "--arm: with --config-name"),
    (["runs/a", "--config-path=x"], "--config-path and --on-bad-rows go with --config-name"),
    (["runs/none", "--stored"], "runs/none is not the folder of a run: it has no config.yaml"),
])  # fmt: skip
def test_evaluate_says_what_does_not_go_together(runner: Runner, capsys, arguments: list[str], message: str):
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err and not runner.calls


def test_export_hands_on_both_folders_the_arm_and_the_size_of_files(runner: Runner):
    assert main(["export", "runs/a", "out"]) == 0
    assert main(["export", "runs/a", "out", "--arm=grpo", "--max-shard-size=2GiB"]) == 0
    folders = Path("runs/a"), Path("out")
    assert runner.calls == [("export", *folders, None, 5 * 10**9), ("export", *folders, "grpo", 2**31)]


def test_a_size_that_is_none_is_told_before_anything_is_loaded(runner: Runner, capsys: pytest.CaptureFixture):
    assert main(["export", "runs/a", "out", "--max-shard-size=five"]) == 2
    assert "--max-shard-size is five, expected a size such as 5GB" in capsys.readouterr().err
    assert runner.calls == []


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """No more of a run than its folder."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    return folder


@pytest.mark.parametrize(("rank", "prints"), [(None, True), ("0", True), ("1", False)])
def test_report_prints_its_path_once_for_all_ranks(monkeypatch, capsys, run_folder, rank: str | None, prints: bool):
    from nemo_edo.evaluation import report

    monkeypatch.setattr(report, "write_report", lambda run, out: run / "report.html")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert main(["report", str(run_folder)]) == 0
    assert capsys.readouterr().out == (f"{run_folder}/report.html\n" if prints else "")


def test_report_of_several_hands_on_the_runs_the_file_and_the_baseline(monkeypatch, capsys, run_folder):
    from nemo_edo.evaluation import runs_report

    def write(found, out, baseline):
        return [f"{[folder.name for folder in found.folders]} {out} {baseline}"]

    monkeypatch.setattr(runs_report, "write_runs_report", write)
    (run_folder / "summary.json").touch()
    assert main(["report", str(run_folder.parent), "-o", "x.html", "--baseline", "GRPO"]) == 0
    assert capsys.readouterr().out == "['a'] x.html GRPO\n"


def test_report_of_no_run_is_the_users_mistake(capsys, tmp_path: Path):
    assert main(["report", f"{tmp_path}/none*"]) == 2
    assert "none*: no such folder" in capsys.readouterr().err


# --- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What ``run_sweep`` was called with; the first member fails where the dict says so."""
    from nemo_edo import sweep as sweeps

    called = {"fails": False}

    def run_sweep(sweep, *, jobs: int, processes: int):
        called.update(members=[member.name for member in sweep.members], jobs=jobs, processes=processes)
        return [sweeps.Failure(sweep.members[0], 3, Path("its.log"))] if called["fails"] else []

    monkeypatch.setattr(sweeps, "run_sweep", run_sweep)
    monkeypatch.delenv("RANK", raising=False)
    return called


def test_multirun_runs_every_member_of_the_sweep(swept: dict, runner: Runner, capsys):
    assert main(["train", "-m", "--config-name", "alpha_sweep", "grpo.alpha=0,1e-3", "seed=1,2", "--jobs=2"]) == 0
    assert swept["members"] == ["alpha=0,seed=1", "alpha=0,seed=2", "alpha=0.001,seed=1", "alpha=0.001,seed=2"]
    assert (swept["jobs"], swept["processes"], runner.calls) == (2, 1, [])
    assert capsys.readouterr().out.splitlines() == [
        "4 of 4 members have finished.", "Their report: nemo-edo report runs/alpha_sweep"]


def test_a_failed_member_is_named_with_its_log_and_the_status_is_1(swept: dict, capsys):
    swept["fails"] = True
    assert main(["train", "-m", "seed=1,2"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "nemo-edo: seed=1 failed with status 3: see its.log\n"
    assert shown.out.startswith("1 of 2 members have finished.")


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["-m"], "nothing is swept"),
    (["--jobs=2"], "--jobs and --processes are for sweeps: add -m"),
    (["seed=1,2"], "write a list as [a,b], quote a text with commas, or add -m for a sweep"),
])
def test_sweeps_that_are_none_are_the_users_mistake(swept: dict, runner: Runner, capsys, arguments, complaint):
    assert main(["train", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert (runner.calls, "members" in swept) == ([], False)


def test_a_sweep_under_torchrun_is_refused(swept: dict, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "-m", "seed=1,2"]) == 2
    assert "instead of torchrun, use --processes N" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_users_mistake_is_one_message_on_stderr_and_status_2_on_every_rank(runner, monkeypatch, capsys, rank: str):
    monkeypatch.setenv("RANK", rank)
    assert main(["train", "grpo.alhpa=0.01"]) == 2
    assert capsys.readouterr() == ("", "nemo-edo: error: unknown key grpo.alhpa (command line: grpo.alhpa=0.01); "
                                       "the nearest known key is grpo.alpha\n")
    assert runner.calls == []


def test_users_mistake_found_during_the_run_is_shown_likewise(runner: Runner, capsys):
    def train(cfg):
        raise UserError("problems.jsonl:3: no question")

    runner.train = train
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "nemo-edo: error: problems.jsonl:3: no question\n"


def test_a_bug_keeps_its_traceback(runner: Runner):
    def train(cfg):
        raise ValueError("a bug")

    runner.train = train
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])


@pytest.mark.parametrize(("arguments", "complaint"), [
    ([], "required"),
    (["lunch"], "invalid choice"),
    (["train", "--config-nmae", "x"], "--config-nmae"),
    (["report"], "required: RUN"),
    (["train", "-m", "--jobs=0"], "0 is not a number of at least 1"),
    (["train", "--on-bad-rows=drop"], "drop"),
])
def test_wrong_arguments_stop_with_status_2_and_name_the_fault(runner, capsys, arguments: list[str], complaint: str):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
    assert runner.calls == []


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"nemo-edo {nemo_edo.__version__}\n")


def test_help_lists_exactly_the_commands_that_work(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    commands = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    known = ["train", "launch", "collect", "evaluate", "search", "score", "report", "doctor",
             "export", "replay"]
    assert (stopped.value.code, commands) == (0, known)


def test_a_guard_that_stops_a_run_is_told_without_a_traceback_by_a_status_of_its_own(runner: Runner, capsys):
    def stop(*_):
        raise StoppedByGuard("grpo, step 3: the policy has collapsed")

    runner.train = stop
    assert main(["train"]) == 3
    assert "stopped by a guard: grpo, step 3: the policy has collapsed\n" in capsys.readouterr().err


def test_replay_hands_on_the_file_and_the_overrides(runner: Runner):
    assert main(["replay", "a/failures/grpo_step_00000001.safetensors", "precision.dtype=fp32"]) == 0
    assert runner.calls == [("replay", Path("a/failures/grpo_step_00000001.safetensors"), ["precision.dtype=fp32"])]


def test_a_wrong_config_is_told_before_torch_is_loaded():
    code = "import sys; from nemo_edo.cli import main; print(main(['train', 'sed=1']), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.stdout == "2 False\n"
    assert result.stderr.splitlines() == ["nemo-edo: error: unknown key sed (command line: sed=1); "
                                          "the nearest known key is seed"]
