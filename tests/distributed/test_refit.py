"""Refits by two processes: whatever the split, the server gets whole weights, and both know how it ended."""

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


def test_both_processes_know_version_and_folder_and_of_a_refit_that_failed(found):
    disk = found["disk"]
    first, second = disk["state"]
    assert first == second and first[0] == 1 and first[1].endswith("version_00001")
    assert all(error != "nothing" for error in disk["refused"]) and len(set(disk["refused"])) == 1
    assert disk["version"] == [1, 1]
    assert found["nccl"]["state"] == [1, 1]


def test_both_processes_see_the_state_and_the_error_of_a_collection_that_one_of_them_does(two):
    ahead = two.run("helpers.refit_ranks_cases:ahead")[0]
    assert ahead["seen"] == [[False, False], ["nothing"] * 2, [False, False], ["no server is left"] * 2]
    assert ahead["speed"][0] == {"t": 1.0}
