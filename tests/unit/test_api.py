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
])  # fmt: skip
def test_each_end_of_a_training_is_its_exception_and_what_it_printed_was_shown(
        monkeypatch, capsys, status: int, line: str, error: type, told: str):
    ends(monkeypatch, f"import sys; print('first'); print({line!r}, file=sys.stderr); sys.exit({status})")
    with pytest.raises(error, match=told):
        edo.train("quickstart")
    assert capsys.readouterr().out == f"first\n{line}\n"


def test_an_interrupt_of_the_kernel_is_handed_on_and_waited_for(monkeypatch, tmp_path: Path):
    ends(monkeypatch, f"""
import signal, sys, time
def stop(*_):
    print("nemo-edo: stopped, all saved")
    sys.exit(75)
signal.signal(signal.SIGINT, stop)
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(60)""")

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(RunStopped, match="^stopped, all saved$"):
        edo.train("quickstart")


@pytest.mark.parametrize(("call", "told"), [
    (lambda: edo.train("quickstart", ["sed=1"]), "did you mean seed"),
    (lambda: edo.train("quickstrt"), "did you mean quickstart"),
    (lambda: edo.sweep("quickstart", ["seed=1"]), "nothing is swept"),
    (lambda: edo.load("nowhere"), "nowhere is not the folder of a run"),
])
def test_a_mistake_is_an_error_before_anything_is_started(monkeypatch, call, told: str):
    monkeypatch.setattr(api, "_run", lambda *_: pytest.fail("it was started"))
    with pytest.raises(UserError, match=told):
        call()


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
