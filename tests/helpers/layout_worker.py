"""Run by torchrun: one rank of a layout that does everything a run does. Rank 0 writes OUT/results.pt.

    torchrun --nproc-per-node 2 layout_worker.py MODELS OUT '{"tensor_model_parallel_size": 2}' [CHECKPOINT]

MODELS has the folders ``plain``, ``tied`` (shared embeddings) and ``other`` (the weights of another seed). CHECKPOINT:
one that another layout has written, to be loaded here.

Writing a checkpoint starts a process that imports this module: what imports Megatron stands in functions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_models
import torch
from safetensors.torch import load_file

from nemo_edo.config import GRPOConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.losses import grpo_loss, reduction_count
from nemo_edo.megatron import platform
from nemo_edo.types import GenerationRequest, SamplingParams

TEMPERATURE = 0.7
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_eps=1e-3, clip_grad=0.5, warmup_steps=2)
GRPO = GRPOConfig(beta=0.04, exploration_coefficient=0.3, log_ratio_floor=-2.0, micro_batch_size=2)


def loss(log_probs, entropies, micro):
    return grpo_loss(log_probs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask, GRPO)


def settings(batch) -> dict:
    return {"loss_count": float(reduction_count(batch.mask, GRPO.aggregation)), "micro_batch_size": 2,
            "temperature": TEMPERATURE}


def train(policy, seeds) -> list[dict[str, float]]:
    """Steps on global batches of five rows: no number of ranks or micro-batches divides them."""
    batches = [tiny_models.random_batch(rows=5, seed=seed) for seed in seeds]
    return [policy.train_step(batch, loss, **settings(batch)) for batch in batches]


def requests() -> list[GenerationRequest]:
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42), (50, 51), (60, 61, 62, 63)]
    return [GenerationRequest(f"p{i}", s, prompt, 10 * i + s) for i, prompt in enumerate(prompts) for s in range(3)]


def trained_from(folder: Path, parallelism: ParallelismConfig, seeds, dtype: str = "fp32"):
    """The policy after a step for each seed, with its metrics."""
    policy = tiny_models.build_policy(folder, parallelism, dtype)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    return policy, train(policy, seeds)


def reloaded_goes_on(models: Path, folder: Path, parallelism: ParallelismConfig, dtype: str) -> bool:
    """Whether a new policy with other weights goes on from a checkpoint as the saved one does, bit for bit."""
    from nemo_edo.megatron import checkpoint

    saved, _ = trained_from(models / "plain", parallelism, [0, 1], dtype)
    checkpoint.save(saved, folder, with_optimizer=True)
    loaded, _ = trained_from(models / "other", parallelism, [], dtype)
    checkpoint.load(loaded, folder, with_optimizer=True)
    same_metrics = train(loaded, [2, 3]) == train(saved, [2, 3])
    weights, expected = tiny_models.exported(loaded), tiny_models.exported(saved)
    return same_metrics and all(torch.equal(weights[name], expected[name]) for name in expected)


def restored_archive(models: Path, out: Path, parallelism: ParallelismConfig) -> dict[str, torch.Tensor]:
    """The weights of a NeMo archive, saved and restored at this layout."""
    from nemo_edo.models import MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    config = model_config(models / "other", parallelism=parallelism, precision=PrecisionConfig(), seed=0, training=GRPO)
    MegatronGPTGRPOModel(config).save_to(str(out / "model.nemo"))
    return tiny_models.exported(MegatronGPTGRPOModel.restore_from(str(out / "model.nemo")).policy)


def without_contiguous_scatter(models: Path, parallelism: ParallelismConfig) -> list[str]:
    """The tensors that a model built without the adaptation has wrong; the adaptation is made up for."""
    platform.enter(1, without=["contiguous_scatter"])
    weights = tiny_models.exported(tiny_models.build_policy(models / "plain", parallelism))
    expected = load_file(models / "plain" / "model.safetensors")
    platform.ADAPTATIONS["contiguous_scatter"]()
    return sorted(name for name in expected if not torch.equal(weights[name], expected[name]))


def run(models: Path, out: Path, parallelism: ParallelismConfig, foreign: Path | None) -> dict:
    results = {"wrong_without_contiguous_scatter": without_contiguous_scatter(models, parallelism)}
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.build import export_hf_folder

    policy = tiny_models.build_policy(models / "plain", parallelism)
    export_hf_folder(policy.built, out / "hf")
    batch = tiny_models.random_batch(rows=5)
    for rows in (5, 1):  # one row: fewer than data-parallel ranks
        results[f"log_probs of {rows}"] = policy.log_probs(
            batch.rows(slice(rows)), micro_batch_size=2, temperature=TEMPERATURE
        )
    engine = tiny_models.build_engine(policy, stop_ids=range(1, 12), max_batch_size=4)
    for name, temperature in (("sampled", TEMPERATURE), ("greedy", 0.0)):
        rollouts = engine.generate(requests(), SamplingParams(temperature, 0.9, 8))
        results[f"{name} responses"] = [rollout.response_ids for rollout in rollouts]
        results[f"{name} log_probs"] = torch.tensor([lp for r in rollouts for lp in r.response_logprobs])
    (alone,) = engine.generate(requests()[:1], SamplingParams(TEMPERATURE, 0.9, 8))
    results["response alone"] = alone.response_ids

    if not parallelism.use_distributed_optimizer:  # with it, a rank holds its own part of the gradients only
        policy.forward_backward(batch, loss, **settings(batch))
        results["gradients"] = tiny_models.exported_gradients(policy)
    for model in ("plain", "tied"):
        policy, results[f"{model} metrics"] = trained_from(models / model, parallelism, [0, 1, 2])
        results[f"{model} trained"] = tiny_models.exported(policy)

    checkpoint.save(policy, out / "tied")
    for dtype in ("fp32", "bf16"):
        results[f"goes on in {dtype}"] = reloaded_goes_on(models, out / dtype, parallelism, dtype)
    results["archive"] = restored_archive(models, out, parallelism)
    if foreign is not None:
        policy = tiny_models.build_policy(models / "tied", parallelism)
        checkpoint.load(policy, foreign)
        results["foreign"] = tiny_models.exported(policy)
    return results


def main(models: str, out: str, parallelism: str, foreign: str | None = None) -> None:
    platform.init_process_group(torch.device("cpu"))
    results = run(Path(models), Path(out), ParallelismConfig(**json.loads(parallelism)), foreign and Path(foreign))
    if torch.distributed.get_rank() == 0:
        torch.save(results, Path(out) / "results.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
