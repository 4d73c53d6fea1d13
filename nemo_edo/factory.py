"""From a config to the objects of a run. It holds no maths, and imports heavy packages only where they are used."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import DataConfig, GRPOConfig, IDPOConfig, LoopConfig, RunConfig, SFTConfig
from nemo_edo.data.disk_space import check_disk_space, estimate_bytes
from nemo_edo.data.problems import LoadedProblems, load_problems
from nemo_edo.data.prompts import encode_prompts, encode_solutions, prompt_style
from nemo_edo.data.rollout_store import RolloutStore, tokenizer_identity
from nemo_edo.data.tokenizer import load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.model_shape import check_expected
from nemo_edo.rewards.scorers import build_scorer
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_edo.algorithms.collection import Objective
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.generation.server_engine import ServerEngine
    from nemo_edo.interfaces import GenerationEngine, Scorer, WeightSync
    from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
    from nemo_edo.rewards.judge import Judge

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
    scorer: Scorer = field(default_factory=ExactAnswerScorer)
    """What judges responses to them."""
    judge: Judge | None = None
    """The language model behind the scorer, where one is, on the first rank alone."""

    @property
    def pad_id(self) -> int:
        """Any id would do: padding is masked."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    def decode(self, ids: Sequence[int]) -> str:
        """A response's text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt) for prompt in self.prompts.values())


def write_builtin_files(cfg: RunConfig, run: RunFolder, *, weights: bool = True) -> None:
    """The built-in task's problem files and a model with random weights, where the config names none of its own.

    Without ``weights``, all that ``load_data`` needs.
    """
    from nemo_edo.data.arithmetic import write_dataset
    from nemo_edo.data.arithmetic_model import write_base_model

    if cfg.data.is_built_in:
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
    loaded = {}
    if train_file is not None:
        loaded[train_file] = _load_problems(cfg.data, train_file, cfg.data.benchmark, "train")
    loaded[test_file] = _load_problems(cfg.data, test_file, cfg.data.tested_on, "test")
    scorer, judge = build_scorer(cfg, loaded)
    if cfg.sft.steps and warmup_file not in loaded:
        loaded[warmup_file] = _load_problems(cfg.data, warmup_file, cfg.data.benchmark, "train")
    tokenizer = _policy_tokenizer(model_folder(cfg, run))
    train = [] if train_file is None else loaded[train_file].problems
    test = loaded[test_file].problems
    _require_distinct_ids(train, test)
    room = cfg.model.seq_length - cfg.sampling.max_new_tokens
    style = prompt_style(cfg.data.prompt, cfg.data.chat_template, tokenizer)
    solutions = (
        encode_solutions(loaded[warmup_file].problems, tokenizer, style, cfg.model.seq_length) if cfg.sft.steps else []
    )
    return Data(
        tokenizer=tokenizer,
        train=train,
        test=test,
        prompts=encode_prompts([*train, *test], tokenizer, style, max_prompt_tokens=room),
        solutions=solutions,
        skipped_rows=_count_skipped(loaded.values()),
        scorer=scorer,
        judge=judge,
    )


def check_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder that cannot be trained, or whose context is shorter than the config's."""
    if cfg.model.path is None:
        return
    from nemo_edo.megatron.build import check_model_folder

    folder = Path(cfg.model.path)
    check_model_folder(folder)
    _check_weights(folder)
    _check_fields(cfg, json.loads((folder / "config.json").read_text(encoding="utf-8")), folder / "config.json")


def check_served_model(cfg: RunConfig) -> None:
    """Raises UserError for a model folder whose model servers could not serve: they need its weights where the run
    starts them, else a tokenizer and a config are all."""
    if cfg.model.path is None:
        return
    folder = Path(cfg.model.path)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {folder / 'config.json'} cannot be read ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("vocab_size"), int):
        raise UserError(f"{folder / 'config.json'} has no vocab_size, which responses are checked against")
    _check_fields(cfg, fields, folder / "config.json")
    if not cfg.generation.servers.urls:
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                f"{folder} has no weights (*.safetensors) for the server that the run starts; or name one that serves "
                "the model already: generation.servers.urls"
            )
        _check_weights(folder)


def _check_fields(cfg: RunConfig, fields: dict, path: Path) -> None:
    check_expected(cfg.model.architecture, fields, str(path))
    context = fields.get("max_position_embeddings")
    if context is not None and context < cfg.model.seq_length:
        raise UserError(
            f"model.seq_length is {cfg.model.seq_length}, but {path} has max_position_embeddings "
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


def build_model(
    cfg: RunConfig, run: RunFolder, training: SFTConfig | LoopConfig, trainer=None, *, weights: Path | None = None
) -> MegatronGPTModel:
    """The model class that ``training`` is the config of, with the weights of a checkpoint; None: the starting ones."""
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
    model = model_class(settings, trainer=trainer)
    if weights is not None:
        from nemo_edo.megatron import checkpoint

        checkpoint.load(model.policy, weights)
    return model


def load_policy(cfg: RunConfig, run: RunFolder, arm: str) -> MegatronGPTModel:
    """What an arm has trained. ARM.best: the policy of it that was kept as the best; the warm-up's name: what the arms
    start from, with the settings of ``cfg.grpo``."""
    from nemo_edo.configuration import arm_configs

    training = arm_configs(cfg).get(arm.removesuffix(".best"), cfg.grpo)
    return build_model(cfg, run, training, weights=run.checkpoint(arm))


def build_objective(cfg: RunConfig, training: GRPOConfig | IDPOConfig, data: Data) -> Objective:
    """What Algorithm 1 trains with, as ``training`` is the config of."""
    from nemo_edo.algorithms.grpo import GRPO
    from nemo_edo.algorithms.idpo import IDPO

    if isinstance(training, IDPOConfig):
        return IDPO(training, pad_id=data.pad_id, seed=cfg.seed)
    questions = {problem.id: problem.question for problem in data.train}
    return GRPO(training, questions, cfg.sampling.max_new_tokens, data.pad_id)


def build_engine(
    cfg: RunConfig, model: MegatronGPTModel, data: Data, servers: ServerEngine | None
) -> MegatronEngine | ServerEngine:
    """The run's servers, or an in-process engine over the model's own weights."""
    if servers is not None:
        return servers
    import torch

    from nemo_edo.generation.megatron_engine import MegatronEngine

    return MegatronEngine(
        model.built,
        stop_ids=[data.tokenizer.eos_token_id],
        decode=data.decode,
        max_batch_size=cfg.generation.max_batch_size,
        device=model.platform_device,
        progress=torch.distributed.get_rank() == 0,
    )


def check_servers(cfg: RunConfig) -> None:
    """Raises UserError, on all ranks, where the config's servers could not be started or asked."""
    if cfg.generation.is_served:
        import torch

        from nemo_edo.generation import servers
        from nemo_edo.parallel.main_rank import on_main

        on_main(lambda: servers.check_servers(cfg, torch.cuda.device_count()))


def check_refit(cfg: RunConfig, run: RunFolder) -> None:
    """Raises UserError, on all ranks, where trained weights could not reach the config's servers."""
    if cfg.generation.is_served:
        from nemo_edo.parallel.main_rank import on_main
        from nemo_edo.refit import setup

        on_main(lambda: setup.check_refit(cfg, run.path))


def start_servers(cfg: RunConfig, run: RunFolder, data: Data) -> ServerEngine | None:
    """Starts the servers of the config, on the first rank, with the weights that the run begins with, and waits until
    they are ready; None where responses are drawn in process. Raises UserError, on all ranks, where one is not."""
    if not cfg.generation.is_served:
        return None
    import torch

    from nemo_edo.generation import servers
    from nemo_edo.parallel.main_rank import is_main, on_main_for_long

    folder = model_folder(cfg, run)
    gpus = torch.cuda.device_count()
    replicas = servers.build_replicas(cfg, folder, run.path / "servers", gpus) if is_main() else []
    on_main_for_long(lambda: servers.start(replicas, cfg.model.seq_length))
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = servers.build_server_engine(
        cfg,
        replicas,
        stop_id=data.tokenizer.eos_token_id,
        vocab_size=fields["vocab_size"],
        decode=data.decode,
        model_folder=folder,
        progress=is_main(),
    )
    if cfg.generation.placement == "shared":
        from nemo_edo.refit.setup import asleep

        asleep(cfg).begin(engine.replicas)
    return engine


def build_weight_sync(cfg: RunConfig, run: RunFolder, model: MegatronGPTModel, engine: GenerationEngine) -> WeightSync:
    """What brings the model's weights to the engine."""
    from nemo_edo.refit.in_process import InProcessSync

    if not cfg.generation.is_served:
        return InProcessSync(engine)
    from nemo_edo.refit.setup import build_server_sync

    return build_server_sync(cfg, run.path, model_folder(cfg, run), model, engine)


def given_rollouts(cfg: RunConfig, arm: str, data: Data) -> RolloutStore | None:
    """Where an arm's rollouts come from that are not its own."""
    if cfg.train.rollouts is None:
        return None
    folder = Path(cfg.train.rollouts)
    own = folder / arm
    return RolloutStore(own if own.is_dir() else folder, tokenizer=tokenizer_identity(data.tokenizer))


def _problem_files(data: DataConfig, run: RunFolder) -> tuple[Path | None, Path | None, Path]:
    """Warm-up, train, test; the first two None where a file to evaluate on is all."""
    if data.is_built_in:
        return run.data / "warmup.jsonl", run.data / "train.jsonl", run.data / "test.jsonl"
    if data.train is None:
        return None, None, Path(data.test)
    return Path(data.warmup or data.train), Path(data.train), Path(data.test)


def _load_problems(data: DataConfig, path: Path, benchmark: str | None, split: str) -> LoadedProblems:
    return load_problems(
        path, on_bad_rows=data.on_bad_rows, benchmark=benchmark, split=split, check_rows=data.check_rows
    )


def _policy_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(folder)
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
