"""What of a run's config decides how much memory it takes: each of its trainings as a ``memory.Workload``, or where it
trains nothing, its evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_edo.config import FUSED_FROM_COLUMNS, IDPOConfig, LoopConfig, RunConfig, SFTConfig
from nemo_edo.configuration import arm_configs
from nemo_edo.data.packs import COPIES
from nemo_edo.doctor.memory import OVERHEAD, Memory, Workload, all_stages
from nemo_edo.errors import UserError
from nemo_edo.model_shape import ModelShape, check_convertible, check_expected

EVALUATION = "evaluation"
"""What is done where nothing is trained."""


def model_shape(cfg: RunConfig) -> ModelShape:
    """From the model's folder where it is at hand, else from model.architecture.

    Raises UserError where neither tells the sizes, or the two contradict each other.
    """
    expected = cfg.model.architecture
    config_file = Path(cfg.model.path or "") / "config.json"
    if cfg.model.path is not None and config_file.is_file():
        try:
            fields = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{config_file} is not valid JSON: {error}") from error
        check_expected(expected, fields, str(config_file))
        check_convertible(fields, str(config_file))
        return ModelShape.from_hf(fields, str(config_file))
    if expected is None:
        raise UserError(
            f"the sizes of the model are not known: {config_file} is not there and model.architecture is null; choose "
            "the model by its name (model=qwen2_5_7b; docs/models.md has the names)"
        )
    if cfg.model.path is None:
        from nemo_edo.data.arithmetic_model import vocabulary  # it loads torch

        expected = {**expected, "vocab_size": len(vocabulary(cfg.data.arithmetic))}
    return ModelShape.from_hf(expected, "model.architecture")


def trainings(cfg: RunConfig) -> dict[str, SFTConfig | LoopConfig]:
    """The sections that train: the warm-up, if there is one, and every arm."""
    return {**({"sft": cfg.sft} if cfg.sft.steps else {}), **arm_configs(cfg)}


def workloads(cfg: RunConfig, shape: ModelShape, gpus: int, overhead: int = OVERHEAD) -> dict[str, Workload]:
    """Each training's, by its name, or ``EVALUATION``'s where there is none. gpus: of all nodes together, a multiple of
    the model's ranks."""
    columns = shape.vocab_size // cfg.parallelism.tensor_model_parallel_size
    head = cfg.model.loss_head
    found, trained = {}, trainings(cfg)
    for name, training in (trained or {EVALUATION: cfg.sft}).items():
        explores = isinstance(training, LoopConfig)
        found[name] = Workload(
            shape=shape,
            parallelism=cfg.parallelism,
            precision=cfg.precision,
            lora=cfg.lora,
            data_parallel=gpus // cfg.parallelism.model_ranks,
            tokens=micro_batch_tokens(cfg, training),
            copies=COPIES if training.share_prompts else None,
            reference=_reference(cfg, training) if explores else "none",
            fused_loss=head == "fused" or (head == "auto" and columns >= FUSED_FROM_COLUMNS),
            generation_rows=cfg.generation.max_batch_size if cfg.generation.backend == "megatron" else 0,
            generation_length=cfg.model.seq_length,
            overhead=overhead,
            trains=bool(trained),
        )
    return found


def micro_batch_tokens(cfg: RunConfig, training: SFTConfig | LoopConfig) -> int:
    """Of the largest micro-batch: every sequence as long as model.seq_length allows."""
    tokens = training.micro_batch_size * cfg.model.seq_length
    if training.packing:
        return training.micro_batch_tokens
    return tokens if training.micro_batch_tokens is None else min(tokens, training.micro_batch_tokens)


def largest(loads: dict[str, Workload]) -> tuple[str, list[Memory]]:
    """The training whose fullest GPU holds most, and the memory of a GPU of each pipeline stage in it."""
    memories = {name: all_stages(load) for name, load in loads.items()}
    name = max(memories, key=lambda name: max(memory.total for memory in memories[name]))
    return name, memories[name]


def _reference(cfg: RunConfig, training: LoopConfig) -> str:
    if cfg.lora.rank and training.reference == "initial":
        return "none"  # the policy with its adapters off
    needed = isinstance(training, IDPOConfig) or training.beta > 0
    return training.reference_placement if needed else "none"
