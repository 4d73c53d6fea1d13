"""The GPU path on the pretended device: the device itself, training steps with Transformer Engine's layers, decoding,
checkpoints, guards, precisions and whole runs, against the CPU. One file, so that one set of processes serves it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.forked import Child
from omegaconf import OmegaConf
from safetensors.torch import load_file

from nemo_edo.checks.numbers import BOUNDS, LLAMA, TF32_ERROR, of_transformers, write_model
from nemo_edo.config import ParallelismConfig, PrecisionConfig

from .cases import TRAINING
from .prepare import ROOT

CASES, DEVICE_CASES = "rehearsal.cases", "rehearsal.device_cases"
REFUSED = ("same device", "expected device", "indices should be", "device type for generator", "No backend type",
           "convert cuda", "invalid device", "cannot be accessed from Triton")  # fmt: skip
RELATIVE = 2e-4
"""Of the largest number of a tensor; both compute in fp32, with other kernels in another order."""
PRECISIONS = sorted(path.stem for path in (ROOT / "conf" / "precision").glob("*.yaml"))
RECIPES = {"fp8": "Float8CurrentScaling", "fp8_blockwise": "Float8BlockScaling", "fp8_delayed": "TEDelayedScaling",
           "mxfp8": "MXFP8BlockScaling"}  # fmt: skip


# --- the device refuses what CUDA refuses, and allows what CUDA allows ------------------------------------------------


def test_operands_on_two_devices_are_refused(gpu):
    refused = gpu.run(f"{DEVICE_CASES}:answers")[0]
    assert len(refused) > 10
    for name, said in refused.items():
        assert "error" in said and any(part in said for part in REFUSED), (name, said)


def test_a_copy_to_pinned_memory_arrives_with_the_synchronisation(gpu):
    before, after, of_plain_memory = gpu.run(f"{DEVICE_CASES}:late_copy")[0]
    assert before != after == of_plain_memory == [1.0, 2.0]


# --- steps ------------------------------------------------------------------------------------------------------------


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


def compare(pool, on_cpu, folder, algorithm: str, brief: bool = True, lora: bool = False, **how) -> dict:
    """how: what the GPU's steps have and the CPU's have not. Returns the GPU's result."""
    case = {"folder": folder, "algorithm": algorithm, "brief": brief, "lora": lora}
    there, results = on_cpu("steps", **case), pool.run(f"{CASES}:steps", **case, **how)
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


PACKED = {"packing": True, "micro_batch_tokens": 40}
SHARED_PROMPTS = {"settings": {**PACKED, "share_prompts": True}, "attention": "sdpa"}
"""With torch's attention: Transformer Engine's has no packs in fp32."""
OVERLAPS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ON_ONE = {
    "packs": ("ed-idpo", {"settings": PACKED, "attention": "sdpa"}),
    "shared prompts": ("ed-grpo", SHARED_PROMPTS),
    "fused loss head": ("ed-grpo", {"loss_head": "fused"}),
    "lora": ("ed-grpo", {"lora": True, "brief": False}),
    "overlaps, recomputed": ("ed-grpo", {"parallelism": {**OVERLAPS, "recompute_granularity": "full"}}),
    "resident reference": ("ed-idpo", {"settings": {"reference_placement": "resident"}}),
}


@pytest.mark.parametrize("case", ON_ONE)
def test_steps_done_in_another_way_are_the_cpus(gpu, on_cpu, models, case):
    algorithm, how = ON_ONE[case]
    found = compare(gpu, on_cpu, models / "plain", algorithm, **how)
    assert case != "resident reference" or found["reference is"] == ["cuda"]


SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ON_SEVERAL = {
    "tensor": ("two_gpus", "plain", {"parallelism": {"tensor_model_parallel_size": 2}}),
    "data": ("two_gpus", "plain", {"parallelism": {"use_distributed_optimizer": True}}),
    "experts": ("two_gpus", "experts", {"parallelism": {"expert_model_parallel_size": 2}}),
    # Whose packs are padded to lengths that the two can share.
    "sequence, shared prompts": ("two_gpus", "plain", {**SHARED_PROMPTS, "parallelism": SEQUENCE}),
    "sequence and pipeline, tied": ("four_gpus", "llama", {
        "parallelism": {**SEQUENCE, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_SEVERAL)
def test_several_processes_have_the_steps_of_one_cpu(request, on_cpu, models, case):
    pool, model, how = ON_SEVERAL[case]
    compare(request.getfixturevalue(pool), on_cpu, models / model, "ed-grpo", **how)


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_products_are_tf32s_where_the_config_allows_it(gpu, tf32, tmp_path):
    """Of Transformer Engine, which asks for TF32 always; and log-probabilities are within the bounds of their
    arithmetic."""
    [errors] = gpu.run("nemo_edo.checks.numbers:errors_of_products", precision=PrecisionConfig(tf32=tf32))
    assert (errors["Transformer Engine"] > TF32_ERROR) == tf32
    write_model(tmp_path / LLAMA)
    length, rows = 50, 4  # few tokens: the kernels run in Triton's interpreter
    [found] = gpu.run(f"{CASES}:in_precision", folder=tmp_path / LLAMA, precision="tf32" if tf32 else "fp32",
                      length=length, rows=rows)
    far = float(np.abs(found - of_transformers(tmp_path / LLAMA, length)[:, :rows]).max())
    low, high = (BOUNDS["fp32"].values, BOUNDS["tf32"].values) if tf32 else (0.0, BOUNDS["fp32"].values)
    assert low < far < high


OFFLOADED = {"optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}


@pytest.mark.parametrize(("settings", "parallelism"), [({}, {}), (PACKED, {}), ({}, OFFLOADED)],
                         ids=["rows", "packed", "offload"])  # fmt: skip
def test_bf16_with_fused_attention_is_near_the_cpus_bf16(gpu, on_cpu, models, settings, parallelism):
    """Heads of 64, which flash attention has kernels for, and queries in groups."""
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


# --- decoding, checkpoints, guards, precisions ------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "stop", "how"), [
    ("gpu", ("2 3",), {}), ("gpu", (), {"lora": True}),
    *(("two_gpus", (), {"parallelism": {f"{kind}_model_parallel_size": 2}}) for kind in ("tensor", "pipeline")),
], ids=["stopped", "lora", "tensor", "pipeline"])  # fmt: skip
def test_responses_are_those_of_the_cpu(request, on_cpu, models, pool, stop, how):
    expected = on_cpu("sampled", folder=models / "plain", stop=stop)
    for found in request.getfixturevalue(pool).run(f"{CASES}:sampled", folder=models / "plain", stop=stop, **how):
        assert_near(found, expected, bound=1e-4)


def test_a_reloaded_policy_whose_optimizer_is_on_the_host_resumes_bit_for_bit(gpu, models, tmp_path):
    assert gpu.run("helpers.layout_cases:reloaded_resumes", models=models, folder=tmp_path / "checkpoint",
                   parallelism=ParallelismConfig(**OFFLOADED), lora=None) == [True]  # fmt: skip


BF16, SHARDED = {"precision": {"dtype": "bf16"}}, {"parallelism": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize(("writer", "reader", "how"), [
    ("gpu", "cpu", BF16), ("cpu", "two_gpus", SHARDED), ("cpu", "gpu", {"lora": True}),
])  # fmt: skip
def test_a_checkpoint_continues_on_the_other_kind_of_machine(request, models, tmp_path, writer, reader, how):
    """Its weights bit for bit, and with its optimizer's state."""
    folder = models / ("wide" if "precision" in how else "plain")
    expected, found = (
        request.getfixturevalue(machine).run(f"{CASES}:{case}", folder=folder, out=tmp_path, **how)[0]
        for machine, case in ((writer, "written"), (reader, "read"))
    )
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
        assert torch.equal(exported[name], weight), name
    for each in (*found["metrics"], *expected["metrics"]):
        each.pop("padding_share")
    assert_near(found, expected, bound=0.05 if "precision" in how else RELATIVE)


def test_a_checkpoint_keeps_fp8s_scales_and_lacks_no_weight(gpu, models, tmp_path):
    [found] = gpu.run(f"{CASES}:fp8_scales", folder=models / "plain", out=tmp_path)
    assert found["loaded"] == found["saved"] and found["saved"][:2] == [3.0, 4.0]
    assert "linear_fc2.weight" in found["said"]


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_builds_its_recipe_and_its_layers(gpu, models, name):
    settings = OmegaConf.to_object(OmegaConf.load(ROOT / "conf" / "precision" / f"{name}.yaml"))
    capability = (10, 0) if name == "mxfp8" else (9, 0)
    [found] = gpu.run(f"{CASES}:precise", folder=models / "wide", settings=settings, capability=capability)
    assert found["devices"] == ["cuda:0"]
    assert found["recipe"] == RECIPES.get(name)
    assert found["dtypes"] == ["torch.float32" if name == "fp32" else "torch.bfloat16"]
    assert "TERowParallelLinear" in found["kernels"]["matrix products"]
    assert ("fp8" in found["kernels"]["matrix products"]) == (name in RECIPES)


def test_weights_in_fp8_are_the_same_bits_after_their_reference_in_host_memory_has_computed(gpu, models):
    """Of the recipes with one scale for each tensor. The reference is the policy, and then another one."""
    for recipe in ("tensorwise", "delayed"):
        settings = {"dtype": "bf16", "fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": True}
        [found] = gpu.run(f"{CASES}:in_fp8", folder=models / "wide", settings=settings)
        assert found["of the layers"] == {"Float8Tensor"} and found["reference is"] == {"pinned"}
        assert found["same"] == [True] * 4
        assert_near(found["reference"], found["logprobs"], bound=0.0)
        assert not torch.equal(found["moved"], found["reference"])


def test_recipes_are_allowed_where_transformer_engine_allows_them(gpu):
    [found] = gpu.run(f"{CASES}:fp8_support", capability=(9, 0), cuda="12.8")
    ours, engines = found.pop("blocks")
    assert ours == engines
    refused = {name: why for name, why in found.items() if why}
    assert refused.keys() == {"blockwise", "mxfp8"}
    assert all(re.search(r"ompute capability .* can do delayed, tensorwise$", why) for why in refused.values())


def test_training_follows_decoding_in_one_process(gpu, models):
    """Transformer Engine keeps tensors between the two, which inference mode would make useless."""
    assert gpu.run(f"{CASES}:decoded_and_trained", folder=models / "wide")[0]


RUN = [
    "train", "--config-name", "quickstart", "name=run", "data.arithmetic.num_operands=2", "sft.steps=2",
    "data.arithmetic.warmup_problems=16", "data.arithmetic.train_problems=8", "data.arithmetic.test_problems=4",
    "sft.micro_batch_size=4", "sft.batch_size=4", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=6",
    "grpo.iterations=2", "grpo.problems_per_iteration=2", "grpo.minibatch_size=4", "evaluation.samples=2",
    "idpo.iterations=1", "idpo.problems_per_iteration=4", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "arms={ed_grpo: {algorithm: grpo, exploration_coefficient: 0.1, covariance_control: kl-cov}, "
    "ed_idpo: {algorithm: idpo}}", "replicate_baseline=false", "idpo.minibatch_size=2",
]  # fmt: skip


def test_a_run_trains_evaluates_and_reports(gpu_environment, nemo_edo, tmp_path):
    """And its settings, its checkpoints and its report are written by the process with the GPU."""
    nemo_edo.succeed(*RUN, f"output_dir={tmp_path}", imported_under=gpu_environment, limit_s=1200.0)
    assert (tmp_path / "run" / "report.html").exists()
    metrics = [json.loads(line) for file in Path(tmp_path).rglob("metrics.jsonl") for line in file.open()]
    steps = [line for line in metrics if "grad_norm" in line]
    assert len(steps) > 4
    assert all(math.isfinite(line["grad_norm"]) and not line.get("skipped") for line in steps)


def test_the_tests_for_a_gpu_pass_on_it(gpu_environment, tmp_path):
    """tests/gpu, but for the Triton kernels' own."""
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/gpu/test_platform_cuda.py"]
    tests = Child(pytest.main, options, output=tmp_path / "said", cwd=ROOT, imported_under=gpu_environment)
    assert tests.wait(1200.0) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert " passed" in said and "skipped" not in said
