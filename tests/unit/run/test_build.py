"""From a config to the run's data, and the errors of the input that are found on the way."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.problem_files import ROWS, problem_overrides, write_rows

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, compose_run
from nemo_edo.errors import UserError
from nemo_edo.run import inputs
from nemo_edo.run.build import Builder
from nemo_edo.run_folder import RunFolder
from nemo_edo.worker.dispatch import workers

SMALL = ["sft.steps=2", "data.arithmetic.warmup_problems=40", "data.arithmetic.train_problems=6",
         "replicate_baseline=false", "data.arithmetic.test_problems=5"]


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return compose_run("quickstart", [*SMALL, "name=a", f"output_dir={tmp_path / 'runs'}", *overrides])


@pytest.fixture
def own_files(tmp_path: Path):
    """own_files(train=rows, test=rows, warmup=rows) -> overrides that name the written files."""
    return lambda **rows: problem_overrides(tmp_path, **{"train": ROWS[:3], "test": ROWS[3:], **rows})


def load(tmp_path: Path, *overrides: str) -> inputs.Data:
    cfg = config(tmp_path, *overrides)
    return inputs.load_checked_data(cfg, RunFolder(Path(cfg.output_dir) / cfg.name), arm_configs(cfg))


def error_of(tmp_path: Path, *overrides: str) -> str:
    """The message; no run folder may be left behind."""
    with pytest.raises(UserError) as error:
        load(tmp_path, *overrides)
    assert not (tmp_path / "runs").exists()
    return str(error.value)


def test_training_and_test_problems_from_files_of_one_name_are_refused_with_both_places(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    train, test = (write_rows(tmp_path / folder / "x.jsonl", rows)
                   for folder, rows in (("a", ROWS[:3]), ("b", ROWS[3:])))
    assert f"both have {train}:1: test problems" in error_of(tmp_path, f"data.train={train}", f"data.test={train}")
    assert f"({train}:1 and {test}:1)" in error_of(tmp_path, f"data.train={train}", f"data.test={test}")


def test_built_in_data_is_checked_before_the_run_folder_exists_and_its_files_then_have_the_same_data(tmp_path: Path):
    cfg = config(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "a")
    checked = inputs.load_checked_data(cfg, folder, {"grpo": cfg.grpo})
    assert (len(checked.train), len(checked.test), len(checked.solutions)) == (6, 5, 40)
    assert not (tmp_path / "runs").exists()
    inputs.write_builtin_files(cfg, folder)
    there = inputs.load_data(cfg, folder)
    assert (there.prompts, there.solutions) == (checked.prompts, checked.solutions)
    assert (there.train, there.test) == (checked.train, checked.test)  # with places in the run's folder
    assert (folder.base / "model.safetensors").is_file()


def test_the_built_in_models_tokenizer_knows_what_is_where_a_question_meets_the_template(tmp_path: Path):
    sizes = [f"++data.source_args.{split}_problems=8" for split in ("warmup", "train", "test")]
    sizes.append("evaluation.tuning_problems=0")
    cfg = compose_run("study/chain", [*sizes, "data.prompt='Solve({question}).'", f"output_dir={tmp_path}"])
    folder = RunFolder(tmp_path / "a")
    inputs.write_builtin_files(cfg, folder)
    assert len(inputs.load_data(cfg, folder).prompts) == 16


def test_the_run_seed_fixes_a_built_in_models_weights_and_every_training_gets_the_adapters(tmp_path: Path):
    weights = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        cfg, run = config(tmp_path, f"seed={seed}", "lora.rank=2", "threads=1"), RunFolder(tmp_path / name)
        inputs.write_builtin_files(cfg, run)
        weights.append((run.base / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    for training in (cfg.sft, *arm_configs(cfg).values()):
        Builder(cfg, run).model(training)
        assert workers().local.model.built.lora == cfg.lora


def test_own_files_are_loaded_and_the_warmups_solutions_are_the_training_problems_unless_they_have_a_file(
    tmp_path: Path, own_files
):
    data = load(tmp_path, *own_files())
    assert [p.id for p in data.train] == ["train-1", "train-2", "train-3"]
    assert set(data.prompts) == {p.id for p in [*data.train, *data.test]}
    assert len(data.solutions) == 3
    data = load(tmp_path, *own_files(train=ROWS[:2], test=ROWS[2:3], warmup=ROWS[3:]))
    assert (len(data.train), len(data.solutions), len(data.prompts)) == (2, 3, 3)
    without = load(tmp_path, *own_files(), f"data.warmup={tmp_path / 'missing.jsonl'}", "sft.steps=0")
    assert without.solutions == []


def test_sequences_are_as_long_as_the_longest_prompt_with_a_response_or_the_longest_solution_unless_that_is_set(
    tmp_path: Path, own_files
):
    long = {"question": "1 + 2", "answer": "\n".join(["1 + 2 = 3"] * 9) + "\n#### 3"}
    for files, solves in ((own_files(), False), (own_files(warmup=[long]), True)):
        overrides = [*files, "model.seq_length=null", "sampling.max_new_tokens=20"]
        cfg, data = config(tmp_path, *overrides), load(tmp_path, *overrides)
        prompted = data.longest_prompt + 20
        learned = max(len(prompt) + len(solution) for prompt, solution in data.solutions)
        assert (learned > prompted) is solves
        assert data.seq_length == inputs.with_seq_length(cfg).model.seq_length == max(prompted, learned)
        assert load(tmp_path, *overrides, f"model.seq_length={data.seq_length}").prompts == data.prompts
        with pytest.raises(UserError, match="tokens, more than the"):
            load(tmp_path, *overrides, f"model.seq_length={data.seq_length - 1}")
    short = replace(cfg, grpo=replace(cfg.grpo, micro_batch_tokens=data.seq_length - 1))
    with pytest.raises(UserError, match=r"micro_batch_tokens is \d+, expected null or at least 1 \* model.seq_length"):
        inputs.with_seq_length(short, data)


@pytest.mark.parametrize(("settings", "ceiling"), [
    (["precision=bf16"], 0.03 * 5), (["precision=fp8"], 0.06 * 5), (["precision=fp32", "generation=vllm"], 0.002 * 5),
    (["precision=fp32", "generation=vllm", "generation.servers.dtype=bfloat16"], 0.03 * 5),
    (["precision=bf16", "generation=vllm", "generation.servers.dtype=float32"], 0.03 * 5),
    (["precision=fp32", "generation=trtllm"], 0.03 * 5),  # it computes in the folder's type
    (["precision=bf16", "guards.sampler_gap.ceiling=0.01"], 0.01), (["guards.sampler_gap.ceiling=inf"], math.inf),
])
def test_the_sampler_gaps_ceiling_is_that_of_the_coarser_precision_unless_it_is_set(tmp_path, settings, ceiling):
    guards = Builder(config(tmp_path, *settings), RunFolder(tmp_path)).guards(layers=25)
    assert guards.sampler_gap.ceiling == pytest.approx(ceiling) and guards.sampler_gap.action == "stop"


@pytest.mark.parametrize(("file", "row", "words"), [
    ("train", "{broken", ["is not valid JSON", "--on-bad-rows=skip"]),
    ("test", {"question": "1 + 1"}, ['has no "answer"']),
    ("test", {"question": " + ".join("1" * 40), "answer": "#### 40"}, ["has 80 tokens", "more than the 32"]),
    ("warmup", {"question": "1 + 1", "answer": "1 + 1 = 2\n" * 12 + "#### 2"}, ["the prompt with its solution has"]),
    ("train", {"question": "one and two", "answer": "#### 3"}, ["the tokenizer"]),
], ids=["broken", "incomplete", "long prompt", "long solution", "unknown text"])
def test_a_row_that_is_bad_or_does_not_fit_the_model_is_reported_with_its_file_and_line(
    tmp_path: Path, own_files, file: str, row, words: list[str]
):
    files = own_files(**{"warmup": ROWS[:3], file: [*ROWS[3:], row]})
    message = error_of(tmp_path, *files, "data.allow_overlap=true")
    assert f"{tmp_path / file}.jsonl:4: " in message and all(word in message for word in words)


def test_problems_that_cannot_be_scored_are_bad_rows_too(tmp_path: Path, own_files):
    rows = [*ROWS[:2], {"question": "one of three?", "answer": "1/3", "solution": "A third."}]
    data = load(tmp_path, *own_files(train=rows, test=ROWS[2:]), "data.on_bad_rows=skip", "rewards.verifier=math")
    assert (len(data.train), len(data.solutions), data.skipped_rows) == (2, 2, 1)


@pytest.mark.parametrize(("tested", "words"), [
    (ROWS[2:3], "1 of the 1 test problems are train problems, too (the first is {}/test.jsonl:1, as {}/train.jsonl:3)"),
    ([ROWS[4], {**ROWS[0], "question": "\n0 + 1\n"}, ROWS[1]], "2 of the 3 test problems"),
])  # fmt: skip
def test_test_problems_that_are_trained_on_are_counted_and_refused_unless_allowed(
    tmp_path: Path, own_files, tested: list[dict], words: str
):
    files = own_files(train=ROWS[:3], test=tested)
    message = error_of(tmp_path, *files)
    assert words.format(tmp_path, tmp_path) in message and message.endswith("or set data.allow_overlap=true")
    with pytest.raises(UserError, match="data.allow_overlap"):
        inputs.load_checked_data(config(tmp_path, *files))
    assert len(load(tmp_path, *files, "data.allow_overlap=true").overlap) == int(words[0])


def test_a_built_in_task_that_cannot_be_made_leaves_no_run_folder(tmp_path: Path):
    assert "model.architecture.num_layer is not a field" in error_of(tmp_path, "model.architecture.num_layer=3")
    assert "asks for 100000 test problems" in error_of(tmp_path, "data.arithmetic.test_problems=100000")
    assert "the tokenizer 'built-in' does not know" in error_of(tmp_path, "data.prompt='{question} Why?'")


def test_a_disk_without_room_for_all_arms_and_iterations_is_reported_before_the_run_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, rollouts, tokens = [], 6 * 10, 8 + 32  # problems x samples; a prompt of the built-in task and max_new_tokens
    free = rollouts * tokens * 4 * compose_run("quickstart", []).grpo.iterations  # the ids alone, of one arm
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or SimpleNamespace(free=free))
    message = error_of(tmp_path)
    assert re.match(f"output_dir: {tmp_path / 'runs' / 'a'} needs .* and has .* free", message)
    assert set(asked) == {tmp_path}  # the nearest folder that exists
    folder, arms = RunFolder(tmp_path / "runs" / "a"), arm_configs(config(tmp_path))
    there = [folder.evaluation(policy) for policy in ("warmup", *arms)]
    there += [folder.rollouts(name) / f"iter_{t:05d}" / "rank_0_of_1.parquet"
              for name, arm in arms.items() for t in range(arm.iterations)]
    for path in there:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    folder.note("warmup")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    load(tmp_path)  # what a resumed run has takes no room again
