"""A training that is saved at one layout goes on at another with the same numbers, its optimizer included."""

import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.checksums import checksum

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all cases
HELPERS = Path(__file__).parents[1] / "helpers"
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SPLIT = {"use_distributed_optimizer": True}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
WHOLE = {"tensor": TENSOR, "pipeline": PIPELINE, "interleaved": INTERLEAVED, "data": {}}
EXPERTS = {"experts": {"expert_model_parallel_size": 2}, "experts, tensor": {**TENSOR, "sequence_parallel": True}}
ON_TWO = WHOLE | EXPERTS | {f"{name}, split": {**sizes, **SPLIT} for name, sizes in (WHOLE | EXPERTS).items()}
"""Layouts of two processes; split: with the distributed optimizer."""
ON_ONE = {"one": {}, "one, split": SPLIT, "experts, one": {}, "experts, one, split": SPLIT}
SAVED_AND_LOADED = [
    *itertools.permutations(["one", *WHOLE], 2),
    ("tensor, split", "pipeline, split"), ("data, split", "tensor, split"), ("tensor, split", "one, split"),
    ("pipeline, split", "one, split"), ("data, split", "one, split"), ("one, split", "data, split"),
    ("interleaved, split", "one, split"), ("one, split", "interleaved, split"), ("interleaved, split", "data, split"),
    ("experts, tensor", "experts, one"), ("experts, one", "experts, tensor"), ("experts", "experts"),
    ("experts, tensor, split", "experts, one, split"), ("experts, split", "experts, split"),
]


@pytest.fixture(scope="module")
def worker():
    sys.path.insert(0, str(HELPERS))
    try:
        return SimpleNamespace(**runpy.run_path(str(HELPERS / "reshard_worker.py")))
    finally:
        sys.path.remove(str(HELPERS))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    tiny, folder = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py"))), tmp_path_factory.mktemp("models")
    tiny.write_tiny_model(folder / "dense", num_hidden_layers=4)
    tiny.write_tiny_model(folder / "experts", "qwen3_moe", num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
                          moe_intermediate_size=32, norm_topk_prob=True)
    return folder


@pytest.fixture(scope="module")
def model(models) -> Path:
    return models / "dense"


@pytest.fixture(scope="module")
def runs(worker, models, tmp_path_factory) -> SimpleNamespace:
    """saved: {layout: the steps behind its checkpoint}; loaded: {(saved at, loaded at): what ``go_on`` gives}."""
    out = tmp_path_factory.mktemp("checkpoints")

    def model_of(layout: str) -> Path:
        return models / ("experts" if layout.startswith("experts") else "dense")

    one = {name: ParallelismConfig(**values) for name, values in ON_ONE.items()}
    saved = {name: worker.save_and_go_on(model_of(name), out / name, parallelism) for name, parallelism in one.items()}
    layouts = {name: (str(model_of(name)), values) for name, values in ON_TWO.items()}
    pairs = [(str(out / there), here) for there, here in SAVED_AND_LOADED if here in ON_TWO]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(HELPERS / "reshard_worker.py"), str(out), json.dumps(layouts), json.dumps(pairs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results = torch.load(out / "results.pt")
    loaded = {(Path(there).name, here): values for (there, here), values in results["loaded"].items()}
    for there, here in SAVED_AND_LOADED:
        if here in ON_ONE:
            loaded[there, here] = worker.go_on(model_of(here), out / there, one[here])
    return SimpleNamespace(folder=out, saved=saved | results["saved"], loaded=loaded)


@pytest.mark.parametrize(("there", "here"), SAVED_AND_LOADED)
def test_the_next_steps_are_those_of_the_layout_that_saved(runs, there: str, here: str):
    """The loss of the first tells of the weights; those of the second also of Adam's moments and step counters."""
    for found, expected in zip(runs.loaded[there, here]["metrics"], runs.saved[there], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert found["lr"] == expected["lr"]


@pytest.mark.parametrize(("there", "here"), SAVED_AND_LOADED)
def test_a_reference_moves_to_another_layout_with_the_weights(runs, there: str, here: str):
    assert runs.loaded[there, here]["reference is as the weights"]


def test_the_change_of_layout_is_told_with_both_sides(runs):
    assert runs.loaded["tensor", "pipeline"]["changed"] == (
        "tensor-parallel size is 2 there and 1 here, pipeline-parallel size is 1 there and 2 here")
    assert runs.loaded["data", "one"]["changed"] == "data-parallel size is 2 there and 1 here"


@pytest.fixture(scope="module")
def as_it_is(worker, model, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("as it is") / "checkpoint"
    metrics = worker.save_and_go_on(model, folder, ParallelismConfig(**SPLIT), reshardable=False)
    return SimpleNamespace(folder=folder, metrics=metrics)


def test_a_state_that_is_saved_as_it_is_goes_on_at_its_own_layout(worker, model, as_it_is):
    assert worker.go_on(model, as_it_is.folder, ParallelismConfig(**SPLIT))["metrics"] == as_it_is.metrics


def test_a_state_that_is_saved_as_it_is_is_refused_at_another_layout(worker, model, as_it_is, tmp_path):
    folder = shutil.copytree(as_it_is.folder, tmp_path / "copy")
    text = (folder / "about.json").read_text().replace('"data-parallel size": 1', '"data-parallel size": 2')
    (folder / "about.json").write_text(text)
    sums = json.loads((folder / "checksums.json").read_text()) | {"about.json": checksum(folder / "about.json")}
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(UserError, match="another optimizer's state: data-parallel size is 2 there and 1 here$"):
        worker.go_on(model, folder, ParallelismConfig(**SPLIT))


def test_states_with_and_without_the_distributed_optimizer_do_not_fit_each_other(worker, model, runs):
    said = "holds another optimizer's state: distributed optimizer is True there and False here"
    with pytest.raises(UserError, match=re.escape(said)):
        worker.go_on(model, runs.folder / "one, split", ParallelismConfig())


@pytest.mark.parametrize("split", ["", ", split"])
def test_an_optimizers_state_of_dealt_out_experts_goes_on_with_expert_parallelism_only(worker, models, runs, split):
    said = "holds another optimizer's state: expert parallelism is True there and False here"
    with pytest.raises(UserError, match=re.escape(said)):
        worker.go_on(models / "experts", runs.folder / f"experts{split}", ParallelismConfig(**(SPLIT if split else {})))
