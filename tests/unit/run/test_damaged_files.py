"""Every kind of file that is read, in every state that it may be in: a message with its name, and never a traceback."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.problem_files import ROWS, write_rows
from helpers.responses import scored
from helpers.reward_models import write_own_reward_model
from helpers.run_folder import write_run_folder
from helpers.stored_run import write_stored_run
from helpers.tiny_models import random_batch, write_tiny_model

from nemo_edo.config import DataConfig
from nemo_edo.config.compose import resolved_yaml
from nemo_edo.data.batching import read_batch, write_batch
from nemo_edo.data.model_folder import check_files
from nemo_edo.data.problems import load_problems
from nemo_edo.data.tokenizer import load_tokenizer, read_stop_tokens
from nemo_edo.errors import UserError
from nemo_edo.report.run_set import read_run
from nemo_edo.reward_models.formats import load_format, read_reward_folder
from nemo_edo.rewards.judge import JudgeCache, Reply
from nemo_edo.rollouts.store import RolloutStore, ScoreStore, StepScores
from nemo_edo.run.metrics_log import MetricsLog
from nemo_edo.run.policy_evaluation import evaluate_stored
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import RunFolder
from nemo_edo.search.job import SearchRecord, SearchStore
from nemo_edo.utils.files import read_object


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 128
    path.write_bytes(content)


def another_type(path: Path) -> None:
    path.write_text("[1, 2]\n" if path.suffix != ".parquet" else "text")


def folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "another type": another_type,
    "a folder": folder_there,
}

@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with one of each."""
    folder = tmp_path_factory.mktemp("files")
    run = RunFolder(write_stored_run(folder / "run", iterations=1))
    run.note("warmup", metrics_bytes=0)
    run.write_json("samples/grpo.json", {"problem": []})
    config = resolved_yaml(open_run(run.path).cfg)
    (folder / "config").mkdir()
    for name in ("config.yaml", "expected"):
        (folder / "config" / name).write_text(config)
    reported = write_run_folder(folder / "reported", arms=("grpo",), iterations=3, problems=4)
    RunFolder(reported).write_json("test_time/grpo.json", json.loads((reported / "evaluations/grpo.json").read_text()))
    log = MetricsLog(folder / "metrics.jsonl", lambda *_: None)
    for step in range(9):
        log("train_step", arm="grpo", step=step, loss=0.5)
    (folder / "mark.json").write_text(json.dumps(log.mark))
    RolloutStore(folder / "rollouts").write(0, [scored(sample=n) for n in range(40)])
    RolloutStore(folder / "parts").write_part(0, [scored(sample=n) for n in range(40)])
    write_rows(folder / "problems.jsonl", ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "problems.parquet")
    write_tiny_model(folder / "model")
    (folder / "model" / "model.safetensors").rename(folder / "model" / "weights.safetensors")
    names = {"weight_map": {"some.weight": "weights.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(names))
    write_own_reward_model(folder / "reward")
    write_batch(random_batch(), {"metrics": {}}, folder / "batch.safetensors")
    ScoreStore(folder / "scores").write(
        "sampled", {("p", n): StepScores((0.5,) * 9) for n in range(9)}, rollouts="x", made_by="y")
    SearchStore(folder / "search", {"name": "x"}).write([
        SearchRecord(f"p{n}", 1.0, "2", True, "right", True, True, 0.5, "1 + 1 = 2", 5, 9, 3, 3, 2) for n in range(9)])
    with closing(JudgeCache(folder / "judge.sqlite")) as cache:
        for n in range(99):
            cache.put(f"{n}", Reply(True, "verdict: correct" * 9, 1, 1))
    return folder


def resume(folder: Path) -> None:
    """As a run of the same config does that begins where this one was killed."""
    (folder / "config" / "journal.json").write_text("{}")
    RunFolder(folder / "config").check_free((folder / "config" / "expected").read_text())


def cut_metrics(folder: Path) -> None:
    log = MetricsLog(folder / "metrics.jsonl", lambda *_: None)
    log.cut(json.loads((folder / "mark.json").read_text()))


def ask_cache(folder: Path) -> list[bool | None]:
    """The verdicts; damage in a reply's text, which nothing reads, leaves them the same."""
    with closing(JudgeCache(folder / "judge.sqlite")) as cache:
        return [cache.get(f"{number}") for number in range(99)]


def model(folder: Path) -> None:
    """Whatever is looked at before a model is built."""
    check_files(folder / "model")
    read_stop_tokens(folder / "model", load_tokenizer(folder / "model"))


def reported(folder: Path) -> None:
    read_run(folder / "reported")


def reward_model(folder: Path) -> None:
    load_format(read_reward_folder(folder / "reward"))


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "config/config.yaml": (resume, "half"),  # the rest is at its defaults
    "run/config.yaml": (lambda folder: open_run(folder / "run"), "half"),
    "run/journal.json": (lambda folder: RunFolder(folder / "run").journal(), "missing"),
    "run/samples/grpo.json": (lambda folder: read_object(folder / "run/samples/grpo.json", ()), ""),
    "run/evaluations/grpo/sampled/iter_00001/rank_0_of_1.parquet": (
        lambda folder: evaluate_stored([folder / "run"], None, ["evaluation.samples=5"]), ""),
    "metrics.jsonl": (cut_metrics, ""),
    "reported/config.yaml": (reported, "half"),
    "reported/summary.json": (reported, ""),
    "reported/metrics.jsonl": (reported, "half"),  # nothing tells how many lines there were
    "reported/samples.json": (reported, ""),
    "reported/evaluations/grpo.json": (reported, ""),
    "reported/test_time/grpo.json": (reported, "missing, a folder"),
    "rollouts/iter_00000/rank_0_of_1.parquet": (lambda folder: RolloutStore(folder / "rollouts").read(0), ""),
    "parts/iter_00000/parts/part_00000.parquet": (
        lambda folder: RolloutStore(folder / "parts").stored(0), "missing, a folder"),
    "problems.jsonl": (lambda folder: load_problems(folder / "problems.jsonl", DataConfig()), ""),
    "problems.parquet": (lambda folder: load_problems(folder / "problems.parquet", DataConfig()), ""),
    "model/config.json": (model, ""),
    "model/generation_config.json": (model, "missing, a folder"),
    "model/tokenizer.json": (model, ""),
    "model/tokenizer_config.json": (model, "missing, a folder"),
    "model/weights.safetensors": (model, "flipped"),  # read as the model is built
    "model/model.safetensors.index.json": (model, ""),
    "reward/config.json": (reward_model, ""),
    "reward/reward_model.json": (reward_model, ""),
    "reward/tokenizer.json": (reward_model, ""),
    "batch.safetensors": (lambda folder: read_batch(folder / "batch.safetensors"), "flipped"),  # has a checksum
    "scores/sampled.parquet": (lambda folder: ScoreStore(folder / "scores").read("sampled"), ""),
    "search/results.parquet": (
        lambda folder: SearchStore(folder / "search", {"name": "x"}).found(), "missing, a folder"),
    "judge.sqlite": (ask_cache, "missing"),
}
"""What reads a file, and the damages that it need not notice: a file may be absent, or begin anew. Parquet has parts
that say nothing, such as a column's statistics: then what is read is the same."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named_in_one_message(place: Path, name: str, damage: str):
    path, (read, unnoticed) = place / name, READERS[name]
    expected, content = read(place), path.read_bytes()
    try:
        DAMAGES[damage](path)
        try:
            found = read(place)
        except UserError as error:
            assert str(path) in str(error) or str(path.parent) in str(error)
            assert "\n" not in str(error).strip() or str(path) in str(error).splitlines()[0]
        else:
            assert damage in unnoticed or (found == expected and found is not None)
    finally:
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
