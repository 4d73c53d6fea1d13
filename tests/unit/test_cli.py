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
from nemo_edo.errors import UserError


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


def test_export_hands_on_both_folders_and_the_arm(runner: Runner):
    assert main(["export", "runs/a", "out"]) == 0
    assert main(["export", "runs/a", "out", "--arm=grpo"]) == 0
    assert runner.calls == [("export", Path("runs/a"), Path("out"), arm) for arm in (None, "grpo")]


@pytest.mark.parametrize(("rank", "prints"), [(None, True), ("0", True), ("1", False)])
def test_report_prints_its_path_once_for_all_ranks(monkeypatch, capsys, rank: str | None, prints: bool):
    from nemo_edo.evaluation import report

    monkeypatch.setattr(report, "write_report", lambda run: run / "report.html")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert main(["report", "runs/a"]) == 0
    assert capsys.readouterr().out == ("runs/a/report.html\n" if prints else "")


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
    (["launch"], "invalid choice"),
    (["train", "--config-nmae", "x"], "--config-nmae"),
    (["report", "runs/a", "seed=1"], "seed=1"),
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
    assert (stopped.value.code, commands) == (0, ["train", "evaluate", "report", "export"])


def test_a_wrong_config_is_told_before_torch_is_loaded():
    code = "import sys; from nemo_edo.cli import main; print(main(['train', 'sed=1']), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 False\n"
    assert result.stderr.splitlines() == ["nemo-edo: error: unknown key sed (command line: sed=1); "
                                          "the nearest known key is seed"]
