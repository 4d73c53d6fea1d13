"""The estimated times: against published runs, and against what must hold of any."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_edo.doctor.throughput import estimate, forward_flops, generation_seconds, refit_seconds

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "docs" / "scale_table.py"))


@pytest.fixture(scope="module")
def plan(tool):
    """Llama 3.1 8B on 16 GPUs."""
    return tool["STEPS"][0][1]


@pytest.mark.parametrize(("model", "published"), [("llama3_1_8b", 744e12 / 14451), ("llama3_1_70b", 719e12 / 1602)])
def test_operations_of_a_token_are_those_that_megatron_bridge_publishes(tool, model: str, published: float):
    """At a length of 8,192: its TFLOP/s for each GPU over its tokens/s."""
    assert 3 * forward_flops(tool["shape"](model), 8192) == pytest.approx(published, rel=2e-3)


def test_dense_models_come_out_within_a_fifth_of_what_others_measured(tool):
    for what, _, there, here in tool["published"]():
        if "A3B" not in what:
            assert here == pytest.approx(there, rel=0.2), what


def test_the_page_is_current(tool):
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert tool["updated"](page) == page, "run: python tools/docs/scale_table.py"


def test_twice_the_gpus_train_in_half_the_time_and_draw_in_no_less(plan):
    once, twice = estimate(plan), estimate(replace(plan, gpus=2 * plan.gpus, server_gpus=2 * plan.server_gpus))
    assert twice.training == pytest.approx(once.training / 2)
    assert once.generation / 2 < twice.generation < once.generation


def test_the_longest_response_bounds_generation_from_below(plan):
    """With a single response on each server, its steps read the weights, and hardly anything else."""
    alone = replace(plan, samples=plan.server_gpus)
    weights = 2 * plan.shape.parameters
    steps = plan.longest * weights / (plan.gpu.memory_bandwidth * 0.45)
    assert generation_seconds(alone) == pytest.approx(steps, rel=0.05)


def test_one_step_off_policy_takes_the_longer_of_the_two_parts(plan):
    turns, overlapped = estimate(plan), estimate(replace(plan, overlapped=True))
    longer = max(turns.generation, turns.log_probs + turns.training)
    assert overlapped.total == pytest.approx(longer + turns.refit)


def test_recomputation_and_the_reference_cost_a_forward_pass_each(plan):
    forward = estimate(plan).training / 3
    assert estimate(replace(plan, recomputation=True)).training == pytest.approx(4 * forward)
    assert estimate(replace(plan, reference=False)).log_probs == pytest.approx(forward)


def test_refit_goes_with_the_weights_of_a_servers_gpu(plan):
    assert refit_seconds(replace(plan, server_tensor_parallel=4)) == pytest.approx(refit_seconds(plan) / 4)


def test_a_model_that_leaves_no_room_for_a_response_never_ends(tool, plan):
    large = replace(plan, shape=tool["shape"]("llama3_1_70b"))
    assert estimate(large).generation == float("inf")


def test_servers_that_do_not_come_out_even_are_refused(plan):
    with pytest.raises(ValueError, match="16 GPUs make no servers of 3 GPUs each"):
        estimate(replace(plan, server_tensor_parallel=3))
