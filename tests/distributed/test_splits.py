"""Every split over two gloo processes against one process, for the shapes of Qwen2, Qwen3, Llama and Qwen3-MoE.

All cases of two processes share one start of ``tests/helpers/split_worker.py``, and so do those of one.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all cases
HELPERS = Path(__file__).parents[1] / "helpers"
TENSOR, SEQUENCE = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
SHARED_PROMPTS = {"packing": True, "share_prompts": True}
LAYOUTS = {
    "tensor": TENSOR,
    "tensor, sequence": SEQUENCE,
    "pipeline": {"pipeline_model_parallel_size": 2},
    "pipeline, interleaved": INTERLEAVED,
    "data, distributed optimizer": SHARDED,
}
MODELS = {
    f"{model_type}{', tied' if tied else ''}": (model_type, {"num_hidden_layers": 4, "tie_word_embeddings": tied})
    for model_type in ("qwen2", "qwen3", "llama")
    for tied in (False, True)
}
# Twelve: the second process's are 6 to 11, whose names are in another order than their numbers.
MODELS["experts"] = ("qwen3_moe", {
    "num_hidden_layers": 4, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "norm_topk_prob": True, "mlp_only_layers": [],
})
DENSE = [model for model in MODELS if model != "experts"]
EXPERTS = {"expert_model_parallel_size": 2}
ATTENTION, ALL = ["linear_qkv", "linear_proj"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
CASES = [(layout, model, sizes, {}) for layout, sizes in LAYOUTS.items() for model in DENSE] + [
    ("tensor, sequence, lora", "qwen3", SEQUENCE, {"lora": ALL}),
    ("interleaved, lora", "qwen2, tied", INTERLEAVED, {"lora": ALL}),
    ("interleaved, packed", "llama", INTERLEAVED, {"packing": True}),
    ("interleaved, shared prompts", "llama", INTERLEAVED, SHARED_PROMPTS),
    ("tensor, sequence, shared prompts", "qwen3", SEQUENCE, SHARED_PROMPTS),
    ("shared prompts", "qwen2, tied", {}, SHARED_PROMPTS),
    ("expert, shared prompts", "experts", EXPERTS, SHARED_PROMPTS),
    ("overlap", "qwen2, tied", {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
    ("overlap, interleaved", "llama", {**INTERLEAVED, "overlap_grad_reduce": True}, {}),
    ("recomputed", "qwen3", {**SEQUENCE, "recompute_granularity": "full"}, {}),
    ("recomputed attention", "qwen3", {"recompute_granularity": "selective"}, {}),
    ("expert", "experts", EXPERTS, {}),
    ("expert, distributed optimizer", "experts", {**EXPERTS, **SHARDED}, {}),
    ("expert, packed", "experts", EXPERTS, {"packing": True}),
    ("expert, lora", "experts", EXPERTS, {"lora": ATTENTION}),
    ("expert, tensor, sequence", "experts", {**EXPERTS, **SEQUENCE, "expert_tensor_parallel_size": 1}, {}),
    ("tensor, sequence", "experts", SEQUENCE, {}),
    ("pipeline, interleaved", "experts", INTERLEAVED, {}),
    ("data, distributed optimizer", "experts", SHARDED, {}),
]
"""Layout, model, its sizes, and what else is done."""


def of_one_process(model: str, options: dict) -> tuple[str, str]:
    """What a case is compared with: packing changes nothing."""
    return ("single, lora" if "lora" in options else "single"), model


SINGLE = {of_one_process(model, options): options.get("lora") for _, model, _, options in CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("splits")
    tiny = runpy.run_path(str(HELPERS / "tiny_models.py"))
    for name, (model_type, fields) in MODELS.items():
        tiny["write_tiny_model"](folder / "models" / name, model_type, **fields)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    single = [(*key, {}, {"lora": lora} if lora else {}) for key, lora in SINGLE.items()]
    found = {("loaded", model): load_file(folder / "models" / model / "model.safetensors") for model in MODELS}
    for launcher, cases in (((), single), (torchrun, CASES)):
        worker = [str(HELPERS / "split_worker.py"), str(folder / "models"), str(folder / "results.pt")]
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, *worker, json.dumps(cases)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
        )
        assert finished.returncode == 0, finished.stderr[-8000:]
        found |= torch.load(folder / "results.pt")
    return found


@pytest.fixture(params=CASES, ids=[f"{layout}: {model}" for layout, model, _, _ in CASES])
def split(request, results) -> tuple[dict, dict]:
    """What two processes found, and what one did."""
    layout, model, _, options = request.param
    return results[layout, model], results[of_one_process(model, options)]


@pytest.mark.parametrize(("layout", "model"), [*((layout, model) for layout, model, _, _ in CASES), *SINGLE])
def test_exported_weights_are_the_loaded_ones_to_the_last_bit(results, layout, model):
    found, expected = results[layout, model]["exported"], results["loaded", model]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("values", ["log_probs", "entropies"])
def test_log_probs_and_entropies_are_those_of_one_process(split, values):
    found, expected = split
    assert expected[values].abs().max() > 1, "the check needs values that differ from zero"
    torch.testing.assert_close(found[values], expected[values], rtol=0, atol=1e-5)


def test_gradients_of_every_weight_are_those_of_one_process(split):
    """Relative to the largest of the weight's own; a bias of keys has none, since softmax does not see it."""
    found, expected = split[0]["gradients"], split[1]["gradients"]
    assert found.keys() == expected.keys()
    whole = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        if name.endswith("k_proj.bias"):
            scale = whole
        elif ".experts." in name and scale == 0:
            assert found[name].abs().max() == 0, f"{name}: no token of the batch chose this expert"
            continue
        else:
            assert scale > 1e-4 * whole or "lora_A" in name, f"{name} has hardly any gradient: nothing to compare"
        error = (found[name] - gradient).abs().max()
        assert error <= 1e-4 * scale, f"{name}: {error / scale:.1e}"


def test_steps_have_the_gradient_norms_and_the_weights_of_one_process(split):
    found, expected = split
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["norms"][0] != pytest.approx(found["norms"][1], rel=1e-4), "the step changed nothing"
    for name, weight in expected["trained"].items():
        torch.testing.assert_close(found["trained"][name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_greedy_responses_are_those_of_one_process(split):
    if "responses" in split[0]:  # the engine refuses expert parallelism
        assert split[0]["responses"] == split[1]["responses"]
