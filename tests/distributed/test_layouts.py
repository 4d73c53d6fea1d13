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
SPLIT = [layout for layout in LAYOUTS if layout != "single"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    write = runpy.run_path(str(HELPERS / "tiny_models.py"))["write_tiny_model"]
    folder = tmp_path_factory.mktemp("models")
    write(folder / "plain")
    write(folder / "tied", tie_word_embeddings=True)
    write(folder / "other", seed=1)
    return folder


@pytest.fixture(scope="module")
def run_layout(models, tmp_path_factory):
    """Runs a layout when it is first asked for; all but the tensor-parallel one load that one's checkpoint."""
    done = {}

    def run(layout: str) -> SimpleNamespace:
        if layout not in done:
            foreign = [] if layout == "tensor" else [str(run("tensor").out / "tied")]
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
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
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


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_three_steps_give_the_weights_and_metrics_of_one_process(split, single, model):
    for found, expected in zip(split.results[f"{model} metrics"], single[f"{model} metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_close(split.results[f"{model} trained"], single[f"{model} trained"], atol=1e-5)


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_three_steps_move_every_weight_of_one_process_further_than_the_comparison_tolerates(single, models, model):
    start = load_file(models / model / "model.safetensors")
    assert all((single[f"{model} trained"][name] - start[name]).abs().max() > 1e-3 for name in start)


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


def test_a_nemo_archive_is_restored_to_the_last_bit(split, models):
    assert differing(split.results["archive"], load_file(models / "other" / "model.safetensors")) == []


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "tensor"])
def test_a_checkpoint_of_a_tensor_parallel_run_loads_to_the_last_bit(run_layout, layout):
    assert differing(run_layout(layout).results["foreign"], run_layout("tensor").results["tied trained"]) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reloaded_policy_and_optimizer_go_on_bit_for_bit(run_layout, layout, dtype):
    assert run_layout(layout).results[f"goes on in {dtype}"]


# --- an adaptation that only two processes can show ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_contiguous_scatter_a_tensor_parallel_model_has_wrong_row_parallel_weights(run_layout, layout):
    row_parallel = ("mlp.down_proj", "self_attn.o_proj")
    wrong = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in row_parallel]
    assert run_layout(layout).results["wrong_without_contiguous_scatter"] == (wrong if layout == "tensor" else [])
