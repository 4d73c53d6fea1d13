"""From a config to the run's data, and the errors of the input that are found on the way."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_edo import factory
from nemo_edo.algorithms.grpo import GRPO
from nemo_edo.algorithms.idpo import IDPO
from nemo_edo.config import ArithmeticConfig, RunConfig
from nemo_edo.configuration import arm_configs, compose_run
from nemo_edo.data.arithmetic_model import write_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.run_folder import RunFolder

GOOD = [{"question": f"{i} + {i + 1}", "answer": f"{i} + {i + 1} = {2 * i + 1}\n#### {2 * i + 1}"} for i in range(6)]
SMALL = ["sft.steps=2", "data.arithmetic.warmup_problems=40", "data.arithmetic.train_problems=6",
         "data.arithmetic.test_problems=5"]


def write_rows(path: Path, rows: Sequence[dict | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return compose_run("quickstart", [*SMALL, "name=a", f"output_dir={tmp_path / 'runs'}", *overrides])


@pytest.fixture
def own_files(tmp_path: Path):
    """own_files(train rows, test rows, warmup rows) -> overrides that name the written files."""

    def write(train=tuple(GOOD[:3]), test=tuple(GOOD[3:]), warmup=None) -> list[str]:
        overrides = [f"data.train={write_rows(tmp_path / 'train.jsonl', train)}",
                     f"data.test={write_rows(tmp_path / 'test.jsonl', test)}"]
        if warmup is not None:
            overrides.append(f"data.warmup={write_rows(tmp_path / 'warmup.jsonl', warmup)}")
        return overrides

    return write


def load(tmp_path: Path, *overrides: str) -> factory.Data:
    cfg = config(tmp_path, *overrides)
    return factory.load_checked_data(cfg, RunFolder(Path(cfg.output_dir) / cfg.name), arm_configs(cfg).values())


def error_of(tmp_path: Path, *overrides: str) -> str:
    """The message; no run folder may be left behind."""
    with pytest.raises(UserError) as error:
        load(tmp_path, *overrides)
    assert not (tmp_path / "runs").exists()
    return str(error.value)


# --- good input ---------------------------------------------------------------------------------------------------


def test_built_in_data_is_loaded_before_the_run_folder_exists(tmp_path: Path):
    data = load(tmp_path)
    assert (len(data.train), len(data.test), len(data.solutions)) == (6, 5, 40)
    assert not (tmp_path / "runs").exists()


def test_built_in_files_in_the_run_folder_hold_the_data_that_was_checked(tmp_path: Path):
    cfg = config(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "a")
    checked = factory.load_checked_data(cfg, folder, [cfg.grpo])
    factory.write_builtin_files(cfg, folder)
    there = factory.load_data(cfg, folder)
    assert (there.prompts, there.solutions) == (checked.prompts, checked.solutions)
    assert [p.question for p in there.train] == [p.question for p in checked.train]
    assert (folder.base / "model.safetensors").is_file()


def test_the_run_seed_fixes_the_random_weights_of_a_built_in_model(tmp_path: Path):
    weights = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        folder = RunFolder(tmp_path / name)
        factory.write_builtin_files(config(tmp_path, f"seed={seed}"), folder)
        weights.append((folder.base / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_the_warm_up_and_every_arm_get_the_adapters_of_the_config(tmp_path: Path):
    cfg, run = config(tmp_path, "lora.rank=2", "threads=1"), RunFolder(tmp_path)
    factory.write_builtin_files(cfg, run)
    for training in (cfg.sft, *arm_configs(cfg).values()):
        assert factory.build_model(cfg, run, training).built.lora == cfg.lora


def test_own_files_with_the_built_in_model_are_loaded(tmp_path: Path, own_files):
    data = load(tmp_path, *own_files())
    assert [p.id for p in data.train] == ["train-1", "train-2", "train-3"]
    assert set(data.prompts) == {p.id for p in [*data.train, *data.test]}
    assert len(data.solutions) == 3  # without a warm-up file the training problems' solutions


def test_a_warmup_file_gives_the_solutions_and_no_prompts(tmp_path: Path, own_files):
    data = load(tmp_path, *own_files(train=GOOD[:2], test=GOOD[2:3], warmup=GOOD[3:]))
    assert (len(data.train), len(data.solutions), len(data.prompts)) == (2, 3, 3)


def test_without_a_warmup_the_warmup_file_is_not_even_read(tmp_path: Path, own_files):
    data = load(tmp_path, *own_files(), f"data.warmup={tmp_path / 'missing.jsonl'}", "sft.steps=0")
    assert data.solutions == []


def test_skipped_rows_of_all_files_are_counted_and_the_good_ones_stay(tmp_path: Path, own_files):
    files = own_files(train=[*GOOD[:2], "{broken", {"question": "no answer"}], test=[GOOD[3], {"answer": "#### 1"}])
    data = load(tmp_path, *files, "data.on_bad_rows=skip")
    assert (len(data.train), len(data.test), data.skipped_rows) == (2, 1, 3)


def test_a_warmup_file_that_is_the_training_file_counts_its_bad_rows_once(tmp_path: Path, own_files):
    files = own_files(train=[*GOOD[:2], "{broken"])
    assert load(tmp_path, *files, "data.on_bad_rows=skip").skipped_rows == 1


def test_each_arm_gets_the_objective_of_its_config(tmp_path: Path):
    cfg = config(tmp_path, "seed=7", "~arms", "+arms={a: {alpha: 0}, b: {algorithm: idpo}}")
    data = load(tmp_path, "seed=7")
    arms = arm_configs(cfg)
    grpo, idpo = (factory.build_objective(cfg, arm, data) for arm in arms.values())
    questions = {problem.id: problem.question for problem in data.train}
    assert grpo == GRPO(arms["a"], questions, max_new_tokens=32, pad_id=data.pad_id)
    assert idpo == IDPO(arms["b"], pad_id=data.pad_id, seed=7)


# --- bad problem files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "row", "told"), [
    ("train", "{broken", "is not valid JSON"),
    ("test", {"question": "1 + 1"}, 'has no "answer"'),
    ("train", {"answer": "#### 2"}, 'has no "question"'),
    ("warmup", {"question": "1 + 1", "answer": "1 + 1 = 2"}, 'does not end in one "#### number" line'),
    ("test", {"question": "0  + 1", "answer": "#### 1"}, "the same as on line 1"),
])
def test_a_bad_row_is_told_with_its_file_and_line(tmp_path: Path, own_files, file: str, row, told: str):
    files = own_files(**{"warmup": GOOD[:3], file: [*GOOD[:3], row]})
    message = error_of(tmp_path, *files)
    assert f"{tmp_path / file}.jsonl:4: " in message
    assert told in message
    assert "--on-bad-rows=skip" in message


@pytest.mark.parametrize("file", ["train", "test", "warmup"])
def test_a_missing_or_empty_file_is_told_by_name(tmp_path: Path, own_files, file: str):
    files = own_files(warmup=GOOD[:3])
    path = tmp_path / f"{file}.jsonl"
    path.unlink()
    assert f"{path}: cannot be read (No such file or directory)" in error_of(tmp_path, *files)
    path.write_text("\n")
    assert f"{path}: has no rows" in error_of(tmp_path, *files)


def test_train_and_test_files_of_one_name_are_told(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "part.jsonl", GOOD[:3])
    message = error_of(tmp_path, f"data.train={tmp_path}/one/part.jsonl", f"data.test={tmp_path}/two/part.jsonl")
    assert "3 problems share an id (the first part-1); rename one of the files" in message


def test_one_file_as_train_and_test_is_told(tmp_path: Path, own_files):
    own_files()
    path = tmp_path / "train.jsonl"
    assert "share an id" in error_of(tmp_path, f"data.train={path}", f"data.test={path}")


# --- what does not fit --------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_told_with_its_line(tmp_path: Path, own_files):
    long = {"question": " + ".join("1" * 40), "answer": "#### 40"}
    message = error_of(tmp_path, *own_files(test=[GOOD[3], long]))
    assert f"{tmp_path / 'test.jsonl'}:2: the prompt has 80 tokens, more than the 32" in message


def test_a_solution_longer_than_the_context_is_told_with_its_line(tmp_path: Path, own_files):
    long = {"question": "1 + 1", "answer": "\n".join(["1 + 1 = 2"] * 12) + "\n#### 2"}
    message = error_of(tmp_path, *own_files(train=[GOOD[0], long]))
    assert f"{tmp_path / 'train.jsonl'}:2: the prompt with its solution has" in message


def test_text_that_the_tokenizer_does_not_know_is_told_with_its_line(tmp_path: Path, own_files):
    message = error_of(tmp_path, *own_files(train=[GOOD[0], {"question": "one and two", "answer": "#### 3"}]))
    assert f"{tmp_path / 'train.jsonl'}:2: the tokenizer" in message


def test_more_built_in_problems_than_there_are_is_told(tmp_path: Path):
    assert "data.arithmetic asks for 100000 test problems" in error_of(
        tmp_path, "data.arithmetic.test_problems=100000")


def test_an_unknown_architecture_field_is_told_before_the_run_folder_exists(tmp_path: Path):
    assert "model.architecture.num_layer is no field" in error_of(tmp_path, "model.architecture.num_layer=3")


# --- the tokenizer of a model folder ------------------------------------------------------------------------------


def model_folder_without(tmp_path: Path, damage) -> str:
    folder = tmp_path / "model"
    write_tokenizer(folder, ArithmeticConfig())
    damage(folder)
    return error_of(tmp_path, f"model.path={folder}", "model.architecture=null")


def no_files(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("damage", [
    no_files,
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / "tokenizer.json").write_text("{"),
    lambda folder: (folder / "tokenizer.json").write_text("{}"),
], ids=["no files", "no tokenizer.json", "cut tokenizer.json", "empty tokenizer.json"])
def test_a_tokenizer_that_cannot_be_loaded_is_told_with_its_folder(tmp_path: Path, damage):
    assert f"the tokenizer of {tmp_path / 'model'} cannot be loaded" in model_folder_without(tmp_path, damage)


def test_a_tokenizer_without_an_end_is_told(tmp_path: Path):
    def without_eos(folder: Path) -> None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["eos_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "special_tokens_map.json").unlink()

    assert "names no eos_token" in model_folder_without(tmp_path, without_eos)


# --- disk space ---------------------------------------------------------------------------------------------------


def test_a_disk_without_room_for_all_arms_and_iterations_is_told_before_the_run_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def disk_usage(path) -> SimpleNamespace:
        asked.append(Path(path))
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = 2**62
    load(tmp_path)
    rollouts = 6 * 10  # problems x samples
    tokens = 8 + 32  # a prompt of the built-in task, and max_new_tokens
    iterations = compose_run("quickstart", []).grpo.iterations
    ids_alone = rollouts * tokens * 4 * iterations  # of one of the arms
    free = ids_alone
    message = error_of(tmp_path)
    assert re.match(f"{tmp_path / 'runs' / 'a'}: needs .* for rollouts but has .* free", message)
    assert set(asked) == {tmp_path}  # the nearest folder that exists


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """space(arms, ...): the bytes that a run of two iterations asks for."""
    needs = []
    monkeypatch.setattr(factory, "check_disk_space", lambda folder, needed: needs.append(needed))

    def needed(arms: str, *overrides: str) -> int:
        whole = ("grpo.problems_per_iteration=null", "grpo.iterations=2", "evaluation.every=0", "~arms")
        load(tmp_path, *whole, f"+arms={arms}", *overrides)
        return needs.pop()

    return needed


@pytest.mark.parametrize(("arms", "iterations", "evaluations"), [
    ("{a: {}}", 2, 2), ("{a: {}, b: {}}", 4, 3), ("{a: {}, b: {iterations: 5}}", 7, 3),
    ("{a: {problems_per_iteration: 99}}", 2, 2),
])
def test_the_space_asked_for_is_that_of_every_arms_iterations_and_all_evaluations(
    space, arms: str, iterations: int, evaluations: int
):
    """One evaluation is the start's."""
    iteration = space("{a: {iterations: 2}}") - space("{a: {iterations: 1}}")
    evaluation = (space("{a: {iterations: 1}}") - iteration) // 2
    assert space(arms) == iterations * iteration + evaluations * evaluation


def test_short_evaluations_ask_for_space_too(space):
    every, none = (space("{a: {}}", "evaluation.rollouts=1", f"evaluation.every={every}") for every in (1, 0))
    iterations = 2 * (none - space("{a: {iterations: 1}}", "evaluation.rollouts=1"))
    assert every - none == none - iterations  # two short ones, as there are two final ones: the start's and the arm's


def test_small_collections_ask_for_less_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needs = []
    monkeypatch.setattr(factory, "check_disk_space", lambda folder, needed: needs.append(needed))
    for size in ("null", "2"):
        load(tmp_path, f"grpo.problems_per_iteration={size}")
    assert needs[1] < needs[0]
