"""A step whose numbers break on one of two processes is skipped by both, in every layout, and leaves no trace."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.training_settings import OPTIMIZER

from nemo_edo.config import ParallelismConfig
from nemo_edo.losses import LossTerm, sft_loss

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

FAULTS = ("loss", "gradient", "weight")


def loss(logprobs, entropies, micro, _=0.0):
    """The advantage of rank 0's row breaks its loss (NaN) or its gradient alone (infinity)."""
    term, broken = sft_loss(logprobs, micro.mask), micro.advantages.sum()
    if broken.isinf():
        term = LossTerm(term.sum + (logprobs - logprobs.detach()).abs().sqrt().sum(), term.count)
    return {"sft": term.scaled(math.nan) if broken.isnan() else term}, {}


@contextlib.contextmanager
def broken_weight(policy) -> Iterator[None]:
    """NaN in a weight of rank 1 alone, as a defective device has it."""
    parameter = next(iter(policy.chunks[-1].parameters()))
    kept = parameter.detach().clone()
    with torch.no_grad():
        if torch.distributed.get_rank() == 1:
            parameter.view(-1)[3:] = math.nan
    yield
    with torch.no_grad():
        parameter.copy_(kept)


def take(policy, seed: int, fault: str | None = None) -> dict[str, list[float]]:
    """A step's report on every rank; the first row is rank 0's alone where two share the rows."""
    from nemo_edo.config import MicroBatchConfig

    batch = tiny_models.random_batch(rows=5, seed=seed)
    batch.advantages[0] = {"loss": math.nan, "gradient": math.inf}.get(fault, 0.0)
    settings = {**tiny_models.sft_settings(batch), "loss": loss, "micro_batching": MicroBatchConfig(1)}
    with broken_weight(policy) if fault == "weight" else contextlib.nullcontext():
        report = tiny_models.train_step(policy, batch, **settings)
    reports = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    return {name: [each[name] for each in reports] for name in ("loss", "grad_norm", "skipped", "lr")}


def run(model: Path, sizes: dict) -> dict:
    policy = tiny_models.build_policy(model, ParallelismConfig(**sizes))
    start, results = policy.snapshot(), {}
    for fault in (None, *FAULTS):
        policy.load(start)
        policy.reset_optimizer(OPTIMIZER, total_steps=8)
        taken = [take(policy, 0)]
        if fault is not None:
            results[f"{fault} broken"] = take(policy, 2, fault)
        taken += [take(policy, 1), take(policy, 0)]
        results |= {f"{fault} taken": taken, f"{fault} weights": tiny_models.exported(policy)}
    return results


LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, two, tiny_model) -> dict:
    return two.run("distributed.test_guards:run", model=tiny_model, sizes=LAYOUTS[request.param])[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_both_processes_skip_a_step_that_breaks_on_one_and_continue_as_if_it_had_not_been(found, fault):
    broken = found[f"{fault} broken"]
    assert broken["skipped"] == [1.0, 1.0]
    assert all(math.isfinite(loss) for loss in broken["loss"]) == (fault == "gradient")
    assert not any(math.isfinite(norm) for norm in broken["grad_norm"])
    assert found[f"{fault} taken"] == found["None taken"]
    assert {skipped for report in found[f"{fault} taken"] for skipped in report["skipped"]} == {0.0}
    weights, expected = found[f"{fault} weights"], found["None weights"]
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    for report in found["None taken"]:  # the guards decide by these: equal to the last bit
        assert [name for name, (first, second) in report.items() if first != second] == []
