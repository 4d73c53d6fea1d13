"""Run by torchrun, or alone: log-probabilities and gradients of models in layouts. Rank 0 writes OUT.

    torchrun --nproc-per-node 2 split_worker.py DIR OUT '[["tp2", "llama", {"tensor_model_parallel_size": 2}, {}]]'

DIR has a folder for each model. The last part of a case may have "lora", the layers whose adapters are trained,
"packing" and "share_prompts".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_models
import torch

from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig
from nemo_edo.losses import LossTerm
from nemo_edo.megatron import platform
from nemo_edo.types import GenerationRequest, SamplingParams


def loss(log_probs, entropies, micro):
    """Of log-probabilities and entropies both, so that the gradients tell of both."""
    total = -((log_probs + 0.1 * entropies) * micro.advantages[:, None] * micro.mask).sum()
    return {"loss": LossTerm(total, micro.mask.sum())}, {}


def measure(
    folder: Path, parallelism: ParallelismConfig, lora: LoRAConfig | None, packing: bool, share_prompts: bool = False
) -> dict:
    """The weights as exported, log-probabilities, entropies and gradients [5 rows, of other lengths], two steps'
    results, and what is generated."""
    from nemo_edo.megatron.forward_backward import MicroBatching

    policy = tiny_models.build_policy(folder, parallelism, lora=lora)
    batch = tiny_models.with_shared_prompts(tiny_models.random_batch(rows=5), {2: 0, 3: 0, 4: 1})
    # Three micro-batches: one stage has to wait.
    cut = {"micro_batching": MicroBatching(2, 26 if packing else None, packing, share_prompts), "temperature": 0.7}
    log_probs, entropies = policy.log_probs(batch, **cut)
    results = {"exported": tiny_models.exported(policy), "log_probs": log_probs * batch.mask,
               "entropies": entropies * batch.mask}
    policy.reset_optimizer(OptimizerConfig(lr=1e-2, adam_eps=1e-3), total_steps=2)
    counts = {"loss_counts": {"loss": float(batch.mask.sum())}}
    policy.zero_grad()
    results["loss"] = policy.forward_backward(batch, loss, **counts, **cut)["loss"]
    results["gradients"] = tiny_models.exported_gradients(policy)
    # The second step has more micro-batches: a reduction that overlaps must not begin before the last.
    cuts = [cut, {**cut, "micro_batching": MicroBatching(1, 13 if packing else None, packing, share_prompts)}]
    results["norms"] = [policy.train_step(batch, loss, **counts, **other)["grad_norm"] for other in cuts]
    results["trained"] = tiny_models.exported(policy)
    if parallelism.expert_model_parallel_size > 1 or parallelism.context_parallel_size > 1:
        return results  # the engine refuses them
    requests = [GenerationRequest(f"p{i}", 0, (20 + i, 30), i) for i in range(3)]
    rollouts = tiny_models.build_engine(policy).generate(requests, SamplingParams(0.0, 1.0, 6))
    return {**results, "responses": [rollout.response_ids for rollout in rollouts]}


def main(models: str, out: str, cases: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    results = {}
    for layout, model, sizes, options in json.loads(cases):
        lora = LoRAConfig(rank=4, alpha=12.0, targets=options["lora"]) if "lora" in options else None
        how = options.get("packing", False), options.get("share_prompts", False)
        results[layout, model] = measure(Path(models) / model, ParallelismConfig(**sizes), lora, *how)
    tiny_models.leave(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
