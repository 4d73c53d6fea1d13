"""Tensor, pipeline and data parallelism over two gloo processes against one process.

``tests/helpers/layout_worker.py`` does everything that a run does, once for each layout; the tests compare what it
wrote. One test, at the end, shows the need for an adaptation that only two processes can show.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HELPERS = Path(__file__).parents[1] / "helpers"
LAYOUTS = {
    "single": (1, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
    "data": (2, {}),
    "data, distributed optimizer": (2, {"use_distributed_optimizer": True}),
}
TRAININGS = {
    "plain": "plain", "tied": "tied", "token budget": "plain", "packed": "plain",
    "sft": "plain", "ed-grpo": "sft", "ed-idpo": "sft", "packed ed-idpo": "sft",
    "lora sft": "tied", "lora ed-grpo": "lora sft", "lora ed-idpo": "lora sft",
}
"""Each with the model, or the training, that it starts from."""
ADAPTED = [f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")]
SPLIT = [layout for layout in LAYOUTS if layout != "single"]


@pytest.fixture(scope="module")
def tiny():
    return SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py")))


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_tiny_model(folder / "plain")
    tiny.write_tiny_model(folder / "tied", tie_word_embeddings=True)
    tiny.write_tiny_model(folder / "other", seed=1)
    return folder


@pytest.fixture(scope="module")
def run_layout(models, tmp_path_factory):
    """Runs a layout when it is first asked for; all but the tensor-parallel one load that one's checkpoint."""
    done = {}

    def run(layout: str) -> SimpleNamespace:
        if layout not in done:
            foreign = [] if layout == "tensor" else [str(run("tensor").out)]
            done[layout] = start(layout, tmp_path_factory.mktemp("layout"), foreign)
        assert done[layout].error is None, done[layout].error
        return done[layout]

    def start(layout: str, out: Path, foreign: list[str]) -> SimpleNamespace:
        processes, parallelism = LAYOUTS[layout]
        command = [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={processes}", str(HELPERS / "layout_worker.py"),
            str(models), str(out), json.dumps(parallelism), *foreign,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if finished.returncode != 0:
            return SimpleNamespace(error=finished.stderr[-8000:])
        return SimpleNamespace(error=None, out=out, results=torch.load(out / "results.pt"))

    return run


@pytest.fixture(scope="module")
def single(run_layout) -> dict:
    return run_layout("single").results


@pytest.fixture(params=SPLIT)
def split(request, run_layout) -> SimpleNamespace:
    return run_layout(request.param)


def assert_close(found: dict, expected: dict, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def of_the_batch(metrics: dict[str, float]) -> dict[str, float]:
    """Without what tells how the batch was cut."""
    return {name: value for name, value in metrics.items() if name != "padding_share"}


def differing(found: dict, expected: dict) -> list[str]:
    assert found.keys() == expected.keys()
    return sorted(name for name in expected if not torch.equal(found[name], expected[name]))


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 1])
def test_log_probs_and_entropies_are_those_of_one_process(split, single, rows):
    key = f"log_probs of {rows}"
    torch.testing.assert_close(split.results[key], single[key], rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data"])
def test_gradients_are_those_of_one_process(run_layout, single, layout):
    """With the distributed optimizer no rank holds them whole: there, the weights after steps tell."""
    scale = max(float(gradient.abs().max()) for gradient in single["gradients"].values())
    assert_close(run_layout(layout).results["gradients"], single["gradients"], atol=1e-5 * scale)


@pytest.mark.parametrize("training", TRAININGS)
def test_steps_give_the_weights_and_metrics_of_one_process(split, single, training):
    for found, expected in zip(split.results[f"{training} metrics"], single[f"{training} metrics"], strict=True):
        assert of_the_batch(found) == pytest.approx(of_the_batch(expected), rel=1e-4, abs=1e-5)
    assert_close(split.results[f"{training} trained"], single[f"{training} trained"], atol=1e-5)


@pytest.mark.parametrize("training", TRAININGS)
def test_steps_move_every_weight_of_one_process_further_than_the_comparison_tolerates(single, models, training):
    """With LoRA, every weight that has an adapter."""
    before = TRAININGS[training]
    is_model = (models / before).is_dir()
    start = load_file(models / before / "model.safetensors") if is_model else single[f"{before} trained"]
    after = single[f"{training} trained"]
    moved = {name for name in start if name in after and (after[name] - start[name]).abs().max() > 1e-3}
    if training.startswith("lora"):
        assert {name for name in start if name.endswith(tuple(ADAPTED))} <= moved
        assert not {name for name in moved if name.endswith(("norm.weight", "embed_tokens.weight", "bias"))}
    else:
        assert moved == set(start)


def test_a_token_budget_changes_no_step(single):
    assert_close(single["token budget trained"], single["plain trained"], atol=1e-5)
    budget, plain = (single[f"{name} metrics"] for name in ("token budget", "plain"))
    assert sum(step["padding_share"] for step in budget) < sum(step["padding_share"] for step in plain)


@pytest.mark.parametrize(("packed", "rows"), [("packed", "plain"), ("packed ed-idpo", "ed-idpo")])
def test_packing_changes_no_step_and_leaves_no_padding(single, packed, rows):
    assert_close(single[f"{packed} trained"], single[f"{rows} trained"], atol=1e-5)
    assert all(step["padding_share"] == 0 for step in single[f"{packed} metrics"])
    assert any(step["padding_share"] > 0 for step in single[f"{rows} metrics"])


@pytest.mark.parametrize("key", ["moved reference", "lora moved reference"])
def test_a_reference_that_has_moved_is_that_of_one_process(split, single, key):
    torch.testing.assert_close(split.results[key], single[key], rtol=0, atol=5e-5)


# --- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
def test_rollouts_are_those_of_one_process_token_by_token(split, single, kind):
    assert split.results[f"{kind} responses"] == single[f"{kind} responses"]
    torch.testing.assert_close(split.results[f"{kind} log_probs"], single[f"{kind} log_probs"], rtol=0, atol=1e-4)


def test_one_request_alone_has_the_response_that_it_has_among_others(split, single):
    assert split.results["response alone"] == single["response alone"] == single["sampled responses"][0]


# --- files --------------------------------------------------------------------------------------------------------


def test_the_exported_folder_is_bit_equal_to_the_loaded_one(split, models):
    found, expected = (load_file(folder / "model.safetensors") for folder in (split.out / "hf", models / "plain"))
    assert differing(found, expected) == []
    names = {file.name for file in (split.out / "hf").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_gives_an_exported_policy_with_adapters_the_log_probabilities_it_had(run_layout, layout, tiny):
    run = run_layout(layout)
    model, batch = tiny.load_dense(run.out / "lora" / "exported"), tiny.random_batch(rows=6, seed=0)
    with torch.no_grad():
        expected = tiny.dense_log_probs(model, batch.tokens, temperature=0.7)[0]
    found = run.results["lora ed-grpo log_probs"]
    torch.testing.assert_close(found * batch.mask, expected * batch.mask, rtol=0, atol=5e-5)


def test_a_nemo_archive_is_restored_to_the_last_bit(split, models):
    assert differing(split.results["archive"], load_file(models / "other" / "model.safetensors")) == []


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "tensor"])
def test_a_checkpoint_of_a_tensor_parallel_run_loads_to_the_last_bit(run_layout, layout):
    found, written = run_layout(layout).results, run_layout("tensor").results
    assert differing(found["foreign"], written["tied trained"]) == []
    found, expected = found["foreign with lora"], written["lora ed-grpo trained"]
    adapters = {name for name in expected if ".lora_" in name}
    assert len(adapters) == 28
    assert differing({n: found[n] for n in adapters}, {n: expected[n] for n in adapters}) == []
    assert_close(found, expected, atol=1e-6)  # merged, each layout in its own order of additions


@pytest.mark.parametrize("kind", ["in fp32", "in bf16", "with lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reloaded_policy_and_optimizer_go_on_bit_for_bit(run_layout, layout, kind):
    assert run_layout(layout).results[f"goes on {kind}"]


# --- an adaptation that only two processes can show ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_contiguous_scatter_a_tensor_parallel_model_has_wrong_row_parallel_weights(run_layout, layout):
    row_parallel = ("mlp.down_proj", "self_attn.o_proj")
    wrong = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in row_parallel]
    assert run_layout(layout).results["wrong_without_contiguous_scatter"] == (wrong if layout == "tensor" else [])
