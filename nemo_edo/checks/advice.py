"""What to change in a config that does not fit, the cheapest first."""

from dataclasses import replace
from operator import attrgetter

from nemo_edo.checks.memory import Memory, counted_rows, fullest, is_possible, micro_batch_tokens, trainings
from nemo_edo.config import GRPOConfig, IDPOConfig, RunConfig, SFTConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.utils.files import flattened

GPUS_OF_A_NODE = 8  # tensor parallelism sends activations twice per layer: it stays within a node's NVLink
WORTH_IT = 0.98  # a proposed change leaves less than this share of the memory of training and generation together


def advise(
    cfg: RunConfig, shape: ModelShape, gpus: int, limit: int, **known
) -> tuple[dict[str, dict[str, object]], int]:
    """Settings by what they cost, the cheapest kind first, with which the fullest GPU needs at most ``limit`` bytes,
    or all that help if that is not possible; and the bytes that it then needs. known: as for ``workloads``.

    Repeats the first proposal that helps: an expensive change comes after the cheap ones and undoes none of them."""
    made: dict[str, dict[str, object]] = {}
    now = fullest(cfg, shape, gpus, **known)
    while now.total > limit:
        for cost, settings in proposals(cfg, gpus).items():
            changed = replace(cfg, **{name: replace(getattr(cfg, name), **new) for name, new in settings.items()})
            if changed == cfg or not is_possible(changed, shape, gpus):
                continue
            then = fullest(changed, shape, gpus, **known)
            # Both: the peak, which is in training or in generation, and the sum of the two by a share.
            if then.total < now.total and _both_phases(then) < WORTH_IT * _both_phases(now):
                new = {key: value for key, value in flattened(settings).items() if attrgetter(key)(cfg) != value}
                made[cost] = {**made.get(cost, {}), **new}  # a further step of a kind changes the one before
                cfg, now = changed, then
                break
        else:
            break
    return {cost: made[cost] for cost in proposals(cfg, gpus) if cost in made}, now.total


def _both_phases(memory: Memory) -> int:
    return memory.always + memory.activations + memory.loss_layer + memory.generation


def proposals(cfg: RunConfig, gpus: int) -> dict[str, dict[str, dict[str, object]]]:
    """The settings of the next step of each kind by what it costs, the cheapest first; none that has no next step. Each
    section's settings are together, as it checks them at once."""
    splits, kinds = cfg.parallelism, {SFTConfig: "sft", GRPOConfig: "grpo", IDPOConfig: "idpo"}
    sections = sorted({kinds[type(training)] for training in trainings(cfg).values()})
    tensor, rows = splits.tensor_model_parallel_size, counted_rows(cfg) // 2
    tokens = {}
    for section in sections:  # half of them, down to one sequence or to a pair of them
        least = (2 if section == "idpo" else 1) * cfg.model.seq_length
        tokens[section] = {"micro_batch_tokens": max(micro_batch_tokens(cfg, getattr(cfg, section)) // 2, least)}
    shared = splits.use_distributed_optimizer or gpus > splits.model_ranks
    of_layers = {
        "tensor_model_parallel_size": min(2 * tensor, max(tensor, GPUS_OF_A_NODE)),
        "sequence_parallel": tensor > 1 or splits.sequence_parallel or tensor < GPUS_OF_A_NODE,
    }
    stages = {"pipeline_model_parallel_size": 2 * splits.pipeline_model_parallel_size}
    offloaded = {"optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}
    return {
        "weights are gathered after each step": {"parallelism": {"use_distributed_optimizer": shared}},
        "none to speak of": {"parallelism": {"sequence_parallel": splits.sequence_parallel or tensor > 1}},
        "a fourth matrix product in the output layer": {"model": {"loss_head": "fused"}},
        "slower sampling": {"generation": {"max_batch_size": rows}} if rows else {},
        "smaller matrix products": tokens,
        "weights cross the bus twice per collection": {
            section: {"reference_placement": "host"} for section in sections if section != "sft"
        },
        "the rounding of bf16": {} if cfg.precision.dtype == "bf16" else {"precision": {"dtype": "bf16"}},
        "communication in every layer": {"parallelism": of_layers},
        "a second forward pass: up to a third more time": {"parallelism": {"recompute_granularity": "full"}},
        "stages wait for each other": {"parallelism": stages},
        "optimizer steps on the CPU": {"parallelism": offloaded},
        "another method: only adapters are trained": {} if cfg.lora.rank else {"lora": {"rank": 16}},
    }
