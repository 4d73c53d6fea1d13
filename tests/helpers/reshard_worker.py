"""Run by torchrun: trains at several layouts, saves, and goes on from what other layouts saved. Rank 0 writes
OUT/results.pt.

    torchrun --nproc-per-node 2 reshard_worker.py OUT LAYOUTS.json SAVED.json

LAYOUTS holds {name: [model, settings of ParallelismConfig]}: each trains the model of that folder, saves into OUT/NAME
and goes on. SAVED holds a list of [folder, name]: the layout of that name goes on from the checkpoint in the folder; it
may be one of OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_models
import torch

from nemo_edo.config import OptimizerConfig, ParallelismConfig
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import platform

# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_eps=1e-3, warmup_steps=2)
TRAINED, AFTERWARDS = (0, 1, 2), (3, 4)
"""Batches before and after the checkpoint."""


def begin(model: Path, parallelism: ParallelismConfig):
    policy = tiny_models.build_policy(model, parallelism)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    return policy


def train(policy, seeds) -> list[dict[str, float]]:
    from nemo_edo.megatron.forward_backward import MicroBatching

    metrics = []
    for seed in seeds:
        batch = tiny_models.random_batch(rows=5, seed=seed)
        metrics.append(policy.train_step(
            batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
            loss_counts={"sft": float(reduction_count(batch.mask, "token-mean"))},
            micro_batching=MicroBatching(2), temperature=1.0,
        ))
    return [{name: step[name] for name in ("loss", "grad_norm", "lr")} for step in metrics]


def save_and_go_on(model: Path, folder: Path, parallelism: ParallelismConfig, **settings) -> list[dict[str, float]]:
    """The metrics of the steps behind the checkpoint."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, parallelism)
    train(policy, TRAINED)
    checkpoint.save(policy, folder, with_optimizer=True, reference=policy.snapshot(), **settings)
    return train(policy, AFTERWARDS)


def go_on(model: Path, folder: Path, parallelism: ParallelismConfig) -> dict:
    """The same of a policy that the checkpoint was loaded into, its reference, and how the layout is told to differ."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, parallelism)
    train(policy, [7])  # it has a state of its own, which goes
    checkpoint.load(policy, folder, with_optimizer=True)
    changed, reference = checkpoint.changed_layout(folder), checkpoint.load_reference(policy, folder)
    kept = all(map(torch.equal, reference, policy.snapshot()))
    return {"metrics": train(policy, AFTERWARDS), "changed": changed, "reference is as the weights": kept}


def main(out: str, layouts: str, saved: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    layout = {name: (Path(model), ParallelismConfig(**values)) for name, (model, values) in json.loads(layouts).items()}
    results = {name: save_and_go_on(model, Path(out) / name, split) for name, (model, split) in layout.items()}
    loaded = {(folder, name): go_on(layout[name][0], Path(folder), layout[name][1])
              for folder, name in json.loads(saved)}
    tiny_models.leave({"saved": results, "loaded": loaded}, Path(out) / "results.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
