"""All that a run does over two gloo processes against one process: test_splits.py compares one pass in more layouts.

``helpers.layout_cases`` does it once for each layout; the tests compare what it returns.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_models
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SIZES = {
    "single": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
}
LAYOUTS, SPLIT = list(SIZES), list(SIZES)[1:]
KINDS = ["full", "lora"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write_tiny_model(folder / "plain")
    tiny_models.write_tiny_model(folder / "tied", tie_word_embeddings=True)
    tiny_models.write_tiny_model(folder / "other", seed=1)
    return folder


@pytest.fixture(scope="module")
def run_layout(models, one, two, tmp_path_factory):
    """Runs a layout when it is first asked for; all but the tensor-parallel one load that one's checkpoints."""
    done = {}

    def run(layout: str) -> SimpleNamespace:
        if layout not in done:
            foreign = None if layout == "tensor" else run("tensor").out
            out, pool = tmp_path_factory.mktemp("layout"), one if layout == "single" else two
            results = pool.run("helpers.layout_cases:run", models=models, out=out, sizes=SIZES[layout],
                               foreign=foreign)[0]
            done[layout] = SimpleNamespace(out=out, results=results)
        return done[layout]

    return run


@pytest.fixture(scope="module")
def single(run_layout) -> dict:
    return run_layout("single").results


@pytest.fixture(scope="module", params=SPLIT)
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


def test_logprobs_and_entropies_of_fewer_rows_than_processes_are_those_of_one_process(split, single):
    key = "logprobs of one row"
    torch.testing.assert_close(split.results[key], single[key], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_give_the_weights_metrics_and_moved_reference_of_one_process(split, single, kind):
    start = single[f"{kind} sft trained"]
    for training in (f"{kind} {algorithm}" for algorithm in ("sft", "ed-grpo", "ed-idpo")):
        for found, expected in zip(split.results[f"{training} metrics"], single[f"{training} metrics"], strict=True):
            assert of_the_batch(found) == pytest.approx(of_the_batch(expected), rel=1e-4, abs=1e-5)
        after = single[f"{training} trained"]
        assert_close(split.results[f"{training} trained"], after, atol=1e-5)
        # Exploration moves every trained weight further than that; with LoRA, the matrices of the layers.
        moved = {name for name in start if (after[name] - start[name]).abs().max() > 1e-3}
        trained = {name for name in start if kind == "full" or name.endswith("_proj.weight")}
        assert trained <= moved or after is start
    key = f"{kind} moved reference"
    torch.testing.assert_close(split.results[key], single[key], rtol=0, atol=5e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_gives_an_exported_policy_with_adapters_the_log_probabilities_it_had(run_layout, layout):
    run = run_layout(layout)
    model, batch = tiny_models.load_dense(run.out / "lora" / "exported"), tiny_models.random_batch(rows=6, seed=0)
    with torch.no_grad():
        expected = tiny_models.dense_logprobs(model, batch.tokens, temperature=0.7)[0]
    found = run.results["lora ed-grpo logprobs"]
    torch.testing.assert_close(found * batch.mask, expected * batch.mask, rtol=0, atol=5e-5)


def test_a_nemo_archive_is_restored_to_the_last_bit(split, models):
    assert differing(split.results["archive"], load_file(models / "other" / "model.safetensors")) == []


@pytest.mark.parametrize("layout", ["single", "pipeline", "data, distributed optimizer"])
def test_a_checkpoint_of_a_tensor_parallel_run_loads_to_the_last_bit(run_layout, layout):
    found, written = run_layout(layout).results, run_layout("tensor").results
    assert differing(found["full foreign"], written["full ed-grpo trained"]) == []
    found, expected = found["lora foreign"], written["lora ed-grpo trained"]
    adapters = {name for name in expected if ".lora_" in name}
    assert len(adapters) == 28
    assert differing({n: found[n] for n in adapters}, {n: expected[n] for n in adapters}) == []
    assert_close(found, expected, atol=1e-6)  # merged, each layout in its own order of additions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reloaded_policy_and_optimizer_resume_bit_for_bit(run_layout, layout, kind):
    assert run_layout(layout).results[f"{kind} resumes"]
