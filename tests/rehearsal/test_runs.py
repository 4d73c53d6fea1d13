"""Decoding, checkpoints, guards, precisions and whole runs on the pretended GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from .prepare import ROOT
from .test_steps import RELATIVE, assert_near

CASES = "rehearsal.cases"
PRECISIONS = sorted(path.stem for path in (ROOT / "conf" / "precision").glob("*.yaml"))
RECIPES = {"fp8": "Float8CurrentScaling", "fp8_blockwise": "Float8BlockScaling", "fp8_delayed": "TEDelayedScaling",
           "mxfp8": "MXFP8BlockScaling"}  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"attention": "sdpa"}, {"lora": True}], ids=["te", "sdpa", "lora"])
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


@pytest.mark.parametrize(
    ("precision", "parallelism", "lora"),
    [
        ("bf16", {"use_distributed_optimizer": True}, False),
        ("bf16", {"use_distributed_optimizer": True, "optimizer_offload_fraction": 1.0}, False),
        ("bf16", {}, True),
    ],
    ids=["distributed optimizer", "offload", "lora"],
)
def test_a_reloaded_policy_and_optimizer_resume_bit_for_bit(gpu, models, tmp_path, precision, parallelism, lora):
    how = {"precision": precision, "parallelism": parallelism, "lora": lora}
    [found] = gpu.run(f"{CASES}:resumed", models=models, out=tmp_path / "checkpoint", **how)
    one, other = found["metrics"]
    assert one == other
    one, other = found["weights"]
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


BF16, SHARDED = {"precision": {"dtype": "bf16"}}, {"parallelism": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize(("writer", "reader", "how"), [
    ("cpu", "gpu", {}), ("gpu", "cpu", BF16), ("gpu", "cpu", SHARDED), ("cpu", "two_gpus", SHARDED),
    ("cpu", "gpu", {"lora": True}),
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


def test_a_resident_reference_from_a_checkpoint_moves_as_it_would_have(gpu, models, tmp_path):
    [(kept, loaded)] = gpu.run(f"{CASES}:reloaded_reference", folder=models / "plain", out=tmp_path / "checkpoint")
    assert torch.equal(kept, loaded)


def test_a_checkpoint_keeps_fp8s_scales_and_lacks_no_weight(gpu, models, tmp_path):
    [found] = gpu.run(f"{CASES}:fp8_scales", folder=models / "plain", out=tmp_path)
    assert found["loaded"] == found["saved"] and found["saved"][:2] == [3.0, 4.0]
    assert "linear_fc2.weight" in found["said"]


def test_steps_that_are_not_finite_are_skipped_and_weights_that_are_not_are_found(gpu, models):
    [found] = gpu.run(f"{CASES}:guarded", folder=models / "plain")
    assert [report["skipped"] for report in found["reports"]] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert all(math.isnan(report["loss"]) for report in found["reports"][1:4])
    assert found["kept"]
    assert found["finite"] == [True, False]


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


def test_recipes_are_allowed_where_transformer_engine_allows_them(gpu):
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    [found] = gpu.run(f"{CASES}:fp8_support", capabilities=capabilities, cudas=["12.8", "12.9", "13.1"])
    assert found["ours"] == found["engine"]
    assert {True, False} < set(found["ours"].values())


def test_training_follows_decoding_in_one_process(gpu, models):
    """Transformer Engine keeps tensors between the two, which inference mode would make useless."""
    assert gpu.run(f"{CASES}:decoded_and_trained", folder=models / "wide")[0]


def test_servers_are_sent_tensors_of_the_gpu(gpu, models):
    [found] = gpu.run(f"{CASES}:linked", folder=models / "plain")
    assert {(device, contiguous) for device, contiguous, _ in found["sent"]} == {("cuda:0", True)}
    weights = load_file(models / "plain" / "model.safetensors")
    sent = dict(zip(found["names"], (tensor for _, _, tensor in found["sent"][1:]), strict=False))
    assert sent.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(sent[name], weights[name])] == []


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
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
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
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
