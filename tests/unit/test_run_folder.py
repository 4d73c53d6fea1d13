"""Whose a run's folder is, what stands in it, and the lines of metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_edo.config import CheckpointConfig, GRPOConfig, GuardsConfig, ModelConfig, ParallelismConfig, RunConfig
from nemo_edo.configuration import resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.run_record import load_evaluation
from nemo_edo.run_folder import MetricsLog, RunFolder

CONFIG = RunConfig(model=ModelConfig(architecture={"model_type": "qwen2"}))


def opened(path: Path, config: RunConfig = CONFIG) -> tuple[RunFolder, Path | None]:
    """The folder taken, and what became of the earlier one."""
    folder = RunFolder(path)
    folder.check_free(resolved_yaml(config))
    return folder, folder.open(resolved_yaml(config))


def earlier_run(path: Path, config: RunConfig = CONFIG, marker: str = "first", *, finished: bool = True) -> RunFolder:
    """A run that is over: it came to its end, or was killed after its warm-up."""
    folder, _ = opened(path, config)
    (path / "marker").write_text(marker)
    folder.note("warmup", metrics_bytes=0)
    if finished:
        folder.write_json("summary.json", {})
        folder.note("report", metrics_bytes=0)
    folder.close()
    return folder


# --- whose folder it is -------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_free_and_made_with_its_parents(tmp_path: Path):
    RunFolder(tmp_path / "runs" / "a").check_free("{}")
    assert not (tmp_path / "runs").exists()  # looking makes nothing
    folder, earlier = opened(tmp_path / "runs" / "a")
    assert earlier is None
    assert (folder.path / "config.yaml").read_text() == resolved_yaml(CONFIG)


@pytest.mark.parametrize("leftover", [[], ["lock"], ["lock", ".config.yaml.tmp"]])
def test_a_folder_with_nothing_but_a_killed_starts_leftovers_is_free_and_used(tmp_path: Path, leftover: list[str]):
    for name in leftover:
        (tmp_path / name).write_text("")
    assert opened(tmp_path)[1] is None
    assert not tmp_path.with_name(f"{tmp_path.name}.1").exists()


def test_finished_runs_of_the_same_config_are_kept_under_numbered_names(tmp_path: Path):
    path = tmp_path / "a"
    earlier_run(path, marker="first")
    earlier_run(path, marker="second")
    folder, earlier = opened(path)
    assert earlier == tmp_path / "a.2"
    assert [(tmp_path / name / "marker").read_text() for name in ("a.1", "a.2")] == ["first", "second"]
    assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", "lock"]
    assert (folder.journal(), folder.is_begun) == ({}, False)


def test_an_unfinished_run_of_the_same_config_is_gone_on_with(tmp_path: Path):
    earlier_run(tmp_path / "a", finished=False)
    assert RunFolder(tmp_path / "a").is_begun
    folder, earlier = opened(tmp_path / "a")
    assert (earlier, (tmp_path / "a" / "marker").read_text()) == (None, "first")
    assert folder.journal() == {"warmup": {"metrics_bytes": 0}}


def test_a_run_whose_report_was_not_noted_is_unfinished(tmp_path: Path):
    folder = earlier_run(tmp_path / "a", finished=False)
    folder.write_json("summary.json", {})
    assert (folder.is_finished, folder.is_begun) == (False, True)
    folder.note("report", metrics_bytes=0)
    assert (folder.is_finished, folder.is_begun) == (True, False)


def test_a_numbered_name_that_is_taken_by_anything_is_passed_over(tmp_path: Path):
    (tmp_path / "a.1").write_text("a file of the user's")
    earlier_run(tmp_path / "a")
    assert opened(tmp_path / "a")[1] == tmp_path / "a.2"
    assert (tmp_path / "a.1").read_text() == "a file of the user's"


@pytest.mark.parametrize("finished", [False, True])
def test_a_folder_in_use_is_refused_with_its_holder_until_it_is_closed(tmp_path: Path, finished: bool):
    earlier_run(tmp_path / "a", finished=finished)
    holder = RunFolder(tmp_path / "a")
    holder._take()
    with pytest.raises(UserError, match=rf"a is in use by process {os.getpid()} on {socket.gethostname()}"):
        opened(tmp_path / "a")
    assert not (tmp_path / "a.1").exists()
    holder.close()
    opened(tmp_path / "a")


def test_a_process_forked_by_the_holder_does_not_keep_the_folder(tmp_path: Path):
    holder, _ = opened(tmp_path / "a")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        holder.close()
        opened(tmp_path / "a")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path):
    code = f"""
import os, signal
from pathlib import Path
from nemo_edo.run_folder import RunFolder
RunFolder(Path({str(tmp_path / "a")!r})).open("a: 1")
os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    RunFolder(tmp_path / "a").open("a: 1")


@pytest.mark.parametrize("change", [
    {"checkpoint": CheckpointConfig(keep=5)}, {"output_dir": "elsewhere"},
    {"parallelism": ParallelismConfig(tensor_model_parallel_size=2)}, {"guards": GuardsConfig(max_skipped_steps=9)},
])
def test_settings_that_change_no_number_but_by_rounding_may_change_and_are_written(tmp_path: Path, change: dict):
    earlier_run(tmp_path / "a", finished=False)
    other = replace(CONFIG, **change)
    assert opened(tmp_path / "a", other)[1] is None
    assert (tmp_path / "a" / "config.yaml").read_text() == resolved_yaml(other)


def test_a_damaged_journal_is_told(tmp_path: Path):
    folder = earlier_run(tmp_path / "a", finished=False)
    (tmp_path / "a" / "journal.json").write_text('{"warmup": ')
    with pytest.raises(UserError, match="journal.json is damaged"):
        folder.journal()


def test_a_folder_of_another_config_is_refused_with_the_first_key_and_both_values(tmp_path: Path):
    earlier_run(tmp_path / "a")
    other = replace(CONFIG, grpo=GRPOConfig(iterations=7), seed=3)
    with pytest.raises(UserError) as error:
        RunFolder(tmp_path / "a").check_free(resolved_yaml(other))
    message = str(error.value)
    assert "grpo.iterations is 3 there and 7 here (2 settings differ)" in message
    assert str(tmp_path / "a") in message
    assert (tmp_path / "a" / "marker").read_text() == "first"


@pytest.mark.parametrize(("there", "here", "told"), [
    ({"a": {"x": 1}}, {"a": {"x": 1, "new": 5}}, "a.new is None there and 5 here"),
    ({"a": {"x": 1}, "old": "v"}, {"a": {"x": 1}}, "old is 'v' there and None here"),
    ({"arms": {"grpo": {"alpha": 0}}}, {"arms": {}}, "arms.grpo is {'alpha': 0} there and None here"),
    ({"a": [1, 2]}, {"a": [2, 1]}, "a is [1, 2] there and [2, 1] here"),
])
def test_settings_that_one_side_lacks_or_that_are_lists_differ_too(tmp_path: Path, there, here, told: str):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(there))
    with pytest.raises(UserError) as error:
        RunFolder(tmp_path).check_free(yaml.safe_dump(here))
    assert told in str(error.value)


def test_the_order_of_settings_makes_no_difference(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("b: 1\na: 2\n")
    RunFolder(tmp_path).check_free("a: 2\nb: 1\n")


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(UserError, match="exists and holds no config.yaml of a run; choose another name=") as error:
        RunFolder(tmp_path).check_free("{}")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"just a text", b"- a\n- list\n", b"a: [", b"\xff\xfe", b""])
def test_a_config_yaml_that_is_no_runs_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError, match="is no config of a run") as error:
        RunFolder(tmp_path).check_free("a: 1\n")
    assert str(tmp_path / "config.yaml") in str(error.value)


def test_a_file_in_the_way_is_refused(tmp_path: Path):
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match="a is a file; choose another name="):
        RunFolder(tmp_path / "a").check_free("{}")


# --- what stands in it --------------------------------------------------------------------------------------------


def test_an_evaluation_is_read_back_as_it_was_written(tmp_path: Path):
    metrics = {"accuracy": (np.array([1.0, 0.25]), np.array([10.0, 10.0])),
               "entropy": (np.array([1 / 3, 1e-300]), np.array([7.0, 0.0]))}
    RunFolder(tmp_path).write_evaluation(Evaluation("grpo", ("test-1", "test-2"), metrics))
    read = load_evaluation(tmp_path / "evaluations" / "grpo.json")
    assert (read.arm, read.problems, list(read.metrics)) == ("grpo", ("test-1", "test-2"), list(metrics))
    for name, (sums, counts) in metrics.items():
        assert (read.metrics[name][0].tolist(), read.metrics[name][1].tolist()) == (sums.tolist(), counts.tolist())


def test_json_keeps_the_users_own_letters(tmp_path: Path):
    RunFolder(tmp_path).write_json("summary.json", {"name": "größer α"})
    assert "größer α" in (tmp_path / "summary.json").read_text(encoding="utf-8")


def test_json_with_a_number_that_is_not_finite_is_an_error_and_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        RunFolder(tmp_path).write_json("summary.json", {"loss": math.inf})
    assert not (tmp_path / "summary.json").exists()


# --- metrics.jsonl ------------------------------------------------------------------------------------------------


class Loggers:
    def __init__(self) -> None:
        self.calls: list[tuple[dict, int]] = []

    def __call__(self, numbers: dict, step: int) -> None:
        self.calls.append((numbers, step))


@pytest.fixture
def log(tmp_path: Path):
    loggers = Loggers()
    log = MetricsLog(tmp_path / "metrics.jsonl", loggers, writes=True)
    log.sent = loggers.calls
    return log


def lines(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_each_call_is_one_line_that_is_in_the_file_at_once(log: MetricsLog, tmp_path: Path):
    log("train_step", arm="grpo", iteration=0, step=5, loss=0.25)
    assert [(line["kind"], line["arm"], line["step"], line["loss"]) for line in lines(tmp_path)] == [
        ("train_step", "grpo", 5, 0.25)]
    log("collection", arm="grpo", note="two\nlines")
    assert [line["kind"] for line in lines(tmp_path)] == ["train_step", "collection"]


def test_what_a_clock_says_stands_under_time_only(log: MetricsLog, tmp_path: Path):
    log("train_step", arm="grpo", step=0, loss=0.25)
    [line] = lines(tmp_path)
    assert set(line) == {"kind", "arm", "step", "loss", "time"}
    assert set(line["time"]) == {"elapsed_s"}


def test_a_later_process_adds_its_lines_behind_the_earlier_ones(tmp_path: Path):
    for arm in ("first", "second"):
        MetricsLog(tmp_path / "metrics.jsonl", Loggers(), writes=True)("evaluation", arm=arm)
    assert [line["arm"] for line in lines(tmp_path)] == ["first", "second"]


def test_a_rank_that_does_not_write_makes_no_file_and_sends_nothing(tmp_path: Path):
    loggers = Loggers()
    MetricsLog(tmp_path / "metrics.jsonl", loggers, writes=False)("train_step", arm="grpo", step=0, loss=1.0)
    assert (list(tmp_path.iterdir()), loggers.calls) == ([], [])


def test_loggers_get_the_numbers_under_arm_and_kind_at_the_lines_step(log: MetricsLog):
    log("train_step", arm="grpo", iteration=3, step=17, loss=0.25, note="text")
    assert log.sent == [({"grpo/train_step/loss": 0.25}, 17)]


def test_loggers_get_an_evaluations_means_and_times_at_its_iteration(log: MetricsLog):
    metrics = {"accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6}, "pass@2": {"mean": 0.7, "low": 0.6, "high": 0.8}}
    log("evaluation", arm="grpo", iteration=5, final=True, metrics=metrics, lost=2.0, time={"evaluation_s": 1.5})
    assert log.sent == [({"grpo/evaluation/accuracy": 0.5, "grpo/evaluation/pass@2": 0.7, "grpo/evaluation/lost": 2.0,
                          "grpo/evaluation/evaluation_s": 1.5}, 5)]


def test_other_clocks_stand_beside_the_elapsed_time(log: MetricsLog, tmp_path: Path):
    log("train_step", arm="grpo", step=0, loss=0.25, skipped_steps=3, time={"step_s": 0.5})
    [line] = lines(tmp_path)
    assert line["time"] == {"elapsed_s": line["time"]["elapsed_s"], "step_s": 0.5}
    assert log.sent == [({"grpo/train_step/loss": 0.25, "grpo/train_step/skipped_steps": 3,
                          "grpo/train_step/step_s": 0.5}, 0)]


def test_the_evaluation_before_is_the_last_one_on_disk_else_that_of_the_start(tmp_path: Path):
    folder = RunFolder(tmp_path)
    one = Evaluation("grpo", ("p",), {"greedy_accuracy": (np.array([1.0]), np.array([1.0]))})
    for iteration in (0, 5, 10, None):
        folder.write_evaluation(one, iteration)
    start = folder.evaluation("warmup")
    assert [folder.evaluation_before("grpo", t) for t in (0, 5, 6, 11)] == [
        start, *(folder.evaluation("grpo", t) for t in (0, 5, 10))]
    assert folder.evaluation_before("edo", 5) == start
    assert load_evaluation(folder.evaluation("grpo", 5)).problems == load_evaluation(folder.evaluation("grpo")).problems


def test_lines_without_a_step_are_counted_for_each_arm_and_kind(log: MetricsLog):
    for arm in ("grpo", "edo"):
        for _ in range(2):
            log("collection", arm=arm, reward=0.5)
    assert [step for _, step in log.sent] == [0, 1, 0, 1]


def test_cut_takes_lines_back_and_later_ones_take_their_place(log: MetricsLog, tmp_path: Path):
    log("collection", arm="grpo", reward=0.5)
    kept = log.size
    log("collection", arm="grpo", reward=0.6)
    log("train_step", arm="grpo", step=0, loss=0.1)
    log.cut(kept)
    log("collection", arm="grpo", reward=0.7)
    assert [line["reward"] for line in lines(tmp_path)] == [0.5, 0.7]
    assert log.sent[-1] == ({"grpo/collection/reward": 0.7}, 1)  # counted from the lines that are kept


def test_a_later_process_counts_lines_and_time_on_from_where_it_cuts(log: MetricsLog, tmp_path: Path):
    log._start -= 1000.0
    log("collection", arm="grpo", reward=0.5)
    kept = log.size
    loggers = Loggers()
    later = MetricsLog(tmp_path / "metrics.jsonl", loggers, writes=True)
    later.cut(kept)
    later("collection", arm="grpo", reward=0.6)
    assert loggers.calls == [({"grpo/collection/reward": 0.6}, 1)]
    assert [line["time"]["elapsed_s"] >= 1000.0 for line in lines(tmp_path)] == [True, True]


@pytest.mark.parametrize("off", [-1, 1])
def test_a_place_that_is_no_lines_end_is_refused_and_the_file_left_alone(log: MetricsLog, tmp_path: Path, off: int):
    log("collection", arm="grpo", reward=0.5)
    before = lines(tmp_path)
    with pytest.raises(UserError, match=f"has {log.size} bytes there .* up to byte {log.size + off}"):
        log.cut(log.size + off)
    assert lines(tmp_path) == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_told_and_no_line_is_written(log: MetricsLog, tmp_path: Path, value: float):
    with pytest.raises(FloatingPointError, match="train_step of arm grpo .*grad_norm"):
        log("train_step", arm="grpo", step=0, loss=0.1, grad_norm=value)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
