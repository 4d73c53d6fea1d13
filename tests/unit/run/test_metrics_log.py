"""The lines of metrics.jsonl: what is logged, what a resumed run keeps, and what the terminal shows of them."""

import json
import math
from pathlib import Path

import pytest

from nemo_edo.errors import UserError
from nemo_edo.run.metrics_log import MetricsLog, RunConsole


def open_log(folder: Path) -> MetricsLog:
    """Its ``sent`` is what the loggers got: [(numbers, step)]."""
    sent = []
    log = MetricsLog(folder / "metrics.jsonl", lambda numbers, step: sent.append((numbers, step)))
    log.sent = sent
    return log


@pytest.fixture
def log(tmp_path: Path):
    return open_log(tmp_path)


def lines(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_each_call_is_one_line_that_is_in_the_file_at_once_with_clocks_only_under_time(tmp_path: Path):
    log = open_log(tmp_path)
    log("train_step", arm="grpo", step=5, loss=0.25, skipped_steps=3, time={"step_s": 0.5})
    [line] = lines(tmp_path)
    assert line.pop("time").keys() == {"elapsed_s", "step_s"}
    assert line == {"kind": "train_step", "arm": "grpo", "step": 5, "loss": 0.25, "skipped_steps": 3}
    assert log.sent == [({"grpo/train_step/loss": 0.25, "grpo/train_step/skipped_steps": 3,
                          "grpo/train_step/step_s": 0.5}, 5)]
    log("collection", arm="größer α", note="two\nlines")
    open_log(tmp_path)("evaluation", arm="grpo")  # a later process
    assert [(line["kind"], line["arm"]) for line in lines(tmp_path)] == [
        ("train_step", "grpo"), ("collection", "größer α"), ("evaluation", "grpo")]


def test_cut_takes_lines_back_and_later_lines_are_counted_from_those_kept(log: MetricsLog, tmp_path: Path):
    for arm in ("grpo", "edo"):
        log("collection", arm=arm, reward=0.5)
    kept = log.mark
    log("collection", arm="grpo", reward=0.6)
    log("train_step", arm="grpo", step=0, loss=0.1)
    assert [step for _, step in log.sent] == [0, 0, 1, 0]
    log.cut(kept)
    log("collection", arm="grpo", reward=0.7)
    assert [line["reward"] for line in lines(tmp_path)] == [0.5, 0.5, 0.7]
    assert log.sent[-1] == ({"grpo/collection/reward": 0.7}, 1)


def test_a_place_that_is_not_a_lines_end_or_a_changed_digit_before_it_is_refused_and_the_file_left_alone(log, tmp_path):
    path = tmp_path / "metrics.jsonl"
    for reward in (0.5, 0.25):
        log("collection", arm="grpo", reward=reward)
    kept = log.mark
    for off in (-1, 1):
        with pytest.raises(UserError, match=f"first {log.size + off} bytes"):
            log.cut({"metrics_bytes": log.size + off})
    later = open_log(tmp_path)
    later.cut(kept)  # by another process, which has not written the lines itself
    assert later.mark == kept and len(lines(tmp_path)) == 2
    later("collection", arm="grpo", reward=0.75)
    path.write_text(path.read_text().replace("0.25", "0.35"))
    with pytest.raises(UserError, match=f"{path}: its first {kept['metrics_bytes']} bytes"):
        open_log(tmp_path).cut(kept)
    open_log(tmp_path).cut({"metrics_bytes": kept["metrics_bytes"]})  # noted by an earlier version


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_number_that_is_not_finite_is_reported_and_no_line_is_written(log: MetricsLog, tmp_path: Path, value: float):
    with pytest.raises(FloatingPointError, match="train_step of arm grpo .*grad_norm"):
        log("train_step", arm="grpo", step=0, loss=0.1, grad_norm=value)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_warm_ups_step_whose_loss_is_not_finite_has_a_line_too(capsys):
    RunConsole({"warmup": 4, "grpo": 2})("sft_step", {"step": 1, "loss": None})
    assert capsys.readouterr().out == "[1/2] warmup 2/4 loss -\n"


def collection(iteration: int) -> dict:
    return {"iteration": iteration, "reward": 0.644, "kl": 0.0804, "entropy": 0.26, "response_length": 21.2, "lag": 0}


def test_an_iterations_line_has_the_samples_numbers_and_the_time_left_of_arm_and_run(capsys):
    now = 0.0
    console = RunConsole({"warmup": 600, "grpo": 15, "ed_grpo": 15}, lambda: now)
    console.begin("grpo")
    for iteration in range(9):
        now = 2.0 * iteration
        console("collection", collection(iteration))
        console("train_step", {"loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[2/3] grpo 1/15 reward .64 KL .08 H .26 len 21"
    # 8 iterations took 2 s each: 7 are left of this arm, and 15 of the other.
    assert lines[-1] == "[2/3] grpo 9/15 reward .64 KL .08 H .26 len 21 2.0 s/it left 0:14 run ~0:44"
    means = {"greedy_accuracy": 0.71, "vote@4": 0.7, "vote@10": 0.8, "pass@10": 1, "distinct_4": 0.44, "entropy": 0.31}
    metrics = {name: {"mean": mean} for name, mean in means.items()}
    console("evaluation", {"iteration": 15, "final": True, "metrics": metrics, "evaluation_s": 6.0})
    assert capsys.readouterr().out == "[2/3] grpo after 15: greedy .71 vote@10 .80 pass@10 1.0 dist-4 .44 H .31\n"
    console.begin("ed_grpo")  # each arm ends with an evaluation
    for iteration in (3, 4):  # a resumed arm
        now += 2.0
        console("collection", collection(iteration))
    assert capsys.readouterr().out.splitlines()[-1].endswith("2.0 s/it left 0:28 run ~0:28")
