"""The command line: what each command calls, and how errors are shown."""

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import nemo_edo
import nemo_edo.run
import nemo_edo.search
from nemo_edo.checks import preflight
from nemo_edo.cli import commands, main
from nemo_edo.cli.arguments import COMMANDS
from nemo_edo.config.compose import compose_run
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError


class Recorder(SimpleNamespace):
    """Stands in for a module: keeps the calls of its functions, each of which returns one line."""

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments)) or ["a line"]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replaces nemo_edo.run.jobs and nemo_edo.search.job; every config and run passes the checks of files."""
    recorder = Recorder(calls=[])
    monkeypatch.setattr(preflight, "preflight", lambda cfg: cfg)
    monkeypatch.setattr(commands, "_opened", lambda run, args, overrides, *_: (str(run), *overrides))
    monkeypatch.setattr(nemo_edo.run, "jobs", recorder, raising=False)
    monkeypatch.setattr(nemo_edo.search, "job", recorder, raising=False)
    return recorder


def test_overrides_before_and_after_an_option_apply_in_order(jobs: Recorder):
    assert main(["train", "seed=1", "~arms", "--config-name", "quickstart", "seed=2", "+threads=3"]) == 0
    [(name, cfg, begun)] = jobs.calls
    assert (name, begun) == ("train", None)  # None: this process was not started for the command
    assert (cfg.name, cfg.seed, cfg.arms, cfg.threads) == ("quickstart", 2, {}, 3)


@pytest.mark.parametrize(("arguments", "call"), [
    (["evaluate", "runs/a", "--arm", "ed_grpo", "evaluation.samples=4"],
     ("evaluate", ("runs/a", "evaluation.samples=4"), "ed_grpo")),
    (["export", "runs/a", "out", "--arm=grpo", "--max-shard-size=2GiB"],
     ("export", ("runs/a",), Path("out"), "grpo", 2**31, False, None)),
    (["export", "runs/a", "out", "--adapter", "--push-to-hub=me/a"],
     ("export", ("runs/a",), Path("out"), None, 5 * 10**9, True, "me/a")),
    (["replay", "a/step.safetensors", "seed=2"], ("replay", Path("a/step.safetensors"), ["seed=2"])),
    (["search", "runs/a", "--arm", "ed_grpo", "search.width=2"],
     ("search", ("runs/a", "search.width=2"), "ed_grpo")),
])
def test_arguments_and_overrides_reach_the_job(jobs: Recorder, arguments: list[str], call: tuple):
    assert main(arguments) == 0
    assert jobs.calls == [call]


@pytest.mark.parametrize(("command", "called", "more", "read"), [
    ("evaluate", "evaluate_model", ["data=math500", "evaluation.samples=8"], lambda cfg: cfg.evaluation.samples),
    ("search", "search_model", ["search.reward_model=PRM", "search.width=8"], lambda cfg: cfg.search.width),
])
def test_a_config_without_a_run_is_evaluated_or_searched_with_its_model(jobs, capsys, command, called, more, read):
    arguments = ["model.path=DIR", "data.test=FILE", *more, "--on-bad-rows=skip", f"--config-name={command}"]
    assert main([command, *arguments]) == 0
    [(name, cfg)] = jobs.calls
    assert (name, cfg.algorithm, cfg.data.train, cfg.data.test) == (called, "none", None, "FILE")
    assert (cfg.data.on_bad_rows, read(cfg), capsys.readouterr().out) == ("skip", 8, "a line\n")


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether a sweep was run, how many of its members fail, and how many are left unfinished then."""
    from nemo_edo.experiments import sweep as sweeps

    found = SimpleNamespace(ran=False, failed=0, left=0)

    def run_sweep(sweep, **_):
        found.ran = True
        return [sweeps.FailedCell(cell, 3, Path("its.log")) for cell in sweep.cells[: found.failed]]

    monkeypatch.setattr(sweeps, "run_sweep", run_sweep)
    monkeypatch.setattr(sweeps.SweepGrid, "left", lambda sweep: sweep.cells[: found.left])
    monkeypatch.delenv("RANK", raising=False)
    return found


def test_a_failed_member_is_named_with_its_log_and_a_sweep_under_torchrun_is_refused(swept, monkeypatch, capsys):
    swept.failed, swept.left = 1, 1
    assert main(["train", "-m", "seed=1,2"]) == 1
    shown = capsys.readouterr()
    assert all(part in shown.err for part in ("seed=1 ", "status 3", "its.log")) and "1 of 2" in shown.out
    assert "another command" not in shown.out
    swept.failed, swept.left = 0, 2
    assert main(["train", "-m", "seed=1,2"]) == 1
    assert "0 of 2 runs have finished.\n2 are in training by another command." in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")  # torchrun's
    assert main(["train", "-m", "seed=1,2"]) == 2
    assert "--processes N" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "named"), [
    ("search --config-name=search", "model.path"),
    ("evaluate", "name the folder of a run.*--config-name"),
    ("evaluate runs/a runs/b", "not 2.*--stored"),
    ("evaluate runs/a --config-name=evaluate", "runs/a .* --config-name"),
    ("evaluate --arm=x --config-name=evaluate", "--arm .* --config-name"),
    ("evaluate runs/none --stored", "runs/none .* config.yaml"),
    ("export runs/a out --max-shard-size=five", "--max-shard-size is five"),
    ("train -m", "nothing is swept"),
    ("train --jobs=2", "--jobs .* -m"),
    ("train idpo_quickstart", "--config-name idpo_quickstart"),
])
def test_arguments_that_do_not_fit_are_named_before_any_work(jobs, swept, capsys, arguments, named):
    assert main(arguments.split()) == 2
    assert re.search(named, capsys.readouterr().err)
    assert (jobs.calls, swept.ran) == ([], False)


@pytest.mark.parametrize(("error", "status", "shown"), [
    (UserError("problems.jsonl:3: no question"), 2, "error: problems.jsonl:3: no question\n"),
    (StoppedByGuard("grpo, step 3: the policy has collapsed"), 3, "guard: grpo, step 3: the policy has collapsed\n"),
    (RunStopped("stopped at step 5"), 75, "stopped at step 5"),
    (ValueError("a bug"), None, None),
])
def test_each_kind_of_end_has_its_status_and_only_a_bug_a_traceback(jobs: Recorder, capsys, error, status, shown):
    jobs.train = Mock(side_effect=error)
    with pytest.raises(ValueError, match="a bug") if status is None else nullcontext():
        assert main(["train"]) == status
        assert shown in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status", "printed"), [
    ([], 0, ""), (["lunch"], 2, "no command lunch; did you mean launch?"),
    (["train", "--config-nmae", "x"], 2, "unknown option --config-nmae; did you mean --config-name?"),
    (["train", "--lr", "1"], 2, "unknown option --lr (nemo-edo train --help lists them, and a setting is written with"),
    (["train", "-m", "--jobs=0"], 2, "--jobs: 0"), (["--version"], 0, f"nemo-edo {nemo_edo.__version__}\n"),
    (["--help"], 0, ""),
])
def test_help_version_and_arguments_that_cannot_be_parsed_end_before_any_job(jobs, capsys, arguments, status, printed):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    shown = capsys.readouterr()
    assert stopped.value.code == status and printed in (shown.err if status else shown.out) and jobs.calls == []
    commands = re.findall(r"^    (\w+)", shown.out, re.MULTILINE)
    assert commands == (list(COMMANDS) if arguments in ([], ["--help"]) else [])


@pytest.mark.parametrize("option", [["--print-config"], ["--cfg", "job"]])
def test_print_config_prints_a_config_that_composes_to_the_same_and_trains_nothing(jobs, capsys, tmp_path, option):
    assert main(["train", "seed=7", *option]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert compose_run("printed", [], tmp_path) == compose_run("quickstart", ["seed=7"]) and jobs.calls == []


def test_mistakes_in_arguments_are_errors_before_torch_pandas_and_scipy_are_loaded(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    wrong = (["train", "sed=1"], ["train", "-m", "sed=1,2"], ["launch", "sed=1"], ["launch"], ["report", "/none"],
             ["study", "run", "none"], ["evaluate"], ["evaluate", "/none"], ["evaluate", str(tmp_path), "seed=1"],
             ["search"], ["search", "/none"], ["search", str(tmp_path), "search.none=1"], ["export", "/none", "out"],
             ["doctor", "--config-name", "none"])
    code = f"import sys\nfrom nemo_edo.cli import main\nfor given in {wrong!r}:\n    print(main(given), given, " \
        "*{'torch', 'pandas', 'scipy.special', 'transformers'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.stdout.splitlines() == [f"2 {given}" for given in wrong], result.stderr
