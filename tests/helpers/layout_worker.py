"""Run by torchrun: one rank of a layout that does everything a run does. Rank 0 writes OUT/results.pt.

    torchrun --nproc-per-node 2 layout_worker.py MODELS OUT '{"tensor_model_parallel_size": 2}' [OTHER]

MODELS has the folders ``plain``, ``tied`` (shared embeddings) and ``other`` (the weights of another seed). OTHER: the
OUT of another layout, whose checkpoints are loaded here.

Writing a checkpoint starts a process that imports this module: what imports Megatron stands in functions.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import tiny_models
import torch
from safetensors.torch import load_file

from nemo_edo.config import (
    GRPOConfig,
    IDPOConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    SFTConfig,
)
from nemo_edo.losses import grpo_loss, reduction_count
from nemo_edo.megatron import platform
from nemo_edo.types import GenerationRequest, SamplingParams

TEMPERATURE = 0.7
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_eps=1e-3, clip_grad=0.5, warmup_steps=2)
GRPO = GRPOConfig(beta=0.04, exploration_coefficient=0.3, log_ratio_floor=-2.0, micro_batch_size=2,
                  optimizer=OPTIMIZER)
# Micro-batches of two or four rows, and of other widths: room for two rows of 12 tokens, or four short ones.
IDPO = IDPOConfig(beta=0.3, exploration_coefficient=0.2, micro_batch_size=4, micro_batch_tokens=32, reference="ema",
                  optimizer=OPTIMIZER)
SFT = SFTConfig(micro_batch_size=2, optimizer=OPTIMIZER)
LORA = LoRAConfig(rank=4, alpha=12.0)
TOKEN_BUDGET = 26
STEPS = 5


def loss(log_probs, entropies, micro):
    term, metrics = grpo_loss(
        log_probs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask, GRPO
    )
    return {"grpo": term}, metrics


def settings(batch, rows: int = 2, tokens: int | None = None, packing: bool = False) -> dict:
    from nemo_edo.megatron.forward_backward import MicroBatching

    return {"loss_counts": {"grpo": float(reduction_count(batch.mask, GRPO.aggregation))},
            "micro_batching": MicroBatching(rows, tokens, packing), "temperature": TEMPERATURE}


def train(policy, seeds, **cut) -> list[dict[str, float]]:
    """Steps on global batches of five rows: no number of ranks or micro-batches divides them."""
    batches = [tiny_models.random_batch(rows=5, seed=seed) for seed in seeds]
    return [policy.train_step(batch, loss, **settings(batch, **cut)) for batch in batches]


def pairs(seed: int):
    """Six rows, which two ranks share unevenly: two pairs, and two single responses, one of which does not explore."""
    return tiny_models.random_batch(rows=6, seed=seed).with_fields(
        pair_role=torch.tensor([1, -1, 0, 0, 1, -1]), exploration_weights=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    )


def algorithms(folder: Path, parallelism: ParallelismConfig, lora: LoRAConfig | None, out: Path) -> dict:
    """Five steps of SFT, and from its checkpoint five of ED-GRPO and of ED-iDPO each."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.build import export_hf_folder
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
    from nemo_edo.models.megatron_gpt_model import model_config

    def make(model_class, training):
        return model_class(model_config(folder, parallelism=parallelism, precision=PrecisionConfig(), seed=0, lora=lora,
                                        training=training, temperature=TEMPERATURE))

    def record(name: str, model, metrics: list) -> dict:
        weights = tiny_models.exported(model.policy)
        adapters = tiny_models.exported_adapters(model.policy) if lora else {}
        return {f"{name} metrics": metrics, f"{name} trained": {**weights, **adapters}}

    sft = make(MegatronGPTSFTModel, SFT)
    sft.start_training(8)
    metrics = [sft.train_step(tiny_models.random_batch(rows=5, seed=seed)) for seed in range(STEPS)]
    results = record("sft", sft, metrics)
    checkpoint.save(sft.policy, out / "sft")

    grpo = make(MegatronGPTGRPOModel, GRPO)
    checkpoint.load(grpo.policy, out / "sft")
    results |= record("ed-grpo", grpo, explore(grpo, [tiny_models.random_batch(rows=5, seed=s) for s in range(STEPS)]))
    checkpoint.save(grpo.policy, out / "ed-grpo")
    export_hf_folder(grpo.built, out / "exported")
    results["ed-grpo log_probs"] = grpo.log_probs(pairs(0))[0]

    if lora is None:
        packed = make(MegatronGPTDPOModel, replace(IDPO, packing=True, micro_batch_tokens=40))
        checkpoint.load(packed.policy, out / "sft")
        results |= record("packed ed-idpo", packed, explore(packed, [pairs(seed) for seed in range(STEPS)]))

    idpo = make(MegatronGPTDPOModel, IDPO)
    checkpoint.load(idpo.policy, out / "sft")
    results |= record("ed-idpo", idpo, explore(idpo, [pairs(seed) for seed in range(STEPS)]))
    idpo.move_reference("ema", 0.5)
    return {**results, "moved reference": idpo.reference_log_probs(pairs(0))}


def explore(model, batches) -> list[dict[str, float]]:
    """Steps, each after a measurement of its gradients."""
    model.freeze_reference()
    model.start_training(8)
    metrics = []
    for batch in batches:
        batch = batch.with_fields(ref_logprobs=model.reference_log_probs(batch))
        ratio = model.exploration_gradient_ratio(batch)
        metrics.append({**model.train_step(batch), "exploration_gradient_ratio": ratio})
    return metrics


def requests() -> list[GenerationRequest]:
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42), (50, 51), (60, 61, 62, 63)]
    return [GenerationRequest(f"p{i}", s, prompt, 10 * i + s) for i, prompt in enumerate(prompts) for s in range(3)]


def trained_from(
    folder: Path, parallelism: ParallelismConfig, seeds, dtype: str = "fp32", lora: LoRAConfig | None = None, **cut
):
    """The policy after a step for each seed, with its metrics."""
    policy = tiny_models.build_policy(folder, parallelism, dtype, lora)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    return policy, train(policy, seeds, **cut)


def reloaded_goes_on(
    models: Path, folder: Path, parallelism: ParallelismConfig, dtype: str, lora: LoRAConfig | None = None
) -> bool:
    """Whether a new policy with other weights goes on from a checkpoint as the saved one does, bit for bit."""
    from nemo_edo.megatron import checkpoint

    saved, _ = trained_from(models / "plain", parallelism, [0, 1], dtype, lora)
    checkpoint.save(saved, folder, with_optimizer=True)
    loaded, _ = trained_from(models / "other", parallelism, [], dtype, lora)
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
    from nemo_edo.megatron.forward_backward import MicroBatching

    policy = tiny_models.build_policy(models / "plain", parallelism)
    export_hf_folder(policy.built, out / "hf")
    batch = tiny_models.random_batch(rows=5)
    for rows in (5, 1):  # one row: fewer than data-parallel ranks
        results[f"log_probs of {rows}"] = policy.log_probs(
            batch.rows(slice(rows)), micro_batching=MicroBatching(2), temperature=TEMPERATURE
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
    policy, results["token budget metrics"] = trained_from(models / "plain", parallelism, [0, 1, 2], rows=5,
                                                           tokens=TOKEN_BUDGET)
    results["token budget trained"] = tiny_models.exported(policy)
    policy, results["packed metrics"] = trained_from(models / "plain", parallelism, [0, 1, 2], rows=1,
                                                     tokens=TOKEN_BUDGET, packing=True)
    results["packed trained"] = tiny_models.exported(policy)
    results |= algorithms(models / "plain", parallelism, None, out / "full")
    with_lora = algorithms(models / "tied", parallelism, LORA, out / "lora")
    results |= {f"lora {name}": value for name, value in with_lora.items()}
    for model in ("plain", "tied"):
        policy, results[f"{model} metrics"] = trained_from(models / model, parallelism, [0, 1, 2])
        results[f"{model} trained"] = tiny_models.exported(policy)

    checkpoint.save(policy, out / "tied")
    for dtype in ("fp32", "bf16"):
        results[f"goes on in {dtype}"] = reloaded_goes_on(models, out / dtype, parallelism, dtype)
    results["goes on with lora"] = reloaded_goes_on(models, out / "goes on", parallelism, "bf16", LORA)
    results["archive"] = restored_archive(models, out, parallelism)
    if foreign is not None:
        policy = tiny_models.build_policy(models / "tied", parallelism)
        checkpoint.load(policy, foreign / "tied")
        results["foreign"] = tiny_models.exported(policy)
        policy = tiny_models.build_policy(models / "tied", parallelism, lora=LORA)
        checkpoint.load(policy, foreign / "lora" / "ed-grpo")
        results["foreign with lora"] = {**tiny_models.exported(policy), **tiny_models.exported_adapters(policy)}
    return results


def main(models: str, out: str, parallelism: str, foreign: str | None = None) -> None:
    platform.init_process_group(torch.device("cpu"))
    results = run(Path(models), Path(out), ParallelismConfig(**json.loads(parallelism)), foreign and Path(foreign))
    tiny_models.leave(results, Path(out) / "results.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
