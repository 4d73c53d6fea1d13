"""From a config to the objects of a run. No maths here; heavy packages are imported where they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.config import NONE, GRPOConfig, GuardsConfig, IDPOConfig, LoopConfig, RunConfig, SFTConfig
from nemo_edo.config.arms import arm_seed
from nemo_edo.config.generation import PLAIN
from nemo_edo.data.prompts import chat_of, prompt_text
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import BEST
from nemo_edo.generation.in_process import InProcessSync, ServedModel
from nemo_edo.run.comparison import RECORD, Comparison, in_words
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.inputs import Data, given_rollouts, model_folder
from nemo_edo.run.made_from import require_served
from nemo_edo.run.settings import RunSettings

if TYPE_CHECKING:
    from nemo_edo.algorithms.collection import Objective
    from nemo_edo.evaluation.results import Evaluation
    from nemo_edo.generation.server_engine import ServerEngine
    from nemo_edo.interfaces import GenerationEngine, WeightSync
    from nemo_edo.rollouts.store import RolloutStore
    from nemo_edo.worker.remote import RemoteEngine, RemotePolicy


def build_model(
    cfg: RunConfig,
    run: RunFolder,
    training: SFTConfig | LoopConfig,
    *,
    weights: Path | None = None,
    folder: Path | None = None,
) -> RemotePolicy:
    """The model that ``training`` is the config of, on all workers, in place of the one that they have; with the
    weights of a checkpoint, None: the starting ones. folder: the model's; None: that of the config."""
    from nemo_edo.megatron.checksums import DamagedCheckpoint
    from nemo_edo.worker.dispatch import workers
    from nemo_edo.worker.remote import RemotePolicy
    from nemo_edo.worker.worker import Worker

    settings = {
        "folder": folder or model_folder(cfg, run),
        "parallelism": cfg.parallelism,
        "precision": cfg.precision,
        "lora": cfg.lora,
        "seed": cfg.seed,
        "threads": cfg.threads,
        "attention": cfg.model.attention,
        "loss_head": cfg.model.loss_head,
        "temperature": 1.0 if isinstance(training, SFTConfig) else cfg.sampling.temperature,
    }
    try:
        places = workers().call(Worker.build, training, weights, settings)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}: restore it from a copy, or train again under another name=...") from error
    return RemotePolicy(workers(), places)


def load_policy(cfg: RunConfig, run: RunFolder, arm: str) -> RemotePolicy:
    """What an arm has trained. ARM.best and so on: policies of it that were kept as the best; the warm-up's name: what
    the arms start from, with the settings of ``cfg.grpo``."""
    from nemo_edo.config.compose import arm_configs

    training = arm_configs(cfg).get(arm.partition(BEST)[0], cfg.grpo)
    return build_model(cfg, run, training, weights=run.checkpoint(arm))


def build_objective(cfg: RunConfig, training: GRPOConfig | IDPOConfig, data: Data, seed: int) -> Objective:
    """The objective of Algorithm 1 that ``training`` configures. seed: the arm's, of random choices."""
    from nemo_edo.algorithms.grpo import GRPO
    from nemo_edo.algorithms.idpo import IDPO

    if isinstance(training, IDPOConfig):
        return IDPO(training, pad_id=data.pad_id, seed=seed)
    questions = {problem.id: problem.question for problem in data.train}
    own = None
    if training.advantage is not None:
        from nemo_edo.run.own_advantages import OwnAdvantages

        own = OwnAdvantages(training.advantage)
    return GRPO(training, questions, cfg.sampling.max_new_tokens, data.pad_id, own)


def build_guards(cfg: RunConfig, layers: int) -> GuardsConfig:
    """The config's guards; where it leaves the sampler gap's ceiling open, with that of the precision and the depth."""
    from nemo_edo.algorithms.guards import sampler_gap_ceiling

    gap = cfg.guards.sampler_gap
    if gap.ceiling is not None:
        return cfg.guards
    ceiling = sampler_gap_ceiling(cfg.precision, _engine_precision(cfg), layers)
    return replace(cfg.guards, sampler_gap=replace(gap, ceiling=ceiling))


def _engine_precision(cfg: RunConfig) -> str:
    """fp32; or bf16, also for a server that computes in float16, or in the type of the model's folder (trtllm)."""
    dtype = cfg.generation.servers.dtype if cfg.generation.is_served else None
    if cfg.generation.backend == "trtllm" or dtype in ("bfloat16", "float16"):
        return "bf16"
    return cfg.precision.dtype if dtype is None else "fp32"


def build_engine(
    cfg: RunConfig, model: RemotePolicy, data: Data, servers: ServerEngine | None
) -> RemoteEngine | ServerEngine:
    """The run's servers, or the workers' engines over the model's own weights."""
    if servers is not None:
        return servers
    from nemo_edo.worker.remote import RemoteEngine
    from nemo_edo.worker.worker import Worker

    settings = cfg.generation
    replay = settings.routing_replay
    model.workers.call(Worker.build_engine, data.stop.ids, data.decode, settings.max_batch_size, replay)
    return RemoteEngine(model)


def holds_no_model(cfg: RunConfig) -> bool:
    """Whether servers have all that is evaluated, and the run's processes need neither Megatron nor a GPU."""
    return cfg.algorithm == NONE and cfg.generation.is_served


def check_servers(cfg: RunConfig) -> None:
    """Raises UserError where the config's servers could not be started or asked."""
    if cfg.generation.is_served:
        import torch

        from nemo_edo.generation import servers

        servers.check_servers(servers.placed(cfg, _trainers_gpus(cfg)), torch.cuda.device_count())


def check_refit(cfg: RunConfig, run: RunFolder) -> None:
    """Raises UserError where trained weights could not reach the config's servers."""
    if cfg.generation.is_served:
        from nemo_edo.refit import setup

        setup.check_refit(cfg, run.path)


def start_servers(cfg: RunConfig, run: RunFolder, data: Data) -> ServerEngine | None:
    """Starts the servers of the config with the weights that the run begins with, and waits until they are ready; None
    where generation is in process. Raises UserError where one is not."""
    if not cfg.generation.is_served:
        return None
    import torch

    from nemo_edo.generation import servers

    folder = model_folder(cfg, run)
    own = servers.placed(cfg, _trainers_gpus(cfg))
    replicas = servers.build_replicas(own, folder, run.path / "servers", torch.cuda.device_count())
    servers.start(replicas, cfg.model.seq_length)
    if cfg.generation.servers.urls and run.journal():
        require_served(run.journal()["files"].get("served"), replicas[0].served, cfg.allow_changed)
        run.note_inputs([], served=replicas[0].served)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = servers.build_server_engine(
        cfg,
        replicas,
        stop_ids=data.stop.ids,
        vocab_size=fields["vocab_size"],
        decode=data.decode,
        progress=True,
        **_of_plain_endpoints(cfg, data),
    )
    if cfg.generation.placement == "shared":
        from nemo_edo.refit.setup import build_sleep
        from nemo_edo.worker.dispatch import workers

        build_sleep(cfg, workers()).begin(engine.replicas)
    return engine


def _of_plain_endpoints(cfg: RunConfig, data: Data) -> dict[str, Any]:
    """What an engine over them needs to know of texts and tokens."""
    if cfg.generation.backend != PLAIN:
        return {}
    chats = {problem.id: chat_of(problem, data.style) for problem in (*data.train, *data.test)}
    return {
        "encode": lambda text: data.tokenizer.encode(text, add_special_tokens=False),
        "prompt_text": lambda ids: prompt_text(data.tokenizer, ids),
        "chats": chats if cfg.generation.servers.chat else None,
    }


def _trainers_gpus(cfg: RunConfig) -> int:
    """GPUs that this run's processes on this machine use."""
    import torch

    if holds_no_model(cfg) or not torch.cuda.is_available():
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def build_weight_sync(cfg: RunConfig, run: RunFolder, model: RemotePolicy, engine: GenerationEngine) -> WeightSync:
    """What brings the model's weights to the engine."""
    if not cfg.generation.is_served:
        return InProcessSync(engine)
    from nemo_edo.refit.setup import build_server_sync

    return build_server_sync(cfg, run.path, model_folder(cfg, run), model.workers, engine)


def run_settings(cfg: RunConfig) -> RunSettings:
    """What the stages read of the config."""
    from nemo_edo.config.compose import arm_configs  # loads Hydra

    arms = arm_configs(cfg)
    return RunSettings(
        trains=cfg.algorithm != NONE,
        arms=arms,
        seeds={arm: arm_seed(cfg, arm) for arm in arms},
        seed=cfg.seed,
        sft=cfg.sft,
        sampling=cfg.sampling,
        generation=cfg.generation,
        evaluation=cfg.evaluation,
        checkpoint=cfg.checkpoint,
        early_stop=cfg.early_stop,
        guards=cfg.guards,
        profile=cfg.profile,
    )


class Builder:
    """Makes the parts of one run from its config, which its stages do not see."""

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        data: Data,
        servers: ServerEngine | None,
        comparison: Comparison | None = None,
    ) -> None:
        """servers: the engine of all stages; None: each generates with its own model. comparison: of the model that the
        run starts from."""
        self._cfg, self._folder, self._data, self._servers = cfg, folder, data, servers
        self._comparison = comparison

    @property
    def holds_no_model(self) -> bool:
        return holds_no_model(self._cfg)

    def model(self, training: SFTConfig | LoopConfig, weights: Path | None = None) -> RemotePolicy:
        """``build_model``."""
        return build_model(self._cfg, self._folder, training, weights=weights)

    def first(self) -> RemotePolicy:
        """The model that the run starts from, once it is known to be transformers'."""
        if self._comparison is None:
            return self.model(self._cfg.sft)
        try:
            model = build_model(self._cfg, self._folder, self._cfg.sft, folder=self._comparison.folder)
            found = self._comparison.finish(model)
            self._folder.write_json(RECORD, found)
            print(in_words(found))
            return self.model(self._cfg.sft) if self._comparison.is_truncated else model
        finally:
            self._comparison.close()

    def trained(self, arm: str) -> RemotePolicy:
        """``load_policy``."""
        return load_policy(self._cfg, self._folder, arm)

    def untrained(self) -> RemotePolicy | ServedModel:
        """The model of a run that trains nothing, behind the run's servers or in this process."""
        return self.first() if self._servers is None else ServedModel(self._servers)

    def connect(self, model: RemotePolicy) -> None:
        """Gives the model its generation engine, and what pushes its weights there."""
        model.engine = build_engine(self._cfg, model, self._data, self._servers)
        model.weight_sync = build_weight_sync(self._cfg, self._folder, model, model.engine)

    def objective(self, training: GRPOConfig | IDPOConfig, seed: int) -> Objective:
        """``build_objective``."""
        return build_objective(self._cfg, training, self._data, seed)

    def guards(self, layers: int) -> GuardsConfig:
        """``build_guards``."""
        return build_guards(self._cfg, layers)

    def given_rollouts(self, arm: str) -> RolloutStore | None:
        """The rollouts of another run that an arm trains on."""
        return given_rollouts(self._cfg, arm, self._data)

    def analyse_test_time(
        self, arm: str, stores: Mapping[str, RolloutStore], temperature: float
    ) -> tuple[Evaluation, list[str]]:
        """``evaluate_stored.analyse_arm``: what voting, best-of-N and weights make of an arm's responses."""
        from nemo_edo.run.evaluate_stored import analyse_arm

        return analyse_arm(self._folder, self._cfg, arm, stores, temperature)

    def summary(self, seconds: Mapping[str, float]) -> dict:
        """The content of summary.json."""
        from nemo_edo.config.compose import arm_configs
        from nemo_edo.run.summary import summary
        from nemo_edo.worker.dispatch import workers

        return summary(self._cfg, arm_configs(self._cfg), self._data.skipped_rows, seconds, workers().size)

    def close(self) -> None:
        if self._comparison is not None:
            self._comparison.close()
        if self._servers is not None:
            self._servers.close()
