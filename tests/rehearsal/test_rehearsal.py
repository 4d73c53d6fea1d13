"""The GPU path on the pretended device: the device itself, training steps with Transformer Engine's layers, decoding,
checkpoints, guards, precisions and whole runs, against the CPU. One file, so that one set of processes serves it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from nemo_edo.checks.numbers import BOUNDS, LLAMA, TF32_ERROR, SameNumbers, of_transformers, write_model
from nemo_edo.config import PrecisionConfig

from .cases import TRAINING
from .prepare import ROOT

CASES, DEVICE_CASES = "rehearsal.cases", "rehearsal.device_cases"
REFUSED = ("same device", "expected device", "indices should be", "device type for generator", "No backend type",
           "convert cuda", "invalid device")  # fmt: skip
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


def test_a_kernel_of_triton_refuses_tensors_of_the_host(gpu):
    assert "cannot be accessed from Triton" in gpu.run(f"{DEVICE_CASES}:kernel_with_a_tensor_of_the_host")[0]


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


def test_experts_have_the_steps_of_the_cpu(gpu, on_cpu, models):
    compare(gpu, on_cpu, models / "experts", "ed-grpo")


def test_experts_on_two_processes_have_the_steps_of_one_cpu(two_gpus, on_cpu, models):
    parallelism = {"expert_model_parallel_size": 2}
    compare(two_gpus, on_cpu, models / "experts", "ed-grpo", expected={}, parallelism=parallelism)


def test_a_resident_reference_has_the_steps_of_the_cpu(gpu, on_cpu, models):
    settings = {"reference_placement": "resident"}
    found = compare(gpu, on_cpu, models / "plain", "ed-idpo", expected={}, settings=settings)
    assert found["reference is"] == ["cuda"]


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_products_are_tf32s_where_the_config_allows_it(gpu, tf32, tmp_path):
    """Of Transformer Engine, which asks for TF32 always; and a step is within the bounds of its arithmetic."""
    [errors] = gpu.run("nemo_edo.checks.numbers:errors_of_products", precision=PrecisionConfig(tf32=tf32))
    assert (errors["Transformer Engine"] > TF32_ERROR) == tf32
    write_model(tmp_path / LLAMA)
    length = 56  # short: the kernels run in Triton's interpreter
    step = SameNumbers("tf32" if tf32 else "fp32", length=length)
    [found] = gpu.run("nemo_edo.checks.numbers:measure", folder=tmp_path / LLAMA, step=step, save=None, load=None)
    far = float(np.abs(found.values - of_transformers(tmp_path / LLAMA, length)).max())
    low, high = (BOUNDS["fp32"].values, BOUNDS["tf32"].values) if tf32 else (0.0, BOUNDS["fp32"].values)
    assert low < far < high


PACKED = {"packing": True, "micro_batch_tokens": 40}


@pytest.mark.parametrize(
    ("algorithm", "settings"), [("ed-idpo", PACKED), ("ed-grpo", {**PACKED, "share_prompts": True})]
)
def test_packs_have_the_steps_of_the_cpus_rows(gpu, on_cpu, models, algorithm, settings):
    """With torch's attention: Transformer Engine's has no packs in fp32."""
    compare(gpu, on_cpu, models / "plain", algorithm, expected={}, settings=settings, attention="sdpa")


def test_the_fused_loss_head_has_the_steps_of_the_logits(gpu, on_cpu, models):
    compare(gpu, on_cpu, models / "plain", "ed-grpo", expected={}, loss_head="fused")


def test_lora_has_the_steps_of_the_cpu(gpu, on_cpu, models):
    compare(gpu, on_cpu, models / "plain", "ed-grpo", lora=True, brief=False)


def test_overlaps_and_recomputation_have_the_steps_of_the_cpu(gpu, on_cpu, models):
    parallelism = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
                   "recompute_granularity": "full"}  # fmt: skip
    compare(gpu, on_cpu, models / "plain", "ed-grpo", expected={}, parallelism=parallelism)


OFFLOADED = {"optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}


@pytest.mark.parametrize(("machine", "settings", "parallelism"), [
    ("gpu", {}, {}), ("gpu", PACKED, {}), ("gpu", {}, OFFLOADED),
], ids=["rows", "packed", "offload"])  # fmt: skip
def test_bf16_with_fused_attention_is_near_the_cpus_bf16(request, on_cpu, models, machine, settings, parallelism):
    """Heads of 64, which flash attention has kernels for, and queries in groups."""
    how = {"folder": models / "wide", "algorithm": "ed-grpo", "precision": {"dtype": "bf16"}, "brief": True}
    expected = on_cpu("steps", **how)
    pool = request.getfixturevalue(machine)
    found, *_ = pool.run(f"{CASES}:steps", settings=settings, parallelism=parallelism, **how)
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


@pytest.mark.parametrize("model", ["plain", "llama"])  # queries in groups: with biases, and with a tied head
def test_two_splits_at_once_have_the_steps_of_one_cpu(four_gpus, on_cpu, models, model):
    how = {"parallelism": {**SPLITS["sequence"], **SPLITS["pipeline"], "use_distributed_optimizer": True}}
    compare(four_gpus, on_cpu, models / model, "ed-grpo", expected={}, **how)


def test_shared_prompts_of_two_processes_have_the_steps_of_one_cpus_rows(two_gpus, on_cpu, models):
    """Whose packs are padded to lengths that the two can share."""
    how = {"settings": {**PACKED, "share_prompts": True}, "attention": "sdpa", "parallelism": SPLITS["sequence"]}
    compare(two_gpus, on_cpu, models / "plain", "ed-grpo", expected={}, **how)


# --- decoding, checkpoints, guards, precisions ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"lora": True}], ids=["plain", "lora"])
def test_responses_are_those_of_the_cpu(gpu, on_cpu, models, how):
    stop = ("2 3",) if not how else ()
    expected = on_cpu("sampled", folder=models / "plain", stop=stop)
    [found] = gpu.run(f"{CASES}:sampled", folder=models / "plain", stop=stop, **how)
    assert_near(found, expected, bound=1e-4)


def test_two_processes_respond_as_the_cpu_does(two_gpus, on_cpu, models):
    expected = on_cpu("sampled", folder=models / "plain")
    for parallelism in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
        for found in two_gpus.run(f"{CASES}:sampled", folder=models / "plain", parallelism=parallelism):
            assert_near(found, expected, bound=1e-4)


@pytest.mark.parametrize("how", [{"parallelism": OFFLOADED}, {"lora": True}], ids=["offload", "lora"])
def test_a_reloaded_policy_and_optimizer_resume_bit_for_bit(gpu, models, tmp_path, how):
    [found] = gpu.run(f"{CASES}:resumed", models=models, out=tmp_path / "checkpoint", **how)
    one, other = found["metrics"]
    assert one == other
    one, other = found["weights"]
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


BF16, SHARDED = {"precision": {"dtype": "bf16"}}, {"parallelism": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize(("writer", "reader", "how"), [
    ("gpu", "cpu", BF16), ("gpu", "cpu", SHARDED), ("cpu", "two_gpus", SHARDED), ("cpu", "gpu", {"lora": True}),
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
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    [found] = gpu.run(f"{CASES}:fp8_support", capabilities=capabilities, cudas=["12.8", "12.9", "13.1"])
    assert found["ours"] == found["engine"]
    assert {True, False} < set(found["ours"].values())


def test_training_follows_decoding_in_one_process(gpu, models):
    """Transformer Engine keeps tensors between the two, which inference mode would make useless."""
    assert gpu.run(f"{CASES}:decoded_and_trained", folder=models / "wide")[0]


RUN = [
    "train", "--config-name", "quickstart", "name=run", "data.arithmetic.train_problems=32", "sft.steps=2",
    "data.arithmetic.test_problems=8", "sft.micro_batch_size=16", "sft.batch_size=16", "sampling.samples_per_prompt=4",
    "grpo.iterations=2", "grpo.problems_per_iteration=4", "grpo.minibatch_size=8", "evaluation.samples=2",
    "idpo.iterations=1", "idpo.problems_per_iteration=4", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "arms={ed_grpo: {algorithm: grpo, exploration_coefficient: 0.1, covariance_control: kl-cov}, "
    "ed_idpo: {algorithm: idpo}}", "replicate_baseline=false", "idpo.minibatch_size=2",
]  # fmt: skip


def test_a_run_trains_evaluates_and_reports(gpu_environment, tmp_path):
    """And its settings, its checkpoints and its report are written by the process with the GPU."""
    command = [sys.executable, "-W", "ignore", "-m", "nemo_edo", *RUN, f"output_dir={tmp_path}"]
    environment = {**os.environ, **gpu_environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    metrics = [json.loads(line) for file in Path(tmp_path).rglob("metrics.jsonl") for line in file.open()]
    steps = [line for line in metrics if "grad_norm" in line]
    assert len(steps) > 4
    assert all(math.isfinite(line["grad_norm"]) and not line.get("skipped") for line in steps)


def test_the_tests_for_a_gpu_pass_on_it(gpu_environment):
    """tests/gpu, but for the Triton kernels' own."""
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_platform_cuda.py"]
    environment = {**os.environ, **gpu_environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
