"""The lines of a run: what they say, how wide they are, and how many there are."""

import pytest

from nemo_edo.experiments.grid_console import GridConsole
from nemo_edo.run import console as module
from nemo_edo.run.console import RunConsole, clock_time, short
from nemo_edo.utils.phases import PHASES

NAME = "ed_grpo_with_a_floor_and_a_very_long_name"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console(clock: Clock) -> RunConsole:
    return RunConsole({"warmup": 600, "grpo": 15, NAME: 15}, clock)


def collection(iteration: int) -> dict:
    return {"iteration": iteration, "reward": 0.644, "kl": 0.0804, "entropy": 0.26, "response_length": 21.2, "lag": 0}


def evaluation(iteration: int, *, final: bool = True) -> dict:
    metrics = {name: {"mean": mean} for name, mean in (("greedy_accuracy", 0.71), ("vote@4", 0.7), ("vote@10", 0.8),
                                                       ("pass@10", 1.0), ("distinct_4", 0.44), ("entropy", 0.31))}
    return {"iteration": iteration, "final": final, "metrics": metrics, "evaluation_s": 6.0}


def test_an_iterations_line_has_the_samples_numbers_and_the_time_left_of_arm_and_run(console, clock, capsys):
    console.begin("grpo")
    for iteration in range(9):
        clock.now = 2.0 * iteration
        console("collection", collection(iteration))
        console("train_step", {"loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[2/3] grpo 1/15 reward .64 KL .08 H .26 len 21"
    # 8 iterations took 2 s each: 7 are left of this arm, and 15 of the other.
    assert lines[-1] == "[2/3] grpo 9/15 reward .64 KL .08 H .26 len 21 2.0 s/it left 0:14 run ~0:44"
    console("evaluation", evaluation(15))
    assert capsys.readouterr().out == "[2/3] grpo after 15: greedy .71 vote@10 .80 pass@10 1.0 dist-4 .44 H .31\n"
    console.begin(NAME)  # each arm ends with an evaluation
    for iteration in (3, 4):  # a resumed arm
        clock.now += 2.0
        console("collection", collection(iteration))
    assert capsys.readouterr().out.splitlines()[-1].endswith("2.0 s/it left 0:28 run ~0:28")


def test_a_warm_up_has_ten_lines_however_many_steps_and_a_terminal_is_drawn_on_five_times_a_second(
        console, clock, capsys, monkeypatch):
    for step in range(600):
        clock.now = step * 0.02
        console("sft_step", {"step": step, "loss": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[4] == "[1/3] warmup 300/600 loss 2.0 .02 s/it left 0:06"

    shown = []
    monkeypatch.setattr(module.StatusLine, "is_possible", True)
    monkeypatch.setattr(module.StatusLine, "is_due", property(lambda line: round(clock.now / 0.02) % 10 == 0))
    monkeypatch.setattr(module.StatusLine, "show", lambda line, text: shown.append(text))
    console.begin("warmup")
    for step in range(600):
        clock.now = step * 0.02
        console("sft_step", {"step": step, "loss": 2.0})
    assert 60 <= len(shown) <= 70 and capsys.readouterr().out == ""


def test_a_line_on_a_terminal_has_80_columns_at_most_and_a_pipe_gets_whole_names(console, clock, capsys, monkeypatch):
    def lines() -> list[str]:
        console.begin(NAME)
        for iteration in (0, 14):
            clock.now += 7000
            console("collection", {**collection(iteration), "kl": 1.234e-5})
        console("evaluation", evaluation(15))
        return shown + capsys.readouterr().out.splitlines()

    shown = []
    assert all(NAME in line for line in lines())
    monkeypatch.setattr(module.StatusLine, "is_possible", True)
    monkeypatch.setattr(module.StatusLine, "show", lambda line, text: shown.append(text))
    drawn = lines()
    assert len(drawn) == 3 and all(len(line) <= 80 and "ed_g" in line for line in drawn), drawn


def test_numbers_are_short():
    assert [short(x) for x in (0.0, 0.64, 21.3, 1.84, 3e-5, 0.05, 0.999, -0.5, 123.4, -0.002)] == [
        "0", ".64", "21", "1.8", "3e-05", ".05", "1.0", "-.50", "123", "-.002"]
    assert [clock_time(seconds) for seconds in (12, 100, 7385, 59.6)] == ["0:12", "1:40", "2:03:05", "1:00"]


def test_a_sweep_tells_each_members_last_numbers_and_the_time_left(tmp_path, clock, monkeypatch):
    said, drawn = [], []
    sweep = GridConsole(6, 1, jobs=2, say=said.append, clock=clock)
    for seed in (1, 2):
        sweep.started(f"seed={seed}", tmp_path / f"{seed}.log", donor="seed=0" if seed == 2 else None)
    (tmp_path / "1.log").write_text("resuming\n[2/3] a after 0: greedy .1\n[3/3] b 1/15 reward .2\n"
                                    "[3/3] b after 15: greedy .71 H .3\nreport: x\n")
    (tmp_path / "2.log").write_text("[2/3] a 3/15 reward .4\n")
    monkeypatch.setattr(module.StatusLine, "is_possible", True)
    monkeypatch.setattr(module.StatusLine, "show", lambda line, text: drawn.append(text))
    clock.now = 60.0
    sweep.look()
    sweep.look()  # too early
    assert drawn == ["seed=1: [3/3] b after 15: greedy .71 H .3\nseed=2: [2/3] a 3/15 reward .4"]
    sweep.ended("seed=1", 0)
    clock.now = 120.0
    sweep.ended("seed=2", 3)
    log = tmp_path / "2.log"
    assert said == [
        "1 of 6 runs finished earlier", f"[2/6] seed=1: see {tmp_path / '1.log'}",
        f"[3/6] seed=2, with the warm-up of seed=0: see {log}",
        "seed=1: finished after 1.0 min; b greedy .71 H .3; 4 left, ~2:00",  # 4 of a minute each, two at a time
        "seed=2: failed with status 3 after 2.0 min; 3 left, ~2:15",
    ]  # fmt: skip


def phases(wall: float, **seconds: float) -> dict:
    return {"wall_s": wall, **{f"{name}_s": 0.0 for name in PHASES}, **seconds}


def test_a_stages_last_line_says_where_its_time_went_and_the_reports_where_the_runs_did(console, capsys):
    console.begin("grpo")
    console("phases", {"iteration": 0, **phases(60, generate_s=40, log_pi_old_s=19.5, data_s=0.4)})
    assert capsys.readouterr().out == ""
    console("phases", phases(40, evaluate_s=40))
    console("phases", phases(1, report_s=1))
    assert capsys.readouterr().out.splitlines() == [
        "[2/3] grpo took 1:40: generate 40%, evaluate 40%, log pi old 20%",
        "run 1:41: generate 40%, evaluate 40%, log pi old 19%",
    ]
