"""A training that is saved at one layout resumes at another with the same numbers, its optimizer included."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_models
from helpers.tiny_models import write_tiny_model
from helpers.training_settings import OPTIMIZER

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.utils.files import checksum

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TRAINED, AFTERWARDS = (0, 1, 2), (3, 4)
"""Batches before and after the checkpoint."""


def begin(model: Path, sizes: dict):
    policy = tiny_models.build_policy(model, ParallelismConfig(**sizes))
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    return policy


def train(policy, seeds) -> list[dict[str, float]]:
    """The numbers of a step on five rows of each seed."""
    batches = [tiny_models.random_batch(rows=5, seed=seed) for seed in seeds]
    metrics = [tiny_models.train_step(policy, batch, **tiny_models.sft_settings(batch)) for batch in batches]
    return [{name: step[name] for name in ("loss", "grad_norm", "lr")} for step in metrics]


def save_and_continue(model: Path, folder: Path, sizes: dict, **settings) -> list[dict[str, float]]:
    """The metrics of the steps after the checkpoint."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, TRAINED)
    checkpoint.save(policy, folder, with_optimizer=True, reference=policy.snapshot(), **settings)
    return train(policy, AFTERWARDS)


def resume(model: Path, folder: Path, sizes: dict) -> dict:
    """The same for a policy that loads the checkpoint, with its reference, and the difference that is reported."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, [7])  # an optimizer state that loading replaces
    checkpoint.load(policy, folder, with_optimizer=True)
    changed, reference = checkpoint.changed_layout(folder), checkpoint.load_reference(policy, folder)
    kept = all(map(torch.equal, reference, policy.snapshot()))
    return {"metrics": train(policy, AFTERWARDS), "changed": changed, "reference is as the weights": kept}


def refusal(model: Path, folder: Path, sizes: dict) -> str | None:
    """The error of ``resume`` for a checkpoint that it refuses."""
    try:
        resume(model, folder, sizes)
    except UserError as error:
        return str(error)
    return None


def optimizer_bytes(model: Path, folder: Path, sizes: dict) -> tuple[int, int, int]:
    """Bytes of this rank's optimizer state in a checkpoint, as saved and as loaded, and of a whole parameter's."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, TRAINED)
    found = []
    for is_loading in (False, True):
        sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
        state = checkpoint._sharded_state(policy, True, sharding, is_loading=is_loading)
        tensors = [one.data for one in nested_values(state["optimizer"]) if isinstance(one, ShardedTensor)]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    weights = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
    return (*found, 3 * 4 * weights)


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
    """on(layout, case, folder, ...): a function of this module at a layout, with its model."""

    def run(layout: str, case: str, folder: Path, **more):
        pool, sizes = (one, ON_ONE[layout]) if layout in ON_ONE else (two, ON_TWO[layout])
        model = models / ("experts" if layout.startswith("experts") else "dense")
        return pool.run(f"distributed.test_resharding:{case}", model=model, folder=folder, sizes=sizes, **more)[0]

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
