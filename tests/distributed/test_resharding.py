"""A training that is saved at one layout resumes at another with the same numbers, its optimizer included."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tiny_models import write_tiny_model

from nemo_edo.utils.files import checksum

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SPLIT = {"use_distributed_optimizer": True}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
WHOLE = {"tensor": TENSOR, "pipeline": PIPELINE, "interleaved": INTERLEAVED, "data": {}}
EXPERTS = {"experts": {"expert_model_parallel_size": 2}, "experts, tensor": {**TENSOR, "sequence_parallel": True}}
ON_TWO = WHOLE | EXPERTS | {f"{name}, split": {**sizes, **SPLIT} for name, sizes in (WHOLE | EXPERTS).items()}
"""Layouts of two processes; split: with the distributed optimizer."""
ON_ONE = {"one": {}, "one, split": SPLIT, "experts, one": {}, "experts, one, split": SPLIT}
SAVED_AND_LOADED = [
    ("tensor", "pipeline"), ("interleaved", "data"), ("data", "one"),
    ("tensor, split", "pipeline, split"), ("data, split", "interleaved, split"), ("interleaved, split", "one, split"),
    ("one, split", "tensor, split"),
    ("experts, tensor", "experts, one"), ("experts, tensor, split", "experts, one, split"),
    ("experts, split", "experts, split"),
]
CHANGES = {
    ("tensor", "pipeline"): ("tensor-parallel size is 2 there and 1 here, pipeline-parallel size is 1 there and "
                             "2 here"),
    ("data", "one"): "data-parallel size is 2 there and 1 here",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "dense", num_hidden_layers=4)
    write_tiny_model(folder / "experts", "qwen3_moe", num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
                     moe_intermediate_size=32, norm_topk_prob=True)
    return folder


@pytest.fixture(scope="module")
def on(one, two, models):
    """on(layout, case, folder, ...): a case of helpers.reshard_cases at a layout, with its model."""

    def run(layout: str, case: str, folder: Path, **more):
        pool, sizes = (one, ON_ONE[layout]) if layout in ON_ONE else (two, ON_TWO[layout])
        model = models / ("experts" if layout.startswith("experts") else "dense")
        return pool.run(f"helpers.reshard_cases:{case}", model=model, folder=folder, sizes=sizes, **more)[0]

    return run


@pytest.fixture(scope="module")
def saved(on, tmp_path_factory):
    """A layout's checkpoint and the metrics of the steps after it, made once."""
    out, done = tmp_path_factory.mktemp("checkpoints"), {}

    def save(layout: str) -> SimpleNamespace:
        if layout not in done:
            metrics = on(layout, "save_and_continue", out / layout)
            done[layout] = SimpleNamespace(folder=out / layout, metrics=metrics)
        return done[layout]

    return save


@pytest.mark.parametrize(("there", "here"), SAVED_AND_LOADED)
def test_the_next_steps_and_the_reference_are_those_of_the_layout_that_saved(on, saved, there: str, here: str):
    """The loss of the first step tells of the weights; that of the second also of Adam's moments and step counters."""
    checkpoint = saved(there)
    resumed = on(here, "resume", checkpoint.folder)
    for found, expected in zip(resumed["metrics"], checkpoint.metrics, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert found["lr"] == expected["lr"]
    assert resumed["reference is as the weights"]
    if (there, here) in CHANGES:
        assert resumed["changed"] == CHANGES[there, here]


def test_a_state_that_is_saved_as_it_is_resumes_at_its_own_layout_and_is_refused_at_another(on, tmp_path):
    folder = tmp_path / "checkpoint"
    metrics = on("one, split", "save_and_continue", folder, reshardable=False)
    assert on("one, split", "resume", folder)["metrics"] == metrics
    text = (folder / "about.json").read_text().replace('"data-parallel size": 1', '"data-parallel size": 2')
    (folder / "about.json").write_text(text)
    sums = json.loads((folder / "checksums.json").read_text()) | {"about.json": checksum(folder / "about.json")}
    (folder / "checksums.json").write_text(json.dumps(sums))
    assert "data-parallel size is 2 there and 1 here" in on("one, split", "refusal", folder)


@pytest.mark.parametrize(("there", "here", "named"), [
    ("one, split", "one", "distributed optimizer is True there and False here"),
    ("experts, split", "experts, one, split", "expert parallelism is True there and False here"),
])
def test_an_optimizers_state_of_another_kind_is_refused(on, saved, there: str, here: str, named: str):
    assert named in on(here, "refusal", saved(there).folder)


@pytest.mark.parametrize(("layout", "ranks"), [("data, split", 2), ("interleaved, split", 1)])
def test_no_rank_holds_more_of_the_optimizers_state_than_its_share(on, tmp_path, layout: str, ranks: int):
    saved, loaded, whole = on(layout, "optimizer_bytes", tmp_path)
    assert saved == loaded == pytest.approx(whole / ranks, rel=0.02)  # buckets are padded
