"""A step whose numbers break on one of two processes is skipped by both, in every layout, and leaves no trace."""

import math

import pytest
import torch
from helpers.guards_cases import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, two, tiny_model) -> dict:
    return two.run("helpers.guards_cases:run", model=tiny_model, sizes=LAYOUTS[request.param])[0]


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
