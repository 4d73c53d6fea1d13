"""What a run reads before it begins: its problems, its model folder, its tokenizer. Checked before time is spent."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.builtin_task.arithmetic import make_problems
from nemo_edo.config import NONE, ArmConfig, DataConfig, GRPOConfig, ModelConfig, RunConfig
from nemo_edo.config.generation import PLAIN
from nemo_edo.config.model_shape import check_expected
from nemo_edo.data.model_folder import READ, check_context, check_files, find_model, read_fields, unread_files
from nemo_edo.data.problems import MADE, SPLITS, load_problems, normal_question, write_problems
from nemo_edo.data.problems import made_problems as source_problems
from nemo_edo.data.prompts import (
    PromptStyle,
    check_rows,
    encode_prompts,
    encode_solutions,
    left_out_tokens,
    prompt_style,
    warnings_of,
    warnings_of_turns,
)
from nemo_edo.data.tokenizer import SETTING, Decoder, StopTokens, load_tokenizer, read_stop_tokens
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START
from nemo_edo.interfaces import Scorer
from nemo_edo.rewards.scorers import build_scorer
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.rollouts.store import estimate_bytes, require_room
from nemo_edo.run.made_from import MadeFrom, files_below
from nemo_edo.run.problems import check_problems, read_problems
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem
from nemo_edo.utils.import_path import source_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_edo.rewards.judge import Judge

TokenIds = tuple[int, ...]
ARITHMETIC = "arithmetic"
"""The built-in task's name in the manifests of its files."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A run's problems, tokenised and checked against the context."""

    train: list[Problem]
    test: list[Problem]
    skipped_rows: int
    """Rows of the problem files that are left out."""
    tokenizer: PreTrainedTokenizerBase
    stop: StopTokens
    """What ends a response."""
    prompts: dict[str, TokenIds]
    """Prompt ids of the problems of ``train`` and ``test``, by problem id."""
    solutions: list[tuple[TokenIds, TokenIds]]
    """What the warm-up learns: prompt and solution ids. Empty without a warm-up."""
    seq_length: int
    """model.seq_length, or what it follows from where that is null."""
    scorer: Scorer
    """What scores responses to them."""
    judge: Judge | None
    """The language model that the scorer asks, if any."""
    made_from: MadeFrom
    """The files that all this was read from."""
    made: dict[str, list[Problem]]
    """The splits that the run makes, before they are in its folder."""
    begun: datetime
    """The time that prompts have where a chat template writes it."""
    decode: Decoder
    """The decoder that makes texts of responses."""
    warnings: list[str]
    """What a person should know of the prompts."""
    style: PromptStyle
    """What makes prompts of problems."""

    @property
    def overlap(self) -> list[tuple[Problem, Problem]]:
        """The problems of ``test`` that are in ``train``, too, each with one there."""
        trained = {normal_question(problem.question): problem for problem in self.train}
        asked = ((problem, trained.get(normal_question(problem.question))) for problem in self.test)
        return [(problem, twin) for problem, twin in asked if twin is not None]

    @property
    def pad_id(self) -> int:
        """Any id would do: padding is masked."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt) for prompt in self.prompts.values())


def made_problems(data: DataConfig, run: RunFolder) -> dict[str, list[Problem]]:
    """The splits that a run makes itself: those of the built-in task, or of ``data.source``. Whatever the function
    makes next time, a run that resumes has the problems that it began with. Empty where problems are in files."""
    if data.is_built_in:
        return make_problems(data.arithmetic, run.data)
    if data.source is None:
        return {}
    files = {split: run.data / f"{split}.jsonl" for split in SPLITS}
    if run.is_begun and files["test"].is_file():
        kept = {split: path for split, path in files.items() if path.is_file()}
        return {split: load_problems(path, data, split).problems for split, path in kept.items()}
    return source_problems(data.source, data.source_args, data.columns)


def write_builtin_files(cfg: RunConfig, run: RunFolder, made: Mapping[str, Sequence[Problem]] | None = None) -> None:
    """What the config names no files of: the problems (made: these, or those of ``made_problems``), and a model with
    random weights."""
    made = made_problems(cfg.data, run) if made is None else made
    for split, problems in made.items():
        made_by = {"function": cfg.data.source or "the built-in task"}
        benchmark = ARITHMETIC if cfg.data.source is None else MADE
        path = run.data / f"{split}.jsonl"
        write_problems(path, problems, benchmark=benchmark, split=split, source=made_by, skipped=0)
    if cfg.model.path is None:
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        hf_config = _write_tokenizer(cfg, run.base, made)
        logging.disable_progress_bar()  # version 5 shows one for a file of a megabyte
        with torch.random.fork_rng():
            torch.manual_seed(cfg.seed)
            model = AutoModelForCausalLM.from_config(hf_config)
        try:
            model.save_pretrained(run.base)
        except SafetensorError as error:  # it keeps the words of the system's error and not its number
            raise UserError(f"{run.base}: the model cannot be written ({error}); free some space and resume") from error


def _write_tokenizer(cfg: RunConfig, folder: Path, made: Mapping[str, Sequence[Problem]]) -> PretrainedConfig:
    """The tokenizer and the config.json of a model without a path, which knows the words of the made problems."""
    from nemo_edo.builtin_task.model import word_vocabulary, write_base_model

    words = cfg.data.arithmetic
    if cfg.data.source is not None:
        texts = [cfg.data.prompt.replace("{question}", "")]
        for problem in chain.from_iterable(made.values()):  # where a question meets the template, pieces are others
            prompt = cfg.data.prompt.replace("{question}", problem.question)
            texts += [problem.question, problem.solution, prompt]
        words = word_vocabulary(texts)
    return write_base_model(folder, cfg.model.architecture, words)


def model_folder(model: ModelConfig, run: RunFolder) -> Path:
    """The policy's Hugging Face folder: that of ``model.path``, or the built-in model's."""
    return find_model(model.path) if model.path is not None else run.base


def load_checked_data(
    cfg: RunConfig, run: RunFolder | None = None, arms: Mapping[str, ArmConfig] | None = None, *, scores: bool = True
) -> Data:
    """The run's data before its folder is touched. scores: whether what would score the problems is tried on them.

    Raises UserError for anything in the data that would stop the run later, and where the disk has no room for the
    rollouts of all iterations of ``arms`` that are not there yet; None: the disk is not looked at."""
    run = run or RunFolder(Path(cfg.output_dir) / cfg.name)
    made = made_problems(cfg.data, run)
    with tempfile.TemporaryDirectory() as scratch:
        if cfg.model.path is None:
            _write_tokenizer(cfg, Path(scratch), made)
        data = load_data(cfg, run, scores=scores, made=made, tokenizer_folder=Path(scratch))
    if data.overlap and not cfg.data.allow_overlap and cfg.algorithm != NONE:
        tested, trained = data.overlap[0]
        raise UserError(
            f"{len(data.overlap)} of the {len(data.test)} test problems are train problems, too (the first is "
            f"{tested.source}, as {trained.source}); remove them from one of the two, or set data.allow_overlap=true"
        )
    if arms is not None:
        require_room("output_dir", run.path, _bytes_left(cfg, run, arms, data))
    return data


def _bytes_left(cfg: RunConfig, run: RunFolder, arms: Mapping[str, ArmConfig], data: Data) -> int:
    """At most so much will be written: the responses that the run does not have. A finished one begins anew."""
    resumes, settings = run.is_begun, cfg.evaluation

    def size(responses: int) -> int:
        return estimate_bytes(responses, data.longest_prompt, cfg.sampling.max_new_tokens)

    evaluation = size(len(data.test) * (settings.samples + 1))
    final = settings.rollouts * len(settings.temperature) * evaluation
    needed = sum(final for policy in (START, *arms) if not (resumes and run.evaluation(policy).is_file()))
    for name, arm in arms.items():
        every, problems = settings.every, arm.problems_per_iteration or len(data.train)
        evaluations, iterations = -(-arm.iterations // every) if every else 0, arm.iterations
        if resumes:
            evaluations -= len(run.evaluated_iterations(name))
            iterations -= len([*run.rollouts(name).glob("iter_*/rank_0_of_*.parquet")])
        iteration = size(min(problems, len(data.train)) * cfg.sampling.samples_per_prompt)
        needed += evaluations * evaluation + iterations * iteration
    return needed


def load_data(
    cfg: RunConfig,
    run: RunFolder,
    *,
    scores: bool = True,
    made: Mapping[str, list[Problem]] | None = None,
    tokenizer_folder: Path | None = None,
) -> Data:
    """Reads and tokenises every problem. Raises UserError for whatever would stop the run later.

    scores: False where nothing will be scored, and what would score is not looked at. made, tokenizer_folder: before
    there is a run folder, the problems that will be in it and the folder of its model's tokenizer."""
    made = made or {}
    # A run of a finished run's name begins anew.
    journal = {} if tokenizer_folder is not None and run.is_finished else run.journal()
    noted = journal.get("files", {})
    # What makes or teaches the problems reaches no number once the run has them, or has finished its warm-up.
    harmless = [*(["data.source"] if noted else []), *(["data.warmup"] if START in journal else [])]
    inputs = MadeFrom(input_files(cfg), noted.get("inputs", {}), cfg.allow_changed, harmless)
    paths, loaded = read_problems(cfg, run, made)
    folder = model_folder(cfg.model, run) if cfg.model.path or tokenizer_folder is None else tokenizer_folder
    tokenizer = load_tokenizer(folder)
    if cfg.model.path is None:
        tokenizer.name_or_path = "built-in"  # in messages: its folder is gone, or inside the run's

    def encode(text: str) -> TokenIds:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    scorer: Scorer = ExactAnswerScorer()
    judge = None
    if scores:
        own = Path(cfg.output_dir) / cfg.name
        scored = {paths[split]: loaded[paths[split]] for split in ("train", "test") if split in paths}
        scorer, judge = build_scorer(cfg.rewards, cfg.data, own, scored, encode, inputs.require_unchanged)
        loaded |= scored  # without those that cannot be scored
    train, test, learned = (loaded[paths[one]].problems if one in paths else [] for one in ("train", "test", "warmup"))
    test = test[: cfg.evaluation.limit]
    check_problems(train, test, learned, cfg.evaluation.tuning_problems)
    stop = read_stop_tokens(folder, tokenizer, cfg.sampling.stop_token_ids)
    limit, longest = cfg.model.seq_length, cfg.sampling.max_new_tokens
    room = None if limit is None else limit - longest
    begun = _begun(cfg, noted)
    style = prompt_style(cfg.data, tokenizer, begun)
    named = {token for source, ids in stop.named_by.items() if source != SETTING for token in ids}
    prompts = encode_prompts([*train, *test], tokenizer, style, max_prompt_tokens=room, ends=named)
    solutions = encode_solutions(learned, tokenizer, style, limit) if learned else []
    warnings = warnings_of([*train, *test], prompts, tokenizer, style, cfg.data.answer_pattern or "", stop.ids)
    if style.chat and cfg.generation.backend != PLAIN:  # an endpoint's model ends its turns itself
        warnings += warnings_of_turns(style.chat, tokenizer, stop.ids)
    if (folder / "config.json").is_file():
        fields = read_fields(folder)
        if cfg.has_arms and not cfg.generation.routing_replay:
            warnings += _warnings_of_experts(fields)
        check_rows(chain(prompts.values(), *solutions), stop.ids, tokenizer, fields, folder / "config.json")
    if limit is None:
        limit = max(max(map(len, prompts.values())) + longest, *(len(one) + len(other) for one, other in solutions), 0)
        check_context(folder, read_fields(folder), limit, given=False)
    return Data(
        train=train,
        test=test,
        skipped_rows=sum(len(file.skipped) for file in loaded.values()),
        tokenizer=tokenizer,
        stop=stop,
        prompts=prompts,
        solutions=solutions,
        seq_length=limit,
        scorer=scorer,
        judge=judge,
        made=dict(made),
        made_from=inputs,
        begun=begun,
        decode=Decoder(tokenizer, frozenset(stop.texts), left_out_tokens(tokenizer, style)),
        style=style,
        warnings=warnings,
    )


def _begun(cfg: RunConfig, noted: Mapping[str, Any]) -> datetime:
    """When the run began, or the run whose rollouts it trains on: the time in prompts whose template writes one."""
    folders = Path(cfg.train.rollouts).absolute().parents[:2] if cfg.train.rollouts else ()
    journals = (noted, *(RunFolder(one).journal().get("files", {}) for one in folders))
    return next((datetime.fromisoformat(files["begun"]) for files in journals if "begun" in files), datetime.now())


def _warnings_of_experts(fields: Mapping[str, Any]) -> list[str]:
    experts = max(fields.get(name) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts <= 1:
        return []
    return [
        f"warning: the model has {experts} experts, and generation.routing_replay is false: a token's experts can "
        "differ between sampling and training, and public GRPO runs of 30B-A3B models have collapsed so; watch "
        "sampler_gap (docs/scaling.md, Experts)"
    ]


def require_unchanged(cfg: RunConfig, run: RunFolder) -> None:
    """Raises UserError where files are not those that a run noted, but for ``allow_changed`` ones."""
    noted = run.journal().get("files", {}).get("inputs", {})
    MadeFrom(input_files(cfg), noted, cfg.allow_changed, ["data.source", "data.warmup"])


def input_files(cfg: RunConfig) -> dict[str, dict[str, Path]]:
    """The files of each setting that names some."""
    from nemo_edo.config.compose import arm_configs  # loads Hydra

    data, arms = cfg.data, arm_configs(cfg)
    paths = {f"data.{split}": getattr(data, split) for split in SPLITS}
    paths["data.chat_template"] = data.chat_template if Path(data.chat_template).is_file() else None
    found = {name: files_below(Path(path), ["**/*"]) for name, path in paths.items() if path is not None}
    if cfg.model.path is not None:
        found["model.path"] = files_below(find_model(cfg.model.path), READ)
    if cfg.train.rollouts is not None:
        read = [f"iter_{t:05d}/rank_*.parquet" for t in range(max(one.iterations for one in arms.values()))]
        found["train.rollouts"] = files_below(Path(cfg.train.rollouts), [*read, *(f"*/{name}" for name in read)])
    functions = {"data.source": data.source, **{key: one.path for key, one in cfg.rewards.by_function.values()}}
    functions |= {f"arms.{arm}.advantage": one.advantage for arm, one in arms.items() if isinstance(one, GRPOConfig)}
    return found | {name: source_files(path) for name, path in functions.items() if path is not None}


def with_seq_length(cfg: RunConfig, data: Data | None = None) -> RunConfig:
    """The config with the data's ``seq_length``, where it was null. data: None: they are read and tokenised for it.
    Raises UserError where it does not fit the rest of the config."""
    if cfg.model.seq_length is not None:
        return cfg
    from nemo_edo.config.compose import arm_configs

    data = data or load_checked_data(cfg, scores=False)
    try:
        found = replace(cfg, model=replace(cfg.model, seq_length=data.seq_length))
        arm_configs(found)
    except ValueError as error:
        raise UserError(str(error)) from error
    return found


def check_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder that cannot be trained, or, where servers have all that is evaluated, that
    they could not serve: they need its weights if the run starts them, otherwise only a tokenizer and a config. Also
    for a context that is shorter than the config's."""
    if cfg.model.path is None:
        return
    folder = find_model(cfg.model.path)
    path, own_servers = folder / "config.json", cfg.generation.is_served and not cfg.generation.servers.urls
    if cfg.algorithm == NONE and cfg.generation.is_served:
        fields = check_files(folder, weights=own_servers)
        if not isinstance(fields.get("vocab_size"), int):
            raise UserError(f"{path} has no vocab_size, which responses are checked against")
    else:
        from nemo_edo.megatron.bridge import check_model_folder

        fields = check_model_folder(folder, cfg.parallelism)
    check_expected(cfg.model.architecture, fields, str(path))
    if cfg.model.seq_length is not None:
        check_context(folder, fields, cfg.model.seq_length, given=True)
    # Servers prefer an index to model.safetensors and, without one, load every file.
    stray = [name for name in unread_files(folder) if "safetensors" in name]
    if own_servers and stray:
        raise UserError(f"{folder}: servers would read {', '.join(stray)}, which transformers does not; remove them")
