"""Which runs may use a folder, and what is in it."""

import os
import re
import signal
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from helpers.responses import scored

from nemo_edo.config import CheckpointConfig, GuardsConfig, ModelConfig, ParallelismConfig, RunConfig
from nemo_edo.config.compose import resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation, load_evaluation
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.made_from import compare_served
from nemo_edo.run_folder import ENDPOINTS, NEW, REPLACEMENT, SUMMARY, NewEvaluations, RunFolder

CONFIG = RunConfig(model=ModelConfig(architecture={"model_type": "qwen2"}))
ONE = Evaluation("grpo", ("p",), {"greedy_accuracy": (np.array([1.0]), np.array([1.0]))})


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


@pytest.mark.parametrize("leftover", [[], ["lock"], ["lock", ".config.yaml.tmp"]])
def test_a_folder_that_is_not_there_or_has_only_a_killed_starts_leftovers_is_free_and_used(tmp_path: Path, leftover):
    path = tmp_path / "runs" / "a"
    RunFolder(path).check_free("{}")
    assert not path.parent.exists()  # looking makes nothing
    for name in leftover:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("")
    folder, earlier = opened(path)
    assert earlier is None and [entry.name for entry in path.parent.iterdir()] == ["a"]
    assert (folder.path / "config.yaml").read_text() == resolved_yaml(CONFIG)


def test_finished_runs_of_the_same_config_are_kept_under_the_next_free_numbered_name(tmp_path: Path):
    path = tmp_path / "a"
    (tmp_path / "a.2").write_text("a file of the user's")
    earlier_run(path, marker="first")
    earlier_run(path, marker="second")
    folder, earlier = opened(path)
    assert earlier == tmp_path / "a.3"
    assert [(tmp_path / name / "marker").read_text() for name in ("a.1", "a.3")] == ["first", "second"]
    assert (tmp_path / "a.2").read_text() == "a file of the user's"
    assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", "lock"]
    assert (folder.journal(), folder.is_begun) == ({}, False)


def test_a_run_is_unfinished_until_its_report_is_noted_and_resumes_in_its_folder(tmp_path: Path):
    killed = earlier_run(tmp_path / "a", finished=False)
    killed.write_json("summary.json", {})
    with pytest.raises(UserError, match="has not finished"):
        killed.take(finished=True)  # as a command for finished runs, which leaves it free
    folder, earlier = opened(tmp_path / "a")
    assert (earlier, (tmp_path / "a" / "marker").read_text()) == (None, "first")
    assert (folder.is_finished, folder.is_begun) == (False, True)
    assert folder.journal() == {"warmup": {"metrics_bytes": 0}}
    folder.note("report", metrics_bytes=0)
    assert (folder.is_finished, folder.is_begun) == (True, False)
    (tmp_path / "a" / "journal.json").write_text('{"warmup": ')
    with pytest.raises(UserError, match="journal.json"):
        folder.journal()


@pytest.mark.parametrize("finished", [False, True])
def test_a_folder_in_use_is_refused_with_its_holder_until_it_is_closed(tmp_path: Path, finished: bool):
    earlier_run(tmp_path / "a", finished=finished)
    holder = RunFolder(tmp_path / "a")
    holder.take()
    with pytest.raises(UserError, match=rf"a is in use by process {os.getpid()} on {socket.gethostname()} since 2"):
        opened(tmp_path / "a")
    assert not (tmp_path / "a.1").exists()
    holder.close()
    opened(tmp_path / "a")


@pytest.mark.parametrize("name", ["test_time", "evaluations/grpo.json", "checkpoints/grpo/weights", "pipe"])
def test_a_folder_with_a_link_or_a_pipe_in_it_is_not_written_to(tmp_path: Path, name: str):
    folder = earlier_run(tmp_path / "a")
    (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder.path / name) if name == "pipe" else (folder.path / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"{folder.path / name} is a link")):
        folder.take()


def test_a_killed_replacement_of_evaluations_is_completed_by_whoever_takes_the_folder(tmp_path, monkeypatch):
    folder = earlier_run(tmp_path / "a")
    (folder.path / "metrics.jsonl").write_text("{}\n")
    RolloutStore(folder.evaluated("grpo", "greedy")).write(0, [scored()]).rename(
        folder.evaluated("grpo", "greedy") / "iter_00000" / "rank_1_of_2.parquet")
    new = NewEvaluations(folder.path, ["grpo"], "all")
    RolloutStore(new.evaluated("grpo", "greedy")).write(0, [])
    new.write_evaluation(ONE)
    assert new.evaluation("warmup") == folder.evaluation("warmup") and not folder.evaluation("grpo").exists()
    (new.new / "metrics.jsonl").write_text("{}\n{}\n")
    monkeypatch.setattr(NewEvaluations, "replace_evaluations", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        new.put()
    folder.take()
    assert (folder.path / "metrics.jsonl").read_text() == "{}\n{}\n"
    assert load_evaluation(folder.evaluation("grpo")).problems == ONE.problems
    assert RolloutStore(folder.evaluated("grpo", "greedy")).read(0) == []
    assert not (folder.path / REPLACEMENT).exists() and not [*(folder.path / NEW).iterdir()]


def test_guards_may_change_unless_they_say_which_steps_are_taken(tmp_path: Path):
    earlier_run(tmp_path / "a", replace(CONFIG, guards=GuardsConfig(on_grad_norm_spike="skip")), finished=False)
    with pytest.raises(UserError, match="guards.on_grad_norm_spike is 'skip' there and 'warn' here"):
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


@pytest.mark.parametrize("change", [
    {"checkpoint": CheckpointConfig(keep=5)}, {"output_dir": "elsewhere"},
    {"parallelism": ParallelismConfig(tensor_model_parallel_size=2)}, {"model": replace(CONFIG.model, seq_length=9999)},
    {"guards": GuardsConfig(max_skipped_steps=9)}, {"search": replace(CONFIG.search, width=7)},
])
def test_settings_that_change_no_number_but_by_rounding_may_change_and_are_written(tmp_path: Path, change: dict):
    earlier_run(tmp_path / "a", finished=False)
    other = replace(CONFIG, **change)
    assert opened(tmp_path / "a", other)[1] is None
    assert (tmp_path / "a" / "config.yaml").read_text() == resolved_yaml(other)


def test_another_model_of_an_endpoint_is_another_run_unless_that_is_allowed(tmp_path: Path):
    there, here = ({"generation": {"servers": {"urls": [url], "model": model}}}
                   for url, model in (("http://a", "one"), ("http://b", "two")))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(there))
    RunFolder(tmp_path).check_free(yaml.safe_dump({"generation": {"servers": {"urls": ["http://b"], "model": "one"}}}))
    with pytest.raises(UserError, match="generation.servers.model is 'one' there and 'two' here"):
        RunFolder(tmp_path).check_free(yaml.safe_dump(here))
    RunFolder(tmp_path).check_free(yaml.safe_dump(here | {"allow_changed": [ENDPOINTS]}))
    del here["generation"]["servers"]["model"]  # asked of the server, which tells which model it has
    RunFolder(tmp_path).check_free(yaml.safe_dump(here))
    (tmp_path / SUMMARY).write_text("{}")  # finished: no server is asked any more
    with pytest.raises(UserError, match="generation.servers.model is 'one' there and None here"):
        RunFolder(tmp_path).check_free(yaml.safe_dump(here))


def test_results_are_in_the_folder_where_its_path_is_relative(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs") / "a")
    folder.write_evaluation(ONE)
    folder.write_json("samples.json", [])
    assert load_evaluation(tmp_path / folder.evaluation("grpo")).arm == "grpo"
    assert (tmp_path / "runs" / "a" / "samples.json").is_file()


@pytest.mark.parametrize(("noted", "served", "to_note"), [
    (None, "m (root)", "m (root)"), ("", "m (m)", "m (m)"), ("m (root)", "m (root)", "m (root)"),
    ("m (m)", "m (a (b))", "m (a (b))"), ("m (root)", "m (m)", "m (root)"), ("m (root)", "m (other)", None),
    ("n (n)", "m (m)", None), ("m (root)", "n (n)", None)])
def test_a_served_model_is_the_noted_one_by_its_root_where_both_sides_tell_it(noted, served, to_note, capsys):
    if to_note is not None:
        assert compare_served(noted, served, []) == (to_note, [])
        return
    with pytest.raises(UserError, match="serve that model"):
        compare_served(noted, served, [])
    now, (changed,) = compare_served(noted, served, [ENDPOINTS])
    assert now == served and noted in changed and changed in capsys.readouterr().err


@pytest.mark.parametrize(("there", "here", "told"), [
    ({"a": {"x": 3, "y": 1}, "seed": 1}, {"a": {"x": 7, "y": 1}, "seed": 2},
     "a.x is 3 there and 7 here (2 settings differ)"),
    ({"a": {"x": 1}}, {"a": {"x": 1, "new": 5}}, "a.new is None there and 5 here"),
    ({"a": [1, 2]}, {"a": [2, 1]}, "a is [1, 2] there and [2, 1] here"),
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}, None),
    ({"sampling": {}}, {"sampling": {"stop_token_ids": []}}, None),  # a setting that was added since, at its default
])
def test_a_folder_of_another_config_is_refused_with_the_first_key_and_both_values(tmp_path: Path, there, here, told):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(there, sort_keys=False))
    with pytest.raises(UserError, match=f"{tmp_path}.*{re.escape(told)}") if told else nullcontext():
        RunFolder(tmp_path).check_free(yaml.safe_dump(here, sort_keys=False))


@pytest.mark.parametrize(("name", "content", "told"), [
    *[("a/config.yaml", content, "a/config.yaml: ") for content in (b"just a text", b"a: [", b"\xff\xfe", b"")],
    ("a/thesis.tex", b"do not lose me", "a.* has no config.yaml"),
    ("a", b"a file", "a is a file"),
])
def test_a_path_that_holds_anything_but_a_run_is_refused_by_name(tmp_path: Path, name: str, content: bytes, told: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/{told}"):
        RunFolder(tmp_path / "a").check_free("a: 1\n")


def test_the_evaluation_before_is_the_last_one_on_disk_else_that_of_the_start(tmp_path: Path):
    folder = RunFolder(tmp_path)
    for iteration in (0, 5, 10, None):
        folder.write_evaluation(ONE, iteration)
    start = folder.evaluation("warmup")
    assert [folder.evaluation_before("grpo", t) for t in (0, 5, 6, 11)] == [
        start, *(folder.evaluation("grpo", t) for t in (0, 5, 10))]
    assert folder.evaluation_before("edo", 5) == start
    assert load_evaluation(folder.evaluation("grpo", 5)).problems == ONE.problems
