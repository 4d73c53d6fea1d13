"""What to change in a config that does not fit, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nemo_edo.config import GRPOConfig, IDPOConfig, PrecisionConfig, RunConfig, SFTConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.doctor.memory import Memory
from nemo_edo.doctor.workload import counted_rows, largest, micro_batch_tokens, trainings, workloads
from nemo_edo.errors import UserError
from nemo_edo.megatron.splits import check_adapters, check_splits, check_world

GPUS_OF_A_NODE = 8
"""Tensor parallelism sends activations twice per layer: it stays within a node's NVLink."""
WORTH_IT = 0.98
"""A change is proposed if it leaves less than this share of the memory of training and generation together."""


@dataclass(frozen=True)
class Change:
    """A config with some settings changed."""

    overrides: tuple[str, ...]
    cost: str
    cfg: RunConfig


@dataclass(frozen=True)
class Advice:
    changes: list[Change]
    """To be made together, the cheapest kinds first."""
    bytes: int
    """Needed on the fullest GPU with these changes."""


def advise(cfg: RunConfig, shape: ModelShape, gpus: int, limit: int, **known) -> Advice:
    """Changes with which the fullest GPU needs at most ``limit`` bytes; if there are none, all that help.

    Repeats the first proposal that helps. So an expensive change comes only after the cheap ones are exhausted, and
    undoes none of them. known: of the device and the problems, as for ``workloads``.
    """
    made: dict[Callable, Change] = {}
    now = fullest(cfg, shape, gpus, **known)
    while now.total > limit:
        found = _first_that_helps(cfg, shape, gpus, now, **known)
        if found is None:
            break
        propose, change, now = found
        made.pop(propose, None)  # a further step of the same kind replaces the one before
        made[propose] = change
        cfg = change.cfg
    return Advice([made[propose] for propose in _PROPOSALS if propose in made], now.total)


def fullest(cfg: RunConfig, shape: ModelShape, gpus: int, **known) -> Memory:
    """The memory of the GPU that needs most, over all trainings and pipeline stages. known: as for ``workloads``."""
    return max(largest(workloads(cfg, shape, gpus, **known))[1], key=lambda memory: memory.total)


def _first_that_helps(
    cfg: RunConfig, shape: ModelShape, gpus: int, now: Memory, **known
) -> tuple[Callable, Change, Memory] | None:
    for propose in _PROPOSALS:
        change = propose(cfg, gpus)
        if change is None or not is_possible(change.cfg, shape, gpus):
            continue
        then = fullest(change.cfg, shape, gpus, **known)
        # Both: the peak, which is in training or in generation, and the sum of the two by a share.
        if then.total < now.total and _both_phases(then) < WORTH_IT * _both_phases(now):
            return propose, change, then
    return None


def _both_phases(memory: Memory) -> int:
    return memory.always + memory.activations + memory.loss_layer + memory.generation


def is_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> bool:
    try:
        check_possible(cfg, shape, gpus)
    except UserError:
        return False
    return True


def check_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> None:
    """Raises UserError for splits that do not divide the model or the number of GPUs, and for adapters that the model
    cannot have."""
    check_world(cfg.parallelism, gpus)
    check_splits(shape, cfg.parallelism, shape.vocab_size)
    check_adapters(cfg.lora, shape, cfg.parallelism.tensor_model_parallel_size)


# --- proposals: the next step of a kind, or None where there is none -------------------------------------------------

Proposal = Callable[[RunConfig, int], Change | None]
"""Takes the config and the number of GPUs."""


def _shorter_micro_batches(cfg: RunConfig, gpus: int) -> Change | None:
    """Half the tokens, down to one sequence, or to a pair of them."""
    changed, overrides = cfg, []
    for section in sorted(set(_sections(cfg).values())):
        settings = getattr(cfg, section)
        least = (2 if isinstance(settings, IDPOConfig) else 1) * cfg.model.seq_length
        tokens = max(micro_batch_tokens(cfg, settings) // 2, least)
        changed = replace(changed, **{section: replace(settings, micro_batch_tokens=tokens)})
        overrides.append(f"{section}.micro_batch_tokens={tokens}")
    return Change(tuple(overrides), "smaller matrix products", changed)


def _fewer_rows_in_generation(cfg: RunConfig, gpus: int) -> Change | None:
    rows = counted_rows(cfg) // 2
    if rows == 0:
        return None
    changed = replace(cfg, generation=replace(cfg.generation, max_batch_size=rows))
    return Change((f"generation.max_batch_size={rows}",), "slower sampling", changed)


def _sharded_optimizer(cfg: RunConfig, gpus: int) -> Change | None:
    if gpus <= cfg.parallelism.model_ranks:
        return None
    return _split(cfg, "weights are gathered after each step", use_distributed_optimizer=True)


def _reference_in_host_memory(cfg: RunConfig, gpus: int) -> Change | None:
    changed, overrides = cfg, []
    for section in sorted(set(_sections(cfg).values()) - {"sft"}):
        changed = replace(changed, **{section: replace(getattr(cfg, section), reference_placement="host")})
        overrides.append(f"{section}.reference_placement=host")
    return Change(tuple(overrides), "weights cross the bus twice per collection", changed)


def _half_precision(cfg: RunConfig, gpus: int) -> Change | None:
    return Change(("precision=bf16",), "the rounding of bf16", replace(cfg, precision=PrecisionConfig("bf16")))


def _fused_loss(cfg: RunConfig, gpus: int) -> Change | None:
    changed = replace(cfg, model=replace(cfg.model, loss_head="fused"))
    return Change(("model.loss_head=fused",), "a fourth matrix product in the output layer", changed)


def _sequence_parallel(cfg: RunConfig, gpus: int) -> Change | None:
    if cfg.parallelism.tensor_model_parallel_size == 1:
        return None
    return _split(cfg, "none to speak of", sequence_parallel=True)


def _tensor_parallel(cfg: RunConfig, gpus: int) -> Change | None:
    size = 2 * cfg.parallelism.tensor_model_parallel_size
    if size > GPUS_OF_A_NODE:
        return None
    return _split(cfg, "communication in every layer", tensor_model_parallel_size=size, sequence_parallel=True)


def _recomputation(cfg: RunConfig, gpus: int) -> Change | None:
    return _split(cfg, "a second forward pass: up to a third more time", recompute_granularity="full")


def _pipeline(cfg: RunConfig, gpus: int) -> Change | None:
    size = 2 * cfg.parallelism.pipeline_model_parallel_size
    return _split(cfg, "stages wait for each other", pipeline_model_parallel_size=size)


def _optimizer_in_host_memory(cfg: RunConfig, gpus: int) -> Change | None:
    settings = {"optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}
    return _split(cfg, "optimizer steps on the CPU", **settings)


def _adapters(cfg: RunConfig, gpus: int) -> Change | None:
    if cfg.lora.rank:
        return None
    changed = replace(cfg, lora=replace(cfg.lora, rank=16))
    return Change(("lora.rank=16",), "another method: only adapters are trained", changed)


_PROPOSALS: list[Proposal] = [
    _sharded_optimizer,
    _sequence_parallel,
    _fused_loss,
    _fewer_rows_in_generation,
    _shorter_micro_batches,
    _reference_in_host_memory,
    _half_precision,
    _tensor_parallel,
    _recomputation,
    _pipeline,
    _optimizer_in_host_memory,
    _adapters,
]
"""Ordered by cost."""


def _split(cfg: RunConfig, cost: str, **settings) -> Change:
    new = {name: value for name, value in settings.items() if getattr(cfg.parallelism, name) != value}
    overrides = tuple(f"parallelism.{name}={str(value).lower()}" for name, value in new.items())
    return Change(overrides, cost, replace(cfg, parallelism=replace(cfg.parallelism, **settings)))


def _sections(cfg: RunConfig) -> dict[str, str]:
    """The config's section of each training's settings."""
    kinds = {SFTConfig: "sft", GRPOConfig: "grpo", IDPOConfig: "idpo"}
    return {name: kinds[type(training)] for name, training in trainings(cfg).items()}
