"""What a run reads before it begins: its problems, its model folder, its tokenizer. Checked before time is spent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import NONE, DataConfig, LoopConfig, RunConfig
from nemo_edo.config.model_shape import check_expected
from nemo_edo.data.model_folder import check_context, check_files, find_model, read_fields
from nemo_edo.data.problems import MADE, LoadedProblems, load_problems, normal_question, write_problems
from nemo_edo.data.prompts import encode_prompts, encode_solutions, prompt_style
from nemo_edo.data.source import SPLITS, made_problems
from nemo_edo.data.stop_tokens import StopTokens, read_stop_tokens
from nemo_edo.data.tokenizer import Decoder, load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.rewards.scorers import build_scorer
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.rollouts.disk_space import check_disk_space, estimate_bytes
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run.folder import RunFolder
from nemo_edo.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_edo.interfaces import Scorer
    from nemo_edo.rewards.judge import Judge

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """A run's problems, tokenised and checked against the context."""

    tokenizer: PreTrainedTokenizerBase
    stop: StopTokens
    """What ends a response."""
    train: list[Problem]
    test: list[Problem]
    prompts: dict[str, TokenIds]
    """Prompt ids of the problems of ``train`` and ``test``, by problem id."""
    solutions: list[tuple[TokenIds, TokenIds]]
    """What the warm-up learns: prompt and solution ids. Empty without a warm-up."""
    seq_length: int
    """model.seq_length, or what it follows from where that is null."""
    skipped_rows: int
    scorer: Scorer = field(default_factory=ExactAnswerScorer)
    """What scores responses to them."""
    judge: Judge | None = None
    """The language model that the scorer asks, if any."""
    warmup: list[Problem] = field(default_factory=list)
    """What ``data.source`` made for the warm-up alone."""

    @property
    def overlap(self) -> list[tuple[Problem, Problem]]:
        """The problems of ``test`` that are in ``train``, too, each with one there."""
        trained = {normal_question(problem.question): problem for problem in self.train}
        asked = ((problem, trained.get(normal_question(problem.question))) for problem in self.test)
        return [(problem, twin) for problem, twin in asked if twin is not None]

    @property
    def made(self) -> dict[str, list[Problem]]:
        """The splits of ``data.source``."""
        return {"warmup": self.warmup, "train": self.train, "test": self.test}

    @property
    def pad_id(self) -> int:
        """Any id would do: padding is masked."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    @property
    def decode(self) -> Decoder:
        return Decoder(self.tokenizer, frozenset(self.stop.texts))

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt) for prompt in self.prompts.values())


def write_builtin_files(cfg: RunConfig, run: RunFolder, *, weights: bool = True) -> None:
    """The built-in task's problem files and a model with random weights, where the config names no others. What
    ``data.source`` made is in the folder already: a model without a path reads its words.

    Without ``weights``, all that ``load_data`` needs.
    """
    from nemo_edo.builtin_task.arithmetic import write_dataset
    from nemo_edo.builtin_task.model import word_vocabulary, write_base_model

    if cfg.data.is_built_in:
        write_dataset(run.data, cfg.data.arithmetic)
    if cfg.model.path is None:
        words = cfg.data.arithmetic if cfg.data.source is None else word_vocabulary(_made_texts(cfg, run))
        hf_config = write_base_model(run.base, cfg.model.architecture, words)
    if cfg.model.path is None and weights:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # version 5 shows one for a file of a megabyte
        with torch.random.fork_rng():
            torch.manual_seed(cfg.seed)
            AutoModelForCausalLM.from_config(hf_config).save_pretrained(run.base)


def _made_texts(cfg: RunConfig, run: RunFolder) -> Iterator[str]:
    """The texts that a model of the made problems reads and writes."""
    yield cfg.data.prompt.replace("{question}", "")
    for split in SPLITS:
        path = run.data / f"{split}.jsonl"
        for problem in load_problems(path, **cfg.data.reading(split)).problems if path.is_file() else ():
            yield from (problem.question, problem.solution)


def write_made_problems(cfg: RunConfig, run: RunFolder, splits: Mapping[str, Sequence[Problem]]) -> None:
    """Keeps what ``data.source`` made in the run folder: whatever it makes next time, the run has these problems."""
    for split, problems in splits.items():
        if problems:
            path, made_by = run.data / f"{split}.jsonl", {"function": cfg.data.source}
            write_problems(path, problems, benchmark=MADE, split=split, source=made_by, skipped=0)


def model_folder(cfg: RunConfig, run: RunFolder) -> Path:
    """The policy's Hugging Face folder: that of ``model.path``, or the built-in model's."""
    return find_model(cfg.model.path) if cfg.model.path is not None else run.base


def load_checked_data(cfg: RunConfig, run: RunFolder, arms: Iterable[LoopConfig]) -> Data:
    """The run's data before its folder is touched: the built-in files come from a scratch folder.

    Raises UserError for anything in the data that would stop the run later, and where the disk is too small.
    """
    with tempfile.TemporaryDirectory() as scratch:
        builtin = RunFolder(Path(scratch))
        if cfg.data.source is not None:
            write_made_problems(cfg, builtin, _made_problems(cfg, run))
        write_builtin_files(cfg, builtin, weights=False)
        data = _in_folder(load_data(cfg, builtin), builtin, run)
    _require_no_overlap(cfg, data)
    check_space(cfg, run, data, arms)
    return data


def _in_folder(data: Data, scratch: RunFolder, run: RunFolder) -> Data:
    """The same problems with the places that their files will have in the run's folder, for messages."""
    places = (f"{scratch.path}/", f"{run.path}/")
    moved = {
        name: [replace(one, source=one.source.replace(*places, 1)) for one in getattr(data, name)]
        for name in ("train", "test", "warmup")
    }
    return replace(data, **moved)


def load_data(cfg: RunConfig, run: RunFolder, *, scores: bool = True) -> Data:
    """Reads and tokenises every problem. Raises UserError for whatever would stop the run later.

    scores: False where nothing will be scored, and what would score is not looked at."""
    warmup_file, train_file, test_file = _problem_files(cfg.data, run)
    if train_file is None and cfg.algorithm != NONE:
        raise UserError(f"data.source ({cfg.data.source}) made no train problems for algorithm {cfg.algorithm}")
    loaded = {}
    if train_file is not None:
        loaded[train_file] = load_problems(train_file, **cfg.data.reading("train"))
    loaded[test_file] = load_problems(test_file, **cfg.data.reading("test"))
    scorer, judge = build_scorer(cfg, loaded) if scores else (ExactAnswerScorer(), None)
    made_warmup = cfg.data.source is not None and warmup_file != train_file
    if (cfg.sft.steps or made_warmup) and warmup_file not in loaded:
        loaded[warmup_file] = load_problems(warmup_file, **cfg.data.reading("train"))
    if cfg.sft.steps:
        _require_solutions(loaded[warmup_file].problems)
    folder = model_folder(cfg, run)
    tokenizer = load_tokenizer(folder)
    stop = read_stop_tokens(folder, tokenizer, cfg.sampling.stop_token_ids)
    train = [] if train_file is None else loaded[train_file].problems
    test = loaded[test_file].problems
    _require_distinct_ids(train, test)
    _require_for_tuning(cfg, train)
    limit, longest = cfg.model.seq_length, cfg.sampling.max_new_tokens
    room = None if limit is None else limit - longest
    style = prompt_style(cfg.data.prompt, cfg.data.chat_template, tokenizer)
    prompts = encode_prompts([*train, *test], tokenizer, style, max_prompt_tokens=room)
    solutions = encode_solutions(loaded[warmup_file].problems, tokenizer, style, limit) if cfg.sft.steps else []
    if limit is None:
        limit = max(max(map(len, prompts.values())) + longest, *(len(one) + len(other) for one, other in solutions), 0)
        check_context(folder, read_fields(folder), limit, given=False)
    return Data(
        tokenizer=tokenizer,
        stop=stop,
        train=train,
        test=test,
        prompts=prompts,
        solutions=solutions,
        seq_length=limit,
        skipped_rows=_count_skipped(loaded.values()),
        scorer=scorer,
        judge=judge,
        warmup=loaded[warmup_file].problems if made_warmup else [],
    )


def with_seq_length(cfg: RunConfig, data: Data) -> RunConfig:
    """The config with the data's ``seq_length``, where it was null. Raises UserError where it does not fit the rest of
    the config."""
    if cfg.model.seq_length is not None:
        return cfg
    from nemo_edo.config.compose import arm_configs

    try:
        found = replace(cfg, model=replace(cfg.model, seq_length=data.seq_length))
        arm_configs(found)
    except ValueError as error:
        raise UserError(str(error)) from error
    return found


def seq_length(cfg: RunConfig) -> int:
    """``model.seq_length``, or what it follows from: then all problems are read and tokenised."""
    return read_sizes(cfg)[0] if cfg.model.seq_length is None else cfg.model.seq_length


def read_sizes(cfg: RunConfig) -> tuple[int, int, int]:
    """Tokens of the longest sequence, and the numbers of training and test problems, before there is a run folder.
    Raises UserError as ``load_data`` does."""
    with tempfile.TemporaryDirectory() as scratch:
        builtin = RunFolder(Path(scratch))
        if cfg.data.source is not None:
            made = made_problems(cfg.data.source, cfg.data.source_args, cfg.data.columns)
            write_made_problems(cfg, builtin, made)
        write_builtin_files(cfg, builtin, weights=False)
        data = load_data(cfg, builtin, scores=False)
    _require_no_overlap(cfg, data)
    return data.seq_length, len(data.train), len(data.test)


def check_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder that cannot be trained, or whose context is shorter than the config's."""
    if cfg.model.path is None:
        return
    from nemo_edo.megatron.bridge import check_model_folder

    folder = find_model(cfg.model.path)
    _check_fields(cfg, check_model_folder(folder), folder)


def check_served_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder whose model servers could not serve: they need its weights if the run
    starts them, otherwise only a tokenizer and a config."""
    if cfg.model.path is None:
        return
    folder = find_model(cfg.model.path)
    fields = check_files(folder, weights=not cfg.generation.servers.urls)
    if not isinstance(fields.get("vocab_size"), int):
        raise UserError(f"{folder / 'config.json'} has no vocab_size, which responses are checked against")
    _check_fields(cfg, fields, folder)


def _check_fields(cfg: RunConfig, fields: dict, folder: Path) -> None:
    check_expected(cfg.model.architecture, fields, str(folder / "config.json"))
    if cfg.model.seq_length is not None:
        check_context(folder, fields, cfg.model.seq_length, given=True)


def check_space(cfg: RunConfig, run: RunFolder, data: Data, arms: Iterable[LoopConfig]) -> None:
    """Raises UserError where the disk has no room for the rollouts of all arms and iterations."""
    needed = 0
    evaluated = len(data.test) * (cfg.evaluation.samples + 1)
    final = cfg.evaluation.rollouts * len(cfg.evaluation.temperature)
    needed += final * estimate_bytes(evaluated, data.longest_prompt, cfg.sampling.max_new_tokens)
    for arm in arms:
        short = arm.iterations // cfg.evaluation.every if cfg.evaluation.every else 0
        evaluations = short + final
        needed += evaluations * estimate_bytes(evaluated, data.longest_prompt, cfg.sampling.max_new_tokens)
        problems = min(arm.problems_per_iteration or len(data.train), len(data.train))
        rollouts = problems * cfg.sampling.samples_per_prompt
        needed += arm.iterations * estimate_bytes(rollouts, data.longest_prompt, cfg.sampling.max_new_tokens)
    check_disk_space(run.path, needed)


def given_rollouts(cfg: RunConfig, arm: str, data: Data) -> RolloutStore | None:
    """The rollouts of another run that an arm trains on."""
    if cfg.train.rollouts is None:
        return None
    folder = Path(cfg.train.rollouts)
    own = folder / arm
    return RolloutStore(own if own.is_dir() else folder, tokenizer=tokenizer_identity(data.tokenizer))


def _problem_files(data: DataConfig, run: RunFolder) -> tuple[Path | None, Path | None, Path]:
    """Warm-up, train, test; the first two None where there is only a file to evaluate on."""
    if data.is_built_in:
        return run.data / "warmup.jsonl", run.data / "train.jsonl", run.data / "test.jsonl"
    if data.source is not None:
        warmup, train, test = (run.data / f"{split}.jsonl" for split in SPLITS)
        if not train.is_file():
            return None, None, test
        return warmup if warmup.is_file() else train, train, test
    if data.train is None:
        return None, None, Path(data.test)
    return Path(data.warmup or data.train), Path(data.train), Path(data.test)


def _made_problems(cfg: RunConfig, run: RunFolder) -> dict[str, list[Problem]]:
    """What ``data.source`` makes for a new run; what it made for one that resumes."""
    files = {split: run.data / f"{split}.jsonl" for split in SPLITS}
    if run.is_begun and files["test"].is_file():
        kept = {split: path for split, path in files.items() if path.is_file()}
        return {split: load_problems(path, **cfg.data.reading(split)).problems for split, path in kept.items()}
    data = cfg.data
    return made_problems(data.source, data.source_args, data.columns)


def _require_solutions(problems: Sequence[Problem]) -> None:
    """Raises UserError for a problem that a warm-up cannot learn."""
    without = next((problem for problem in problems if not problem.solution), None)
    if without is not None:
        raise UserError(
            f"{without.source}: has no solution, which the warm-up learns (sft.steps); name its column with "
            "data.columns.solution, or set sft.steps=0"
        )


def _require_for_tuning(cfg: RunConfig, train: list[Problem]) -> None:
    wanted = cfg.evaluation.tuning_problems
    if wanted > len(train):
        raise UserError(
            f"evaluation.tuning_problems is {wanted}, expected at most the number of training problems, {len(train)}"
        )


def _require_distinct_ids(train: list[Problem], test: list[Problem]) -> None:
    """Raises UserError where a problem of each has one id, under which responses are stored and results compared."""
    trained = {problem.id: problem.source for problem in train}
    shared = [problem for problem in test if problem.id in trained]
    if shared:
        first = shared[0]
        raise UserError(
            f"data.train and data.test: {len(shared)} problems of one have the id of a problem of the other, such as "
            f"{first.id} ({trained[first.id]} and {first.source}); an id begins with its file's name, so give the two "
            "files different names"
        )


def _require_no_overlap(cfg: RunConfig, data: Data) -> None:
    """Raises UserError where a policy would be evaluated on problems that it is trained on, unless the config allows
    it."""
    overlap = [] if cfg.data.allow_overlap or cfg.algorithm == NONE else data.overlap
    if overlap:
        tested, trained = overlap[0]
        raise UserError(
            f"{len(overlap)} of the {len(data.test)} test problems are train problems, too (the first is "
            f"{tested.source}, as {trained.source}); remove them from one of the two, or set data.allow_overlap=true"
        )


def _count_skipped(loaded: Iterable[LoadedProblems]) -> int:
    return sum(len(problems.skipped) for problems in loaded)
