"""Training steps on the pretended GPU, with Transformer Engine's layers, against those on the CPU."""

import pytest
import torch

from .cases import TRAINING

CASES = "rehearsal.cases"
RELATIVE = 2e-4
"""Of the largest number of a tensor; both compute in fp32, with other kernels in another order."""


def assert_near(found: object, expected: object, name: str = "", bound: float = RELATIVE) -> None:
    """Tensors by their largest number; metrics by their values; all else exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_near(found[key], expected[key], f"{name} {key}", bound)
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for place, pair in enumerate(zip(found, expected, strict=True)):
            assert_near(*pair, f"{name} {place}", bound)
    elif torch.is_tensor(expected):
        assert found.device.type == "cpu", name
        atol = bound * max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=bound, abs=bound), name
    else:
        assert found == expected, name


def on_device(result: dict) -> dict:
    """Without what may differ: where the reference is, and how the batch was cut."""
    kept = {name: value for name, value in result.items() if name not in ("reference is", "reference's norm")}
    for each in [*kept["metrics"], kept.get("validation", {})]:
        each.pop("padding_share", None)
    return kept


def compare(gpu, on_cpu, folder, algorithm: str, expected: dict | None = None, brief: bool = True, **arguments) -> dict:
    """expected: the CPU's arguments, where they are other ones. Returns the GPU's result."""
    case = {"folder": folder, "algorithm": algorithm, "brief": brief}
    there = on_cpu("steps", **case, **(arguments if expected is None else expected))
    results = gpu.run(f"{CASES}:steps", **case, **arguments)
    for found in results:
        assert_near(on_device(found), on_device(there), algorithm)
    if len(results) == 1:  # otherwise a rank has a part of the reference
        assert_near(found.get("reference's norm"), there.get("reference's norm"))
    return found


@pytest.mark.parametrize("algorithm", TRAINING)
def test_steps_have_the_losses_gradients_and_weights_of_the_cpu(gpu, on_cpu, models, algorithm):
    found = compare(gpu, on_cpu, models / "plain", algorithm, brief=algorithm not in ("sft", "ed-grpo", "ed-idpo"))
    assert found.get("reference is") == (None if algorithm == "sft" else ["pinned"])
    moved = max(float(gradient.abs().max()) for gradient in found["gradients"].values())
    assert moved > 1e-3


def test_a_llama_with_tied_embeddings_has_the_steps_of_the_cpu(gpu, on_cpu, models):
    compare(gpu, on_cpu, models / "llama", "ed-grpo")


def test_a_resident_reference_has_the_steps_of_the_cpu(gpu, on_cpu, models):
    settings = {"reference_placement": "resident"}
    found = compare(gpu, on_cpu, models / "plain", "ed-idpo", expected={}, settings=settings)
    assert found["reference is"] == ["cuda"]


PACKED = {"packing": True, "micro_batch_tokens": 40}


@pytest.mark.parametrize("algorithm", ["ed-grpo", "ed-idpo"])
@pytest.mark.parametrize("settings", [PACKED, {**PACKED, "share_prompts": True}], ids=["packed", "shared prompts"])
def test_packs_have_the_steps_of_the_cpus_rows(gpu, on_cpu, models, algorithm, settings):
    """With torch's attention: Transformer Engine's has no packs in fp32."""
    compare(gpu, on_cpu, models / "plain", algorithm, expected={}, settings=settings, attention="sdpa")


def test_the_fused_loss_head_has_the_steps_of_the_logits(gpu, on_cpu, models):
    compare(gpu, on_cpu, models / "plain", "ed-grpo", expected={}, loss_head="fused")


@pytest.mark.parametrize("algorithm", ["sft", "ed-grpo", "ed-idpo"])
def test_lora_has_the_steps_of_the_cpu(gpu, on_cpu, models, algorithm):
    compare(gpu, on_cpu, models / "plain", algorithm, lora=True, brief=algorithm == "ed-idpo")


@pytest.mark.parametrize(
    "parallelism",
    [
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"recompute_granularity": "full"},
    ],
    ids=["distributed optimizer", "recompute"],
)
def test_other_optimizers_and_recomputation_have_the_steps_of_the_cpu(gpu, on_cpu, models, parallelism):
    compare(gpu, on_cpu, models / "plain", "ed-grpo", expected={}, parallelism=parallelism)


OFFLOADED = {"optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("settings", "parallelism"), [({}, {}), (PACKED, {}), ({}, OFFLOADED)], ids=["rows", "packed", "offload"]
)
def test_bf16_with_fused_attention_is_near_the_cpus_bf16(gpu, on_cpu, models, settings, parallelism):
    """Heads of 64, which flash attention has kernels for."""
    how = {"folder": models / "wide", "algorithm": "ed-grpo", "precision": {"dtype": "bf16"}, "brief": True}
    expected = on_cpu("steps", **how)
    [found] = gpu.run(f"{CASES}:steps", settings=settings, parallelism=parallelism, **how)
    assert found["finite"]
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert found["metrics"][0][name] == pytest.approx(expected["metrics"][0][name], rel=0.1, abs=0.02), name
    assert_near(found["logprobs"], expected["logprobs"], bound=0.05)
    for name, gradient in expected["gradients"].items():
        pair = (part.flatten().float() for part in (found["gradients"][name], gradient))
        assert torch.nn.functional.cosine_similarity(*pair, dim=0) > 0.98, name


SPLITS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {"use_distributed_optimizer": True},
}


@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_have_the_steps_of_one_cpu(two_gpus, on_cpu, models, split):
    compare(two_gpus, on_cpu, models / "plain", "ed-grpo", expected={}, parallelism=SPLITS[split])


def test_shared_prompts_of_two_processes_have_the_steps_of_one_cpus_rows(two_gpus, on_cpu, models):
    """Whose packs are padded to lengths that the two can share."""
    how = {"settings": {**PACKED, "share_prompts": True}, "attention": "sdpa", "parallelism": SPLITS["sequence"]}
    compare(two_gpus, on_cpu, models / "plain", "ed-grpo", expected={}, **how)


def test_without_transformer_engine_torchs_layers_have_the_steps_of_the_cpu(bare_gpu, on_cpu, models):
    expected = on_cpu("steps", folder=models / "llama", algorithm="ed-grpo", brief=True)
    [found] = bare_gpu.run(f"{CASES}:bare_steps", folder=models / "llama")
    used, fusions = found.pop("kernels"), found.pop("fusions")
    assert_near(on_device(found), on_device(expected))
    assert fusions == []
    assert used["attention"].endswith("SDPAttention") and used["rotary embedding"] == "torch"
