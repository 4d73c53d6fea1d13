"""What the rehearsal computes, on the CPU and on the pretended GPU alike. Run by a WorkerPool, which has no Megatron
before a case asks for it; results are on the CPU."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from helpers import tiny_models
from helpers.tiny_models import over, step
from helpers.training_settings import ED_GRPO, EXPLORES, GRPO, IDPO, LORA, SFT, TEMPERATURE, as_pairs
from packaging.version import Version

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.types import GenerationRequest, SamplingParams, TrainingBatch

TRAINING = {
    "sft": SFT,
    "ed-grpo": ED_GRPO,
    "ed-idpo": replace(IDPO, **EXPLORES),
    # Every part of the loss that makes new tensors.
    "clip-cov": replace(GRPO, covariance_control="clip-cov", covariance_share=0.2, clip_cov_low=-9.0, clip_cov_high=9.0,
                        sampler_correction="tis", entropy_coefficient=0.02),
    "kl-cov": replace(ED_GRPO, covariance_control="kl-cov", covariance_share=0.2, dual_clip=3.0,
                      sampler_correction="icepop", importance_sampling_level="sequence"),
}  # fmt: skip
STEPS = 2


def batch(algorithm: str, seed: int) -> TrainingBatch:
    """Six rows, some of which share prompts; pairs and single responses for preferences."""
    rows = tiny_models.with_shared_prompts(tiny_models.random_batch(rows=6, seed=seed), {1: 0, 4: 3, 5: 3})
    generator = torch.Generator().manual_seed(seed)
    old, ref = (-4 + torch.randn(rows.mask.shape, generator=generator) for _ in range(2))
    rows = rows.with_fields(old_logprobs=old * rows.mask, ref_logprobs=ref * rows.mask)
    if algorithm == "ed-idpo":
        return as_pairs(rows)
    if TRAINING[algorithm] in (TRAINING["clip-cov"], TRAINING["kl-cov"]):
        return rows.with_fields(sampler_logprobs=(old + 0.1 * ref) * rows.mask)
    return rows


def build(folder: Path, training, *, parallelism=None, precision=None, lora=False, attention="auto", loss_head="auto"):
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
    from nemo_edo.models.megatron_gpt_model import model_config

    kinds = {type(SFT): MegatronGPTSFTModel, type(GRPO): MegatronGPTGRPOModel, type(IDPO): MegatronGPTDPOModel}
    config = model_config(
        folder, parallelism=ParallelismConfig(**(parallelism or {})), precision=PrecisionConfig(**(precision or {})),
        seed=0, training=training, lora=LORA if lora else None, temperature=TEMPERATURE, attention=attention,
        loss_head=loss_head,
    )  # fmt: skip
    return kinds[type(training)](config)


def steps(folder: Path, algorithm: str, settings: dict | None = None, brief: bool = False, **how) -> dict:
    """Metrics, the first step's gradients, log-probabilities and the weights of two steps. settings: of the training,
    in place of the algorithm's. brief: one step and no more; Triton's interpreter is slow. how: as for ``build``."""
    training = replace(TRAINING[algorithm], **(settings or {}))
    model = build(folder, training, **how)
    explores = algorithm != "sft"
    if explores:
        model.freeze_reference()
    model.start_training(8)
    found: dict = {"metrics": []}
    for seed in range(1 if brief else STEPS):
        rows = batch(algorithm, seed)
        if explores:
            rows = rows.with_fields(ref_logprobs=over(model).reference_logprobs(rows))
            found |= {f"reference {seed}": rows.ref_logprobs, "reference's norm": norm(model.reference or [])}
        if algorithm in ("clip-cov", "kl-cov"):
            rows = with_selected(model, rows)
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(rows, forward_only=False)
        if seed == 0:
            found["gradients"] = tiny_models.exported_gradients(model.policy)
        metrics |= model.finish_training_step(loss)
        if explores and seed == 0 and not brief:
            metrics["ratio"] = over(model).exploration_gradient_ratio(rows)
        found["metrics"].append(metrics)
    found["weights"], found["finite"] = tiny_models.exported(model.policy), model.policy.is_finite()
    # Copied by the host at once, as in ``norm``.
    found["logprobs"], found["entropies"] = (part.clone() for part in over(model).logprobs(batch(algorithm, STEPS)))
    if explores and model.reference is not None:  # with LoRA it is the model without its adapters
        found["reference is"] = sorted({"pinned" if part.is_pinned() else part.device.type for part in model.reference})
    if brief:
        return found
    model.prepare_for_validation_step()
    found["validation"] = model.validation_step(rows)
    return found | (moved_reference(model, rows) if explores else {})


def norm(weights: list[torch.Tensor]) -> float:
    """Read by the host at once: what the GPU still writes is not there yet."""
    return math.hypot(*(float(part.float().norm()) for part in weights))


def with_selected(model, rows: TrainingBatch) -> TrainingBatch:
    """As algorithms/ selects tokens for a covariance control."""
    from nemo_edo.losses import kl_cov_selection, token_covariances

    covariances = token_covariances(over(model).logprobs(rows)[0], rows.advantages, rows.mask)
    return rows.with_fields(selected=kl_cov_selection(covariances, rows.mask, share=0.2).float())


def moved_reference(model, rows: TrainingBatch) -> dict:
    """What the reference gives once it has moved."""
    if model.reference is None:
        return {}
    model.move_reference("ema", 0.5)
    moved = over(model).reference_logprobs(rows)
    model.move_reference("previous", 0.5)
    return {"ema": moved, "previous": over(model).reference_logprobs(rows)}


def in_precision(folder: Path, precision: str, length: int, rows: int) -> np.ndarray:
    """Log-probabilities and entropies as the selftest measures them, of its first rows."""
    from nemo_edo.checks import numbers

    model = numbers.build(folder, numbers.SameNumbers(precision))
    return torch.stack(over(model).logprobs(numbers.batch(length).rows(slice(rows)))).numpy()


def sampled(folder: Path, stop: tuple[str, ...] = (), **how) -> dict:
    """Responses to prompts of several lengths, some of which occur more than once."""
    policy = build(folder, GRPO, **how).policy
    engine = tiny_models.build_engine(policy, stop_ids=range(1, 12), max_batch_size=6)
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42), (50, 51)]
    requests = [GenerationRequest(f"p{i}", s, prompt, 10 * i + s) for i, prompt in enumerate(prompts) for s in range(4)]
    rollouts = engine.generate(requests, SamplingParams(TEMPERATURE, 0.9, 8, stop=stop))
    return {"responses": [tuple(rollout.response_ids) for rollout in rollouts],
            "stops": [(rollout.finished, rollout.stop) for rollout in rollouts],
            "logprobs": torch.tensor([value for rollout in rollouts for value in rollout.response_logprobs])}


def decoded_and_trained(folder: Path) -> bool:
    """Both with as many rows of as many tokens."""
    model = build(folder, TRAINING["sft"], precision={"dtype": "bf16"})
    requests = [GenerationRequest("p", row, (20 + row, *range(30, 43)), row) for row in range(2)]
    tiny_models.build_engine(model.policy).generate(requests, SamplingParams(TEMPERATURE, 1.0, 2))
    model.start_training(2)
    tokens = torch.randint(2, 128, (2, 15), generator=torch.Generator().manual_seed(0))
    return math.isfinite(step(model, TrainingBatch(tokens, torch.ones(2, 14)))["grad_norm"])


def written(folder: Path, out: Path, **how) -> dict:
    """A policy after a step, in a checkpoint and a Hugging Face folder; and how it continues."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.hf_export import export_hf_folder

    model = build(folder, TRAINING["sft"], **how)
    model.start_training(8)
    step(model, batch("sft", 0))
    checkpoint.save(model.policy, out / "checkpoint", with_optimizer=True, reference=model.policy.snapshot())
    export_hf_folder(model.built, out / "exported")
    return continued(model)


def read(folder: Path, out: Path, **how) -> dict:
    """The checkpoint of ``written``, which another kind of machine has written, and how it continues."""
    from nemo_edo.megatron import checkpoint

    model = build(folder, TRAINING["sft"], **how)
    model.start_training(8)
    checkpoint.load(model.policy, out / "checkpoint", with_optimizer=True)
    reference = checkpoint.load_reference(model.policy, out / "checkpoint")
    assert all(torch.equal(*pair) for pair in zip(reference, model.policy.snapshot(), strict=True))
    return continued(model)


def continued(model) -> dict:
    """Weights and log-probabilities; and steps, with the weights that they lead to."""
    found = {"weights": tiny_models.exported(model.policy), "logprobs": list(over(model).logprobs(batch("sft", 1)))}
    metrics = [step(model, batch("sft", seed)) for seed in (2, 3)]
    return {**found, "metrics": metrics, "trained": tiny_models.exported(model.policy)}


def fp8_scales(folder: Path, out: Path) -> dict:
    """Scales of a layer, before and after a checkpoint; and what is said of a checkpoint that lacks a weight."""
    from megatron.core import dist_checkpointing
    from megatron.core.extensions.transformer_engine import TEDelayedScaling
    from megatron.core.utils import get_model_config
    from transformer_engine.common.recipe import Format

    from nemo_edo.errors import UserError
    from nemo_edo.megatron import checkpoint

    saved, loaded = (build(folder, TRAINING["sft"]).policy for _ in range(2))
    layer, other = (
        [part for part in policy.chunks[0].modules() if hasattr(part, "fp8_meta")][-1] for policy in (saved, loaded)
    )
    recipe = TEDelayedScaling(get_model_config(saved.chunks[0]), Format.HYBRID)
    layer.fp8_meta |= {"fp8_checkpoint": True, "recipe": recipe, "num_gemms": 1}
    layer.init_fp8_meta_tensors(recipe)
    scale = layer.fp8_meta["scaling_fwd"].scale
    scale.copy_(torch.arange(3.0, 3.0 + len(scale)))
    checkpoint.save(saved, out / "scales")
    checkpoint.load(loaded, out / "scales")
    found = {"saved": scale.tolist(), "loaded": other.fp8_meta["scaling_fwd"].scale.tolist()}

    save = dist_checkpointing.save
    with mock.patch.object(dist_checkpointing, "save", lambda state, *rest, **how: save(lacking(state), *rest, **how)):
        checkpoint.save(saved, out / "lacking")
    try:
        checkpoint.load(loaded, out / "lacking")
    except UserError as error:
        return {**found, "said": str(error)}
    return found


def lacking(state: dict) -> dict:
    return {**state, "model0": {name: part for name, part in state["model0"].items() if "linear_fc2" not in name}}


@contextlib.contextmanager
def a_gpu(capability: tuple[int, int], cuda: str = "13.1") -> Iterator[None]:
    """Inside the block Transformer Engine finds a GPU of this compute capability, and this version of CUDA."""
    from transformer_engine.pytorch import quantization

    known = dict.fromkeys(("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"))
    found = {"get_device_compute_capability": lambda: capability, **known}
    with mock.patch.multiple(quantization, **found), mock.patch.object(torch.version, "cuda", cuda):
        yield


def precise(folder: Path, settings: dict, capability: tuple[int, int]) -> dict:
    """What a precision builds: the modules' types, the weights' types, and Transformer Engine's recipe."""
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.core.utils import get_model_config

    from nemo_edo.megatron.layer_spec import kernels

    with a_gpu(capability):
        model = build(folder, TRAINING["sft"], precision=settings)
    model.start_training(2)
    config = get_model_config(model.built.chunks[0])
    return {
        "kernels": kernels(model.built.chunks),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "recipe": type(get_fp8_recipe(config)).__name__ if config.fp8 else None,
    }


def in_fp8(folder: Path, settings: dict) -> dict:
    """The layers' weights and the reference, by how they are kept; log-probabilities of both, of the reference also
    after the policy has moved; and whether the weights' bits are unchanged after each kind of reference, and a resident
    one's by the policy's move."""
    with a_gpu((9, 0)):
        model = build(folder, TRAINING["ed-grpo"], precision=settings)
        model.freeze_reference()
        rows = batch("ed-grpo", 0)
        layers = [part for part in model.policy._parameters() if hasattr(part, "_fp8_dtype")]
        kept = [(part._data.clone(), part._scale_inv.clone()) for part in layers]

        def unchanged() -> bool:
            pairs = zip(kept, layers, strict=True)
            return all(torch.equal(a, p._data) and torch.equal(b, p._scale_inv) for (a, b), p in pairs)

        found = {"of the layers": {type(part).__name__ for part in layers}, "same": []}
        found["reference is"] = {"pinned" if part.is_pinned() else part.device.type for part in model.reference}
        found["logprobs"] = over(model).logprobs(rows)[0].clone()
        found["reference"] = over(model).reference_logprobs(rows).clone()
        found["same"].append(unchanged())
        resident = [part for part in model.policy.snapshot(resident=True) if hasattr(part, "_fp8_dtype")]
        with torch.no_grad():
            for part in layers:
                part.copy_(part.dequantize() * 1.5 + 0.01)
        pairs = zip(kept, resident, strict=True)
        found["same"].append(all(torch.equal(scale, part._scale_inv) for (_, scale), part in pairs))
        kept[:] = [(part._data.clone(), part._scale_inv.clone()) for part in layers]
        assert torch.equal(over(model).reference_logprobs(rows), found["reference"])
        found["same"].append(unchanged())
        model.move_reference("ema", 0.5)
        found["moved"] = over(model).reference_logprobs(rows).clone()
        found["same"].append(unchanged())
    return found


def fp8_support(capability: tuple[int, int], cuda: str) -> dict[str, Any]:
    """Of each recipe, why this machine refuses it as a GPU of this capability, or None; the numbers of a block, by
    Transformer Engine and by us."""
    from transformer_engine.pytorch import Float8BlockQuantizer
    from transformer_engine.pytorch.constants import DType

    from nemo_edo.errors import UserError
    from nemo_edo.megatron.precision import BLOCK, SUPPORT, check_fp8_support

    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)
    found: dict[str, Any] = {"blocks": (quantizer.block_len, BLOCK)}
    with a_gpu(capability, cuda):
        for name in SUPPORT:
            precision = PrecisionConfig(dtype="bf16", fp8="hybrid", fp8_recipe=name)
            try:
                found[name] = check_fp8_support(precision, Version(version("transformer-engine")))
            except UserError as error:
                found[name] = str(error)
    return found
