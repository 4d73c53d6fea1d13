"""``import nemo_edo as edo``: what the import loads, and how a training comes back. Real runs are in tests/e2e."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from helpers.experiment_run import write_experiment_run

import nemo_edo as edo
from nemo_edo import api
from nemo_edo.config.compose import compose_run
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError


def test_the_package_has_its_functions_by_name_and_imports_nothing_for_them():
    code = ("import sys; before = set(sys.modules); import nemo_edo as edo; dir(edo);"
            "print([name for name in set(sys.modules) - before if '.' in name and name.startswith('nemo_edo')])")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert {"train", "load", "sweep", "Run"} <= set(dir(edo))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        edo.trian  # noqa: B018


def ends(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Trainings run this code instead."""
    monkeypatch.setattr(api, "train_command", lambda *_: [sys.executable, "-c", code])


@pytest.mark.parametrize(("status", "line", "error", "told"), [
    (2, "nemo-edo: error: runs/a is in use", UserError, "^runs/a is in use$"),
    (2, "nemo-edo: error: 2 rows\n" + "  a row\n" * 30 + "mend them", UserError, "^2 rows\n(  a row\n){30}mend them$"),
    (3, "nemo-edo: stopped by a guard: grpo", StoppedByGuard, "a guard: grpo"),
    (75, "nemo-edo: stopped; the same command resumes", RunStopped, "^stopped; the same"),
    (1, "ValueError: a bug", RuntimeError, "status 1; its last lines:\nfirst\nValueError: a bug"),
])
def test_each_end_of_a_training_is_its_exception_and_its_output_shown(monkeypatch, capsys, status, line, error, told):
    ends(monkeypatch, f"import sys; print('first'); print({line!r}, file=sys.stderr); sys.exit({status})")
    with pytest.raises(error, match=told):
        edo.train("quickstart")
    assert capsys.readouterr().out == f"first\n{line}\n"


def test_torchruns_status_of_1_is_what_the_run_has_told_and_torchruns_lines_are_no_part_of_its_message(monkeypatch):
    ends(monkeypatch, """
import sys
from nemo_edo.run.control import outcome_of, tell_outcome
tell_outcome(outcome_of(2))
print("nemo-edo: error: data.train: no such file\\n  of two lines\\nE1128 18:51:05.2 7 torch/distributed: failed")
print("Traceback (most recent call last):")
sys.exit(1)""")
    with pytest.raises(UserError, match="^data.train: no such file\n  of two lines$"):
        edo.train("quickstart", processes=2)


@pytest.fixture
def finished(tmp_path: Path) -> edo.Run:
    shares = {arm: {"greedy_accuracy": [0.0, 1.0], "vote@10": [0.0, 1.0]} for arm in ("warmup", "a", "b")}
    lines = [{"kind": "phases", "arm": "a", "time": {"wall_s": 1.5, "elapsed_s": 2.0}}]
    cfg = compose_run("quickstart", ["~arms", "+arms={a: {}, b: {alpha: 0.5}}", "replicate_baseline=false"])
    return edo.load(write_experiment_run(tmp_path / "run", cfg, shares, lines))


def test_what_one_policy_lacks_is_not_compared(finished: edo.Run):
    path = finished.folder / "evaluations" / "b.json"
    assert [*finished.compare()["metric"]] == ["greedy_accuracy", "vote@10"]
    text = path.read_text().replace('"count": [1, 1]', '"count": [0, 0]', 1)
    path.write_text(text.replace("[0.0, 1.0]", "[0, 0]", 1))
    assert [*finished.compare()["metric"]] == ["vote@10"]  # a judge has no verdict on any
    (finished.folder / "evaluations" / "a.json").unlink()
    assert len(finished.compare()) == 0
    assert {*finished.compare(finished)["arm"]} == {"warmup", "b"}


def test_any_number_that_was_logged_can_be_plotted(finished: edo.Run):
    [line] = finished.plot("wall_s").data
    assert (line.name, [*line.y]) == ("a", [1.5])
    with pytest.raises(UserError, match="has no 'wal_s'; did you mean wall_s"):
        finished.plot("wal_s")


def test_an_interrupt_of_the_kernel_is_handed_on_and_waited_for(monkeypatch, tmp_path: Path):
    ends(monkeypatch, f"""
import sys, time
try:
    open({str(tmp_path / "ready")!r}, "w").close()
    time.sleep(60)
except KeyboardInterrupt:
    print("nemo-edo: stopped, all saved")
    sys.exit(75)""")

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(RunStopped, match="^stopped, all saved$"):
        edo.train("quickstart")


@pytest.mark.parametrize(("call", "told"), [
    (lambda: edo.train("quickstart", ["sed=1"]), "did you mean seed"),
    (lambda: edo.sweep("quickstart", ["seed=1"]), "nothing is swept"),
    (lambda: edo.load("nowhere"), "nowhere is not the folder of a run"),
])
def test_a_mistake_is_an_error_before_anything_is_started(monkeypatch, call, told: str):
    monkeypatch.setattr(api, "_run", lambda *_: pytest.fail("it was started"))
    with pytest.raises(UserError, match=told):
        call()


def test_a_sweep_whose_members_another_command_trains_returns_no_runs(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(api, "run_sweep", lambda *_, **__: [])
    with pytest.raises(RuntimeError, match="2 of 2 runs are in training by another command: seed=1, seed=2"):
        edo.sweep("quickstart", ["seed=1,2", f"output_dir={tmp_path}"])


def test_a_sweeps_table_has_alpha_and_what_the_sweep_varies_and_no_other_settings(tmp_path: Path):
    common, members = ["~arms", "+arms={grpo: {}}", "replicate_baseline=false", "train.seed=7"], {}
    for alpha in ("0", "0.5"):
        members[f"alpha={alpha}"] = given = [*common, f"grpo.alpha={alpha}", f"name='alpha={alpha}'"]
        shares = {arm: {"greedy_accuracy": [0.0, 1.0]} for arm in ("warmup", "grpo")}
        write_experiment_run(tmp_path / f"alpha={alpha}", compose_run("quickstart", given), shares)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"members": members}))
    table = edo.load(tmp_path).results
    assert [*table.columns] == ["arm", "alpha", "run", "seed", "grpo.alpha", "greedy_accuracy"]
    assert [*table["alpha"].dropna()] == [0.0, 0.5] and [*table["grpo.alpha"]] == [0.0, 0.0, 0.5, 0.5]
    assert {*table["seed"]} == {7}  # as in the runs' reports
