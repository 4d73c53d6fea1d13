"""One layout does everything that a run does: training, sampling, checkpoints, export. Run by a WorkerPool.

Writing a checkpoint starts a process that imports the main module's imports: what imports Megatron is in functions.
"""

from dataclasses import replace
from pathlib import Path

import torch
from helpers import tiny_models
from helpers.tiny_models import over, step
from helpers.training_settings import ED_GRPO, IDPO, LORA, OPTIMIZER, SFT, TEMPERATURE
from helpers.training_settings import random_pairs as pairs

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig

# Micro-batches of two or four rows, and of other widths: room for two rows of 12 tokens, or four short ones.
ED_IDPO = replace(IDPO, alpha=None, exploration_coefficient=0.2, micro_batch_tokens=32, reference="ema")
PACKED_IDPO = replace(ED_IDPO, packing=True, micro_batch_tokens=40)
STEPS = 4


def rows(seed: int):
    """Five: no number of ranks or micro-batches divides them."""
    return tiny_models.random_batch(rows=5, seed=seed)


def exploring_rows(seed: int):
    """Five rows; every other time three of them are responses of an older policy, for the exploration term alone."""
    older = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    return rows(seed).with_fields(older=older) if seed % 2 else rows(seed)


def algorithms(folder: Path, parallelism: ParallelismConfig, lora: LoRAConfig | None, out: Path) -> dict:
    """Steps of SFT, and from its checkpoint steps of ED-GRPO and of ED-iDPO; those with adapters are packed."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.hf_export import export_hf_folder
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
    from nemo_edo.models.megatron_gpt_model import model_config

    def make(model_class, training):
        return model_class(model_config(folder, parallelism=parallelism, precision=PrecisionConfig(), seed=0, lora=lora,
                                        training=training, temperature=TEMPERATURE))

    def record(name: str, model, metrics: list) -> dict:
        return {f"{name} metrics": metrics, f"{name} trained": all_weights(model.policy, lora)}

    sft = make(MegatronGPTSFTModel, SFT)
    sft.start_training(8)
    results = record("sft", sft, [step(sft, rows(seed)) for seed in range(STEPS)])
    checkpoint.save(sft.policy, out / "sft")

    grpo = make(MegatronGPTGRPOModel, ED_GRPO)
    checkpoint.load(grpo.policy, out / "sft")
    results |= record("ed-grpo", grpo, explore(grpo, [exploring_rows(seed) for seed in range(STEPS)]))
    checkpoint.save(grpo.policy, out / "ed-grpo")
    export_hf_folder(grpo.built, out / "exported")
    results["ed-grpo logprobs"] = over(grpo).logprobs(pairs(0))[0]

    idpo = make(MegatronGPTDPOModel, ED_IDPO if lora is None else PACKED_IDPO)
    checkpoint.load(idpo.policy, out / "sft")
    results |= record("ed-idpo", idpo, explore(idpo, [pairs(seed) for seed in range(STEPS)]))
    idpo.move_reference("ema", 0.5)
    return {**results, "moved reference": over(idpo).reference_logprobs(pairs(0))}


def all_weights(policy, lora: LoRAConfig | None) -> dict[str, torch.Tensor]:
    """Merged, and the adapters' factors."""
    return {**tiny_models.exported(policy), **(tiny_models.exported_adapters(policy) if lora else {})}


def explore(model, batches) -> list[dict[str, float]]:
    """Steps, each after a measurement of its gradients."""
    model.freeze_reference()
    model.start_training(8)
    metrics = []
    for batch in batches:
        batch = batch.with_fields(ref_logprobs=over(model).reference_logprobs(batch))
        ratio = over(model).exploration_gradient_ratio(batch)
        metrics.append({**step(model, batch), "exploration_gradient_ratio": ratio})
    return metrics


def reloaded_resumes(models: Path, folder: Path, parallelism: ParallelismConfig, lora: LoRAConfig | None) -> bool:
    """Whether a bf16 policy with other weights resumes from a checkpoint as the saved one continues, bit for bit."""
    from nemo_edo.megatron import checkpoint

    saved, loaded = (tiny_models.build_policy(models / name, parallelism, "bf16", lora) for name in ("plain", "other"))
    for policy in (saved, loaded):
        policy.reset_optimizer(OPTIMIZER, total_steps=8)
    tiny_models.train_sft(saved, [0, 1])
    checkpoint.save(saved, folder, with_optimizer=True)
    checkpoint.load(loaded, folder, with_optimizer=True)
    same_metrics = tiny_models.train_sft(loaded, [2, 3]) == tiny_models.train_sft(saved, [2, 3])
    weights, expected = tiny_models.exported(loaded), tiny_models.exported(saved)
    return same_metrics and all(torch.equal(weights[name], expected[name]) for name in expected)


def restored_archive(models: Path, out: Path, parallelism: ParallelismConfig) -> dict[str, torch.Tensor]:
    """The weights of a NeMo archive, saved and restored at this layout."""
    from nemo_edo.models import MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    config = model_config(
        models / "other", parallelism=parallelism, precision=PrecisionConfig(), seed=0, training=ED_GRPO
    )
    MegatronGPTGRPOModel(config).save_to(str(out / "model.nemo"))
    return tiny_models.exported(MegatronGPTGRPOModel.restore_from(str(out / "model.nemo")).policy)


def run(models: Path, out: Path, sizes: dict, foreign: Path | None) -> dict:
    """models: has the folders ``plain``, ``tied`` (shared embeddings) and ``other`` (the weights of another seed).
    foreign: the ``out`` of another layout, whose checkpoints are loaded here."""
    from nemo_edo.config import MicroBatchConfig
    from nemo_edo.megatron import checkpoint

    parallelism = ParallelismConfig(**sizes)
    policy = tiny_models.build_policy(models / "plain", parallelism)
    one_row = {"micro_batching": MicroBatchConfig(2), "temperature": TEMPERATURE}
    results = {"logprobs of one row": tiny_models.logprobs(policy, rows(0).rows(slice(1)), **one_row)}
    for name, model, lora in (("full", "plain", None), ("lora", "tied", LORA)):
        found = algorithms(models / model, parallelism, lora, out / name)
        results |= {f"{name} {key}": value for key, value in found.items()}
        results[f"{name} resumes"] = reloaded_resumes(models, out / f"{name} resumed", parallelism, lora)
        if foreign is not None:
            policy = tiny_models.build_policy(models / model, parallelism, lora=lora)
            checkpoint.load(policy, foreign / name / "ed-grpo")
            results[f"{name} foreign"] = all_weights(policy, lora)
    return {**results, "archive": restored_archive(models, out, parallelism)}
