"""Refits by two processes: whatever the split, the server gets whole weights."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, two, tiny_model, tmp_path_factory) -> dict:
    folder, sizes = tmp_path_factory.mktemp("refit"), LAYOUTS[request.param]
    return two.run("helpers.refit_ranks_cases:refits", model=tiny_model, folder=folder, sizes=sizes)[0]


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_a_server_gets_the_whole_weights_of_a_split_model(found, transport: str):
    weights, expected = found[transport]["weights"], found["expected"]
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_a_refit_that_failed_leaves_the_version_and_is_told(found):
    assert "no server has taken the weights" in found["disk"]["refused"]
    assert found["disk"]["version"] == found["nccl"]["version"] == 1


def test_each_weight_is_copied_to_the_first_ranks_host_once_and_to_no_other(found):
    assert found["copied"] == [sum(weight.nbytes for weight in found["expected"].values()), 0]
