"""From a config to the objects of a run. No maths here; heavy packages are imported where they are used."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo import config
from nemo_edo.algorithms.collection import Objective
from nemo_edo.config.generation import PLAIN
from nemo_edo.data.model_folder import find_model
from nemo_edo.data.prompts import messages_of, prompt_text
from nemo_edo.errors import DamagedCheckpoint, UserError
from nemo_edo.evaluation.results import BEST
from nemo_edo.generation.in_process import InProcessSync
from nemo_edo.interfaces import GenerationEngine, WeightSync
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run.comparison import LENGTH, RECORD, FolderComparison, in_words
from nemo_edo.run.inputs import Data, model_folder
from nemo_edo.run.made_from import compare_served
from nemo_edo.run_folder import RunFolder
from nemo_edo.worker.dispatch import workers
from nemo_edo.worker.remote import RemoteEngine, RemotePolicy
from nemo_edo.worker.worker import Worker

if TYPE_CHECKING:
    from nemo_edo.generation.replica import Replica
    from nemo_edo.generation.server_engine import ServerEngine


class Builder:
    """Makes the parts of a run from its config, which its stages do not see."""

    def __init__(self, cfg: config.RunConfig, folder: RunFolder, data: Data | None = None) -> None:
        """data: needed for engines and objectives."""
        self._cfg, self._folder, self._data = cfg, folder, data
        self.servers: ServerEngine | None = None
        """The engine of all stages; None: each generates with its own model."""
        self._comparison: FolderComparison | None = None

    @property
    def holds_no_model(self) -> bool:
        """Whether servers have all that is evaluated, and the run's processes need neither Megatron nor a GPU."""
        return self._cfg.algorithm == config.NONE and self._cfg.generation.is_served

    def close(self) -> None:
        if self._comparison is not None:
            self._comparison.close()
        if self.servers is not None:
            self.servers.close()

    # --- the model ------------------------------------------------------------------------------------------------

    def model(
        self, training: config.SFTConfig | config.ArmConfig, weights: Path | None = None, folder: Path | None = None
    ) -> RemotePolicy:
        """The model that ``training`` is the config of, on all workers, in place of the one that they have; with the
        weights of a checkpoint, None: the starting ones. folder: the model's; None: that of the config."""
        cfg = self._cfg
        settings = {
            "folder": folder or model_folder(cfg.model, self._folder),
            "parallelism": cfg.parallelism,
            "precision": cfg.precision,
            "lora": cfg.lora,
            "seed": cfg.seed,
            "threads": cfg.threads,
            "attention": cfg.model.attention,
            "loss_head": cfg.model.loss_head,
            "temperature": 1.0 if isinstance(training, config.SFTConfig) else cfg.sampling.temperature,
        }
        try:
            places = workers().call(Worker.build, training, weights, settings)
        except DamagedCheckpoint as error:
            raise UserError(f"{error}: restore it from a copy, or train again under another name=...") from error
        return RemotePolicy(workers(), places)

    def begin_comparison(self) -> None:
        """Another process begins to compute what ``first`` compares the model with, unless the run has made that
        comparison. A model without a path has nothing to be compared with: the run makes its weights itself."""
        cfg, scratch = self._cfg, self._folder.path / "comparison"
        if cfg.model.verify and cfg.model.path is not None and not (self._folder.path / RECORD).exists():
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed run
            scratch.mkdir()
            folder, length = find_model(cfg.model.path), cfg.model.seq_length or LENGTH
            self._comparison = FolderComparison(folder, cfg.precision, cfg.parallelism, length, scratch)

    def first(self) -> RemotePolicy:
        """The model that the run starts from, once it is known to be transformers'."""
        from nemo_edo.megatron.precision import warn_of_emulated_bf16

        warn_of_emulated_bf16(self._cfg.precision)
        if self._comparison is None:
            return self.model(self._cfg.sft)
        try:
            model = self.model(self._cfg.sft, folder=self._comparison.folder)
            found = self._comparison.finish(model)
            self._folder.write_json(RECORD, found)
            print(in_words(found))
            return self.model(self._cfg.sft) if self._comparison.layers else model
        finally:
            self._comparison.close()

    def trained(self, policy: str) -> RemotePolicy:
        """What an arm has trained. ARM.best and so on: policies of it that were kept as the best; the warm-up's name:
        what the arms start from, with the settings of ``cfg.grpo``."""
        from nemo_edo.config.compose import arm_configs

        training = arm_configs(self._cfg).get(policy.partition(BEST)[0], self._cfg.grpo)
        return self.model(training, self._folder.checkpoint(policy))

    # --- its training ---------------------------------------------------------------------------------------------

    def objective(self, training: config.GRPOConfig | config.IDPOConfig, seed: int) -> Objective:
        """The objective of Algorithm 1 that ``training`` configures. seed: the arm's, of random choices."""
        from nemo_edo.algorithms.grpo import GRPO, OwnAdvantages
        from nemo_edo.algorithms.idpo import IDPO

        data = self._data
        if isinstance(training, config.IDPOConfig):
            return IDPO(training, pad_id=data.pad_id, seed=seed)
        questions = {problem.id: problem.question for problem in data.train}
        own = None if training.advantage is None else OwnAdvantages(training.advantage)
        return GRPO(training, questions, self._cfg.sampling.max_new_tokens, data.pad_id, own)

    def guards(self, layers: int) -> config.GuardsConfig:
        """The config's guards; where it leaves the sampler gap's ceiling open, with that of the precisions and the
        depth. layers: of the whole model."""
        from nemo_edo.algorithms.guards import GAP_OF_A_LAYER

        cfg, gap = self._cfg, self._cfg.guards.sampler_gap
        if gap.ceiling is not None:
            return cfg.guards
        # A server may compute in float16, or in the type of the model's folder (trtllm).
        dtype = cfg.generation.servers.dtype if cfg.generation.is_served else None
        engine = cfg.precision.dtype if dtype is None else "fp32"
        if cfg.generation.backend == "trtllm" or dtype in ("bfloat16", "float16"):
            engine = "bf16"
        of_a_layer = (GAP_OF_A_LAYER[one] for one in (engine, "fp8" if cfg.precision.fp8 else cfg.precision.dtype))
        return replace(cfg.guards, sampler_gap=replace(gap, ceiling=max(of_a_layer) * math.sqrt(layers)))

    def given_rollouts(self, arm: str) -> RolloutStore | None:
        """The rollouts of another run that an arm trains on."""
        if self._cfg.train.rollouts is None:
            return None
        folder = Path(self._cfg.train.rollouts)
        own = folder / arm
        return RolloutStore(own if own.is_dir() else folder, tokenizer=tokenizer_identity(self._data.tokenizer))

    # --- generation -----------------------------------------------------------------------------------------------

    def check_servers(self) -> None:
        """Raises UserError where the config's servers could not be started or asked."""
        if self._cfg.generation.is_served:
            import torch

            from nemo_edo.generation import servers

            servers.check_servers(servers.placed(self._cfg.generation, self._own_gpus()), torch.cuda.device_count())

    def check_refit(self) -> None:
        """Raises UserError where trained weights could not reach the config's servers."""
        if self._cfg.generation.is_served:
            from nemo_edo.refit import setup

            cfg = self._cfg
            setup.check_refit(cfg.generation, cfg.lora, cfg.model.path, cfg.precision.dtype, self._folder.path)

    def start_servers(self) -> None:
        """Starts the servers of the config, if any, with the weights that the run begins with, and waits until they are
        ready. Raises UserError where one is not."""
        cfg, run = self._cfg, self._folder
        if not cfg.generation.is_served:
            return
        import torch

        from nemo_edo.generation import servers

        placed = servers.placed(cfg.generation, self._own_gpus())
        replicas = self.replicas(placed, run.path / "servers", torch.cuda.device_count())
        servers.start(replicas, cfg.model.seq_length)
        settings = cfg.generation.servers
        if settings.urls and not settings.launched and run.journal():  # a launch's have the run's own model
            noted = run.journal()["files"].get("served")
            served, changed = compare_served(noted, replicas[0].served, cfg.allow_changed)
            run.note_inputs(changed, served=served)
        self.servers = self.server_engine(replicas)
        if cfg.generation.placement == "shared":
            from nemo_edo.refit.setup import build_sleep

            build_sleep(cfg.generation.servers, workers()).begin(self.servers.replicas)

    def replicas(
        self, generation: config.GenerationConfig, logs: Path, gpus: int, key: str | None = None
    ) -> Sequence[Replica]:
        """Replicas that are not started. generation: the config's, with a place on this machine. logs: the folder of
        their logs. gpus: number of GPUs of this machine. key: what managed servers ask for; None: a new one."""
        from nemo_edo.generation import servers
        from nemo_edo.generation.server_api import APIS

        cfg, settings, refit = self._cfg, generation.servers, generation.refit
        if settings.urls:
            return servers.replicas_at_urls(settings, plain=generation.backend == PLAIN)
        nccl = refit.transport == "nccl"
        api = APIS[generation.backend](
            settings=settings,
            dtype=settings.dtype or ("float32" if cfg.precision.dtype == "fp32" else "bfloat16"),
            log=logs,
            max_length=cfg.model.seq_length,
            arguments=("--weight-transfer-config", json.dumps({"backend": "nccl"})) if nccl else (),
            # With a top-p cut, training and evaluations are at temperature 1 (``config.run``), where both kinds are
            # the same for an evaluation, which has no cut.
            logprobs_after_temperature=generation.backend == "vllm" and cfg.sampling.top_p == 1,
            sleeps=generation.placement == "shared",
            nccl_library=servers.nccl_library(generation) if nccl else None,
            adapter_rank=cfg.lora.rank if cfg.lora.rank and refit.lora == "adapter" else None,
            returns_experts=generation.routing_replay,
        )
        return servers.managed_replicas(api, model_folder(cfg.model, self._folder), gpus, key)

    def server_engine(self, replicas: Sequence[Replica]) -> ServerEngine:
        """An engine over replicas that are ready."""
        from nemo_edo.generation.server_api import APIS, ServerAPI
        from nemo_edo.generation.server_engine import PlainEngine, ServerEngine

        generation, data = self._cfg.generation, self._data
        kind: type[ServerEngine] = ServerEngine
        texts: dict[str, Any] = {}
        if generation.backend == PLAIN:  # what an engine over plain endpoints needs to know of texts and tokens
            chats = {problem.id: messages_of(problem, data.style) for problem in (*data.train, *data.test)}
            kind = PlainEngine
            texts = {
                "encode": lambda text: data.tokenizer.encode(text, add_special_tokens=False),
                "prompt_text": lambda ids: prompt_text(data.tokenizer, ids),
                "chats": chats if generation.servers.chat else None,
            }
        fields = json.loads((model_folder(self._cfg.model, self._folder) / "config.json").read_text(encoding="utf-8"))
        return kind(
            replicas,
            APIS.get(generation.backend, ServerAPI),
            generation.servers,
            stop_ids=data.stop.ids,
            vocab_size=fields["vocab_size"],
            decode=data.decode,
            keeps_experts=generation.routing_replay,
            progress=True,
            **texts,
        )

    def _own_gpus(self) -> int:
        """GPUs that this run's processes on this machine use."""
        import torch

        if self.holds_no_model or not torch.cuda.is_available():
            return 0
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def connect(self, model: RemotePolicy) -> None:
        """Gives the model its generation engine, and what pushes its weights there."""
        model.engine = self.engine(model) if self.servers is None else self.servers
        model.weight_sync = self.weight_sync(model, model.engine)

    def engine(self, model: RemotePolicy) -> RemoteEngine:
        """The workers' engines over the model's own weights."""
        data, settings = self._data, self._cfg.generation
        replay = settings.routing_replay
        model.workers.call(Worker.build_engine, data.stop.ids, data.decode, settings.max_batch_size, replay)
        return RemoteEngine(model)

    def weight_sync(self, model: RemotePolicy, engine: GenerationEngine) -> WeightSync:
        """What brings the model's weights to the engine."""
        if not self._cfg.generation.is_served:
            return InProcessSync(engine)
        from nemo_edo.refit.setup import build_server_sync, weight_bytes

        cfg, generation, size = self._cfg, self._cfg.generation, 0
        if generation.refit.transport == "disk":
            size = weight_bytes(model_folder(cfg.model, self._folder), cfg.precision.dtype)
        return build_server_sync(generation, self._folder.path, size, model.workers, engine)
