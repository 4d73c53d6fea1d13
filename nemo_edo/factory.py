"""From a config to the objects of a run. It holds no maths, and imports heavy packages only where they are used."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import DataConfig, GRPOConfig, IDPOConfig, LoopConfig, RunConfig, SFTConfig
from nemo_edo.data.disk_space import check_disk_space, estimate_bytes
from nemo_edo.data.problems import LoadedProblems, load_problems
from nemo_edo.data.prompts import encode_prompts, encode_solutions
from nemo_edo.data.rollout_store import RolloutStore, tokenizer_identity
from nemo_edo.errors import UserError
from nemo_edo.model_shape import check_expected
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_edo.algorithms.collection import Objective
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.models.megatron_gpt_model import MegatronGPTModel

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """A run's problems, tokenised and checked against the context."""

    tokenizer: PreTrainedTokenizerBase
    train: list[Problem]
    test: list[Problem]
    prompts: dict[str, TokenIds]
    """Of the problems of ``train`` and ``test``, by id."""
    solutions: list[tuple[TokenIds, TokenIds]]
    """What the warm-up learns: prompt and solution ids. Empty without a warm-up."""
    skipped_rows: int

    @property
    def pad_id(self) -> int:
        """Any id would do: padding is masked."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt) for prompt in self.prompts.values())


def write_builtin_files(cfg: RunConfig, run: RunFolder, *, weights: bool = True) -> None:
    """The built-in task's problem files and a model with random weights, where the config names none of its own.

    Without ``weights``, all that ``load_data`` needs.
    """
    from nemo_edo.data.arithmetic import write_dataset
    from nemo_edo.data.arithmetic_model import write_base_model

    if cfg.data.train is None:
        write_dataset(run.data, cfg.data.arithmetic)
    if cfg.model.path is None:
        hf_config = write_base_model(run.base, cfg.model.architecture, cfg.data.arithmetic)
    if cfg.model.path is None and weights:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(cfg.seed)
            AutoModelForCausalLM.from_config(hf_config).save_pretrained(run.base)


def model_folder(cfg: RunConfig, run: RunFolder) -> Path:
    return Path(cfg.model.path) if cfg.model.path is not None else run.base


def load_checked_data(cfg: RunConfig, run: RunFolder, arms: Iterable[LoopConfig]) -> Data:
    """The run's data before its folder is touched: the built-in files come from a scratch folder.

    Raises UserError for whatever in the data, or for want of disk space, would stop the run later.
    """
    with tempfile.TemporaryDirectory() as scratch:
        builtin = RunFolder(Path(scratch))
        write_builtin_files(cfg, builtin, weights=False)
        data = load_data(cfg, builtin)
    check_space(cfg, run, data, arms)
    return data


def load_data(cfg: RunConfig, run: RunFolder) -> Data:
    """Reads and tokenises every problem. Raises UserError for whatever would stop the run later."""
    warmup_file, train_file, test_file = _problem_files(cfg.data, run)
    loaded = {path: load_problems(path, on_bad_rows=cfg.data.on_bad_rows) for path in (train_file, test_file)}
    if cfg.sft.steps and warmup_file not in loaded:
        loaded[warmup_file] = load_problems(warmup_file, on_bad_rows=cfg.data.on_bad_rows)
    tokenizer = _load_tokenizer(model_folder(cfg, run))
    train, test = loaded[train_file].problems, loaded[test_file].problems
    _require_distinct_ids(train, test)
    room = cfg.model.seq_length - cfg.sampling.max_new_tokens
    solutions = (
        encode_solutions(loaded[warmup_file].problems, tokenizer, cfg.data.prompt, cfg.model.seq_length)
        if cfg.sft.steps
        else []
    )
    return Data(
        tokenizer=tokenizer,
        train=train,
        test=test,
        prompts=encode_prompts([*train, *test], tokenizer, cfg.data.prompt, max_prompt_tokens=room),
        solutions=solutions,
        skipped_rows=_count_skipped(loaded.values()),
    )


def check_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder that cannot be trained, or whose context is shorter than the config's."""
    if cfg.model.path is None:
        return
    from nemo_edo.megatron.build import check_model_folder

    folder = Path(cfg.model.path)
    check_model_folder(folder)
    _check_weights(folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_expected(cfg.model.architecture, fields, str(folder / "config.json"))
    context = fields.get("max_position_embeddings")
    if context is not None and context < cfg.model.seq_length:
        raise UserError(
            f"model.seq_length is {cfg.model.seq_length}, but {folder / 'config.json'} has max_position_embeddings "
            f"{context}: set model.seq_length to at most that"
        )


def _check_weights(folder: Path) -> None:
    """A download that broke off, or a Git LFS pointer in place of a file: found before the run, not in its middle."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = {file.name for file in folder.glob("*.safetensors")}
    if index.is_file():
        names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); download it again") from error


def check_space(cfg: RunConfig, run: RunFolder, data: Data, arms: Iterable[LoopConfig]) -> None:
    """Raises UserError where the disk has no room for the rollouts of all arms and iterations."""
    needed = 0
    evaluated = len(data.test) * (cfg.evaluation.samples + 1)
    needed += cfg.evaluation.rollouts * estimate_bytes(evaluated, data.longest_prompt, cfg.sampling.max_new_tokens)
    for arm in arms:
        short = arm.iterations // cfg.evaluation.every if cfg.evaluation.every else 0
        evaluations = short + cfg.evaluation.rollouts
        needed += evaluations * estimate_bytes(evaluated, data.longest_prompt, cfg.sampling.max_new_tokens)
        problems = min(arm.problems_per_iteration or len(data.train), len(data.train))
        rollouts = problems * cfg.sampling.samples_per_prompt
        needed += arm.iterations * estimate_bytes(rollouts, data.longest_prompt, cfg.sampling.max_new_tokens)
    check_disk_space(run.path, needed)


def build_model(cfg: RunConfig, run: RunFolder, training: SFTConfig | LoopConfig, trainer=None) -> MegatronGPTModel:
    """The model class that ``training`` is the config of, with the starting weights."""
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
    from nemo_edo.models.megatron_gpt_model import model_config

    classes = {SFTConfig: MegatronGPTSFTModel, GRPOConfig: MegatronGPTGRPOModel, IDPOConfig: MegatronGPTDPOModel}
    model_class = classes[type(training)]
    settings = model_config(
        model_folder(cfg, run),
        parallelism=cfg.parallelism,
        precision=cfg.precision,
        lora=cfg.lora,
        seed=cfg.seed,
        threads=cfg.threads,
        attention=cfg.model.attention,
        loss_head=cfg.model.loss_head,
        training=training,
        temperature=1.0 if isinstance(training, SFTConfig) else cfg.sampling.temperature,
    )
    return model_class(settings, trainer=trainer)


def build_objective(cfg: RunConfig, training: GRPOConfig | IDPOConfig, data: Data) -> Objective:
    """What Algorithm 1 trains with, as ``training`` is the config of."""
    from nemo_edo.algorithms.grpo import GRPO
    from nemo_edo.algorithms.idpo import IDPO

    if isinstance(training, IDPOConfig):
        return IDPO(training, pad_id=data.pad_id, seed=cfg.seed)
    questions = {problem.id: problem.question for problem in data.train}
    return GRPO(training, questions, cfg.sampling.max_new_tokens, data.pad_id)


def build_engine(cfg: RunConfig, model: MegatronGPTModel, data: Data) -> MegatronEngine:
    """An in-process engine over the model's own weights."""
    import torch

    from nemo_edo.generation.megatron_engine import MegatronEngine

    def decode(ids: Sequence[int]) -> str:
        return data.tokenizer.decode(ids, skip_special_tokens=True)

    return MegatronEngine(
        model.built,
        stop_ids=[data.tokenizer.eos_token_id],
        decode=decode,
        max_batch_size=cfg.generation.max_batch_size,
        device=model.platform_device,
        progress=torch.distributed.get_rank() == 0,
    )


def given_rollouts(cfg: RunConfig, arm: str, data: Data) -> RolloutStore | None:
    """Where an arm's rollouts come from that are not its own."""
    if cfg.train.rollouts is None:
        return None
    folder = Path(cfg.train.rollouts)
    own = folder / arm
    return RolloutStore(own if own.is_dir() else folder, tokenizer=tokenizer_identity(data.tokenizer))


def _problem_files(data: DataConfig, run: RunFolder) -> tuple[Path, Path, Path]:
    """Warm-up, train, test."""
    if data.train is None:
        return run.data / "warmup.jsonl", run.data / "train.jsonl", run.data / "test.jsonl"
    return Path(data.warmup or data.train), Path(data.train), Path(data.test)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # what tokenizers raises for a damaged file is an Exception of no narrower class
        raise UserError(f"the tokenizer of {folder} cannot be loaded ({error}); copy the model's own there") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {folder} names no eos_token; responses could not end")
    return tokenizer


def _require_distinct_ids(train: list[Problem], test: list[Problem]) -> None:
    shared = {problem.id for problem in train} & {problem.id for problem in test}
    if shared:
        raise UserError(
            f"data.train and data.test have files of one name, so {len(shared)} problems share an id "
            f"(the first {min(shared)}); rename one of the files"
        )


def _count_skipped(loaded: Iterable[LoadedProblems]) -> int:
    return sum(len(problems.skipped) for problems in loaded)
