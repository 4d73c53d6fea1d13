"""A controller and two workers find what one process finds, and a rank that fails is named."""

import pytest
import torch
from helpers.worker_pool import CaseFailed

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
LAYOUTS = {"data": {}, "tensor": {"tensor_model_parallel_size": 2}}


@pytest.fixture(scope="module")
def alone(one, tiny_model, tmp_path_factory) -> dict:
    return one.run("helpers.controller_cases:run", folder=tiny_model, out=tmp_path_factory.mktemp("one"), sizes={})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_workers_find_what_one_finds_and_each_gets_its_rows_alone(two, alone, tiny_model, tmp_path, layout):
    sizes = LAYOUTS[layout]
    found, of_the_other = two.run("helpers.controller_cases:run", folder=tiny_model, out=tmp_path, sizes=sizes)
    assert of_the_other is None
    assert found["arrived"] and alone["arrived"], "each response as it ended, from every rank"
    for name in ("responses", "texts", "versions"):
        assert found[name] == alone[name]
    for step, expected in zip(found["metrics"], alone["metrics"], strict=True):
        expected = {**expected, "padding_share": step["padding_share"]}  # which is the layout's
        assert step == pytest.approx(expected, rel=2e-4, abs=2e-5)
    for name in ("logprobs", "loaded"):
        torch.testing.assert_close(found[name], alone["logprobs"], rtol=1e-4, atol=1e-4)
    first, second = found["rows"]
    assert sorted(first + second) == list(range(5)) if layout == "data" else first == second == list(range(5))
    assert found["finite"] == [True, True]


def test_a_rank_that_raises_is_named_with_its_error_though_rank_0_waits_for_it(two):
    with pytest.raises(CaseFailed, match="rank 1 on .* failed in fail_on_rank_1: MemoryError: no room for the grad"):
        two.run("helpers.controller_cases:failure", how="raises")


def test_a_rank_that_is_killed_is_named(two):
    with pytest.raises(CaseFailed, match="(?s)rank 1: died with status -9.*rank 1 on .* during fail_on_rank_1"):
        two.run("helpers.controller_cases:failure", how="killed")
