"""A run's config as memory estimates see it: a ``Workload`` for each training, or for the evaluation of a run that
trains nothing. And whether the config's splits are possible."""

from __future__ import annotations

import bisect
import math
from dataclasses import replace
from pathlib import Path

from nemo_edo.checks.estimates import Memory, Workload, all_stages
from nemo_edo.config import FUSED_FROM_LOGITS, IDPOConfig, LoopConfig, RunConfig, SFTConfig
from nemo_edo.config.compose import arm_configs
from nemo_edo.config.generation import AUTO
from nemo_edo.config.model_shape import ModelShape, check_expected
from nemo_edo.data.model_folder import read_fields
from nemo_edo.errors import UserError
from nemo_edo.generation.batch_size import MOST_ON_CPU
from nemo_edo.megatron.splits import check_adapters, check_splits, check_world

ASSUMED_PROMPT = 200
"""Tokens of a prompt, where the problems are not at hand."""
EVALUATION = "evaluation"
"""The name of the workload of a run that trains nothing."""


def model_shape(cfg: RunConfig) -> ModelShape:
    """The sizes in the model's folder if it is on this machine, otherwise those of model.architecture.

    Raises UserError where neither tells the sizes, or the two contradict each other.
    """
    expected = cfg.model.architecture
    config_file = Path(cfg.model.path or "") / "config.json"
    if cfg.model.path is not None and config_file.is_file():
        fields = read_fields(config_file.parent)
        check_expected(expected, fields, str(config_file))
        return ModelShape.from_hf(fields, str(config_file))
    if expected is None:
        raise UserError(
            f"the sizes of the model are not known: {config_file} is not there and model.architecture is null; choose "
            "the model by its name (model=qwen2_5_7b; docs/models.md has the names)"
        )
    if cfg.model.path is None:
        from nemo_edo.builtin_task.model import vocabulary

        expected = {**expected, "vocab_size": len(vocabulary(cfg.data.arithmetic))}
    return ModelShape.from_hf(expected, "model.architecture")


def trainings(cfg: RunConfig) -> dict[str, SFTConfig | LoopConfig]:
    """The sections that train: the warm-up, if there is one, and every arm."""
    return {**({"sft": cfg.sft} if cfg.sft.steps else {}), **arm_configs(cfg)}


def workloads(
    cfg: RunConfig, shape: ModelShape, gpus: int, *, cpu: bool = False, tested: float = math.inf
) -> dict[str, Workload]:
    """The workload of each training by its name, or of ``EVALUATION`` if nothing is trained. gpus: of all nodes
    together, or processes on a CPU; a multiple of the model's ranks. tested: number of test problems, as far as it is
    known."""
    from nemo_edo.data.shares import COPIES  # it imports torch

    ranks = gpus // cfg.parallelism.model_ranks
    columns = shape.vocab_size // cfg.parallelism.tensor_model_parallel_size
    head = cfg.model.loss_head
    found, trained = {}, trainings(cfg)
    for name, training in (trained or {EVALUATION: cfg.sft}).items():
        reference = "none"
        # With adapters the initial policy is the policy without them.
        if isinstance(training, LoopConfig) and not (cfg.lora.rank and training.reference == "initial"):
            if isinstance(training, IDPOConfig) or training.beta > 0:
                reference = training.reference_placement
        found[name] = Workload(
            shape=shape,
            parallelism=cfg.parallelism,
            precision=cfg.precision,
            lora=cfg.lora,
            data_parallel=ranks,
            tokens=(tokens := micro_batch_tokens(cfg, training)),
            copies=COPIES if training.share_prompts else None,
            reference=reference,
            fused_loss=head == "fused" or (head == "auto" and columns * tokens >= FUSED_FROM_LOGITS),
            generation_rows=0 if cfg.generation.is_served else counted_rows(cfg),
            cached_positions=_cached_positions(cfg, ranks, tested, shares_prompts=cpu),
            cpu=cpu,
            trains=bool(trained),
        )
    return found


def counted_rows(cfg: RunConfig) -> int:
    """Sequences that are decoded at a time on one data-parallel rank, in estimates: of auto, which takes as many as
    there is memory for, the most that it takes on a CPU."""
    rows = cfg.generation.max_batch_size
    return MOST_ON_CPU if rows == AUTO else int(rows)


def with_rows_that_fit(cfg: RunConfig, shape: ModelShape, gpus: int, limit: int, *, rows: int, **known) -> RunConfig:
    """The config with the number in place of ``generation.max_batch_size=auto`` that has room in ``limit`` bytes, by
    the estimate: ``rows`` at most and one at least. known: as for ``workloads``."""

    def with_rows(number: int) -> RunConfig:
        return replace(cfg, generation=replace(cfg.generation, max_batch_size=number))

    def fits(number: int) -> bool:
        loads = workloads(with_rows(number), shape, gpus, **known).values()
        return all(memory.generating <= limit for load in loads for memory in all_stages(load))

    # The first number that has no room.
    return with_rows(max(1, bisect.bisect_left(range(1, rows + 1), True, key=lambda number: not fits(number))))


def _cached_positions(cfg: RunConfig, data_parallel: int, tested: float, *, shares_prompts: bool) -> int:
    """Tokens in the cache of a full batch. Where attention ``shares_prompts``, the responses to one read it from one
    copy (taken as if a batch's prompts were of one length). A greedy response has its prompt alone."""
    rows, length, longest = counted_rows(cfg), cfg.model.seq_length, cfg.sampling.max_new_tokens
    groups = [cfg.evaluation.samples * cfg.evaluation.rollouts]
    if cfg.has_arms:
        groups.append(cfg.sampling.samples_per_prompt)
    together = min(groups) // data_parallel
    if not shares_prompts or cfg.model.attention not in ("auto", "sdpa") or together < 2:
        return rows * length
    greedy = min(rows, math.ceil(min(tested, rows * data_parallel) / data_parallel))
    return max(rows * longest + math.ceil(rows / together) * (length - longest), greedy * length)


def for_estimate(
    cfg: RunConfig, data_parallel: int, *, longest: int | None = None, train: float = math.inf, test: float = math.inf
) -> RunConfig:
    """The config with what is decoded at a time at most in place of ``generation.max_batch_size``, as a rank may have
    fewer responses to generate than that, and with a number for ``model.seq_length``.

    longest: tokens of the longest sequence; None: an assumption. train, test: numbers of problems; infinite where they
    are not known.
    """
    asked = [test * cfg.evaluation.samples * cfg.evaluation.rollouts]
    for training in trainings(cfg).values():
        if isinstance(training, LoopConfig):
            asked.append(min(training.problems_per_iteration or train, train) * cfg.sampling.samples_per_prompt)
    at_a_time = min(cfg.generation.part_size, max(asked)) / data_parallel
    rows = math.ceil(min(counted_rows(cfg), at_a_time))
    length = cfg.model.seq_length or longest or ASSUMED_PROMPT + cfg.sampling.max_new_tokens
    return replace(
        cfg,
        model=replace(cfg.model, seq_length=length),
        generation=replace(cfg.generation, max_batch_size=rows),
    )


def problems(cfg: RunConfig, split: str) -> float:
    """The number of "train" or "test" problems, as far as it is known without a tokenizer; otherwise infinite."""
    if cfg.data.is_built_in:
        return getattr(cfg.data.arithmetic, f"{split}_problems")
    path = Path(getattr(cfg.data, split) or "")
    if path.suffix != ".jsonl" or not path.is_file():
        return math.inf
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def micro_batch_tokens(cfg: RunConfig, training: SFTConfig | LoopConfig) -> int:
    """Tokens of the largest micro-batch: every sequence as long as model.seq_length allows."""
    tokens = training.micro_batch_size * cfg.model.seq_length
    if training.packing:
        return training.micro_batch_tokens
    return tokens if training.micro_batch_tokens is None else min(tokens, training.micro_batch_tokens)


def largest(loads: dict[str, Workload]) -> tuple[str, list[Memory]]:
    """The training whose fullest GPU needs most, and the memory of a GPU of each pipeline stage in it."""
    memories = {name: all_stages(load) for name, load in loads.items()}
    name = max(memories, key=lambda name: max(memory.total for memory in memories[name]))
    return name, memories[name]


def fullest(cfg: RunConfig, shape: ModelShape, gpus: int, **known) -> Memory:
    """The memory of the GPU that needs most, over all trainings and pipeline stages. known: as for ``workloads``."""
    return max(largest(workloads(cfg, shape, gpus, **known))[1], key=lambda memory: memory.total)


def check_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> None:
    """Raises UserError for splits that do not divide the model or the number of GPUs, and for adapters that the model
    cannot have."""
    check_world(cfg.parallelism, gpus)
    check_splits(shape, cfg.parallelism, shape.vocab_size)
    check_adapters(cfg.lora, shape, cfg.parallelism.tensor_model_parallel_size)


def is_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> bool:
    try:
        check_possible(cfg, shape, gpus)
    except UserError:
        return False
    return True
