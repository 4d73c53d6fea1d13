"""Run by torchrun on two processes: steps that break on one of them, in every layout. Rank 0 writes OUT.

    torchrun --nproc-per-node 2 guards_worker.py MODEL OUT '{"tensor": {"tensor_model_parallel_size": 2}}'
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import tiny_models
import torch

from nemo_edo.config import GRPOConfig, OptimizerConfig, ParallelismConfig
from nemo_edo.losses import LossTerm, grpo_loss, reduction_count
from nemo_edo.megatron import platform

GRPO = GRPOConfig(beta=0.04, exploration_coefficient=0.3)
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_eps=1e-3, warmup_steps=2)
BROKEN_ADVANTAGE = 1000.0


def loss(log_probs, entropies, micro):
    term, metrics = grpo_loss(log_probs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask, GRPO)
    return {"grpo": term}, metrics


def broken_gradient(log_probs, entropies, micro):
    """The loss is a number, and where the micro-batch holds a marked row, its gradient is none."""
    terms, metrics = loss(log_probs, entropies, micro)
    if (micro.advantages == BROKEN_ADVANTAGE).any():
        zero = (log_probs - log_probs.detach()).abs().sqrt().sum()
        terms = {"grpo": LossTerm(terms["grpo"].sum + zero, terms["grpo"].count)}
    return terms, metrics


@contextlib.contextmanager
def broken_weight(policy) -> Iterator[None]:
    """NaN in a weight of rank 1 alone, as a defective device has it."""
    parameter = next(iter(policy.chunks[-1].parameters()))
    kept = parameter.detach().clone()
    with torch.no_grad():
        if torch.distributed.get_rank() == 1:
            parameter.view(-1)[3:] = math.nan
    yield
    with torch.no_grad():
        parameter.copy_(kept)


def marked(batch, value: float):
    """The first row, which is rank 0's alone where two share the rows, has this advantage."""
    advantages = batch.advantages.clone()
    advantages[0] = value
    return batch.with_fields(advantages=advantages)


def take(policy, batch, function: Callable = loss) -> dict[str, float]:
    from nemo_edo.megatron.forward_backward import MicroBatching

    counts = {"grpo": float(reduction_count(batch.mask, GRPO.aggregation))}
    return policy.train_step(batch, function, loss_counts=counts, micro_batching=MicroBatching(1), temperature=0.7)


def breaks(policy, fault: str, batch) -> dict[str, float]:
    if fault == "advantage":
        return take(policy, marked(batch, math.nan))
    if fault == "gradient":
        return take(policy, marked(batch, BROKEN_ADVANTAGE), broken_gradient)
    with broken_weight(policy):
        return take(policy, batch)


def on_every_rank(report: dict[str, float]) -> dict[str, list[float]]:
    reports = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    return {name: [each[name] for each in reports] for name in ("loss", "grad_norm", "skipped", "lr")}


def run(model: Path, parallelism: ParallelismConfig) -> dict:
    policy = tiny_models.build_policy(model, parallelism)
    start, results = policy.snapshot(), {}
    batches = [tiny_models.random_batch(rows=5, seed=seed) for seed in range(3)]
    for fault in (None, "advantage", "gradient", "weight"):
        policy.load(start)
        policy.reset_optimizer(OPTIMIZER, total_steps=8)
        reports = [take(policy, batches[0])]
        if fault is not None:
            results[f"{fault} broken"] = on_every_rank(breaks(policy, fault, batches[2]))
        reports += [take(policy, batches[1]), take(policy, batches[0])]
        results[f"{fault} taken"] = [on_every_rank(report) for report in reports]
        results[f"{fault} weights"] = tiny_models.exported(policy)
    return results


def main(model: str, out: str, layouts: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    results = {name: run(Path(model), ParallelismConfig(**sizes)) for name, sizes in json.loads(layouts).items()}
    tiny_models.leave(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
