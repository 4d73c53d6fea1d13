"""Refits by two processes: whatever the split, the server gets whole weights."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
LAYOUTS = {"tensor": {"tensor_model_parallel_size": 2}, "pipeline": {"pipeline_model_parallel_size": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, two, tiny_model, tmp_path_factory) -> dict:
    folder, sizes = tmp_path_factory.mktemp("refit"), LAYOUTS[request.param]
    return two.run("helpers.refit_ranks_cases:refits", model=tiny_model, folder=folder, sizes=sizes)[0]


def test_a_server_gets_the_whole_weights_of_a_split_model_which_only_the_first_rank_copies(found):
    expected = found["expected"]
    for transport in ("disk", "nccl"):
        weights = found[transport]
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    assert found["copied"] == [sum(weight.nbytes for weight in expected.values()), 0]
