"""docs/models.md is current, each layout in it is what the command line makes of it, and its times are near published
ones and what must hold of any."""

from dataclasses import replace
from pathlib import Path

import models_table
import pytest
import scale_table

from nemo_edo.checks.iteration_time import (
    GPU_BANDWIDTH,
    forward_flops,
    generation_seconds,
    iteration_times,
    refit_seconds,
)
from nemo_edo.checks.memory import fullest, model_shape
from nemo_edo.config.compose import compose_incomplete

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plan():
    """Llama 3.1 8B on 16 GPUs."""
    return scale_table.STEPS[0][1]


@pytest.mark.parametrize(("model", "published"), [("llama3_1_8b", 744e12 / 14451), ("llama3_1_70b", 719e12 / 1602)])
def test_operations_of_a_token_are_those_that_megatron_bridge_publishes(model: str, published: float):
    """At a length of 8,192: its TFLOP/s for each GPU over its tokens/s."""
    assert 3 * forward_flops(scale_table.shape(model), 8192) == pytest.approx(published, rel=2e-3)


def test_dense_models_come_out_within_a_fifth_of_what_others_measured():
    for what, _, there, here in scale_table.published():
        if "A3B" not in what:
            assert here == pytest.approx(there, rel=0.2), what


@pytest.mark.slow
def test_the_page_is_current_and_a_layout_of_it_is_what_the_command_line_makes_of_it():
    """The tool reads the files of conf/ itself, without Hydra."""
    rows = list(models_table.rows())
    assert models_table.table(rows) in PAGE, "run: python tools/docs/models_table.py"
    assert scale_table.updated(PAGE) == PAGE, "run: python tools/docs/scale_table.py"
    row = next(row for row in rows if row.model == "qwen2_5_72b")
    overrides = [f"model={row.model}", *models_table.BASE[1:], *row.overrides]
    cfg, _ = compose_incomplete("grpo_gsm8k", overrides)
    assert fullest(cfg, model_shape(cfg), row.gpus) == row.memory


def test_twice_the_gpus_train_in_half_the_time_and_generate_in_more_than_half(plan):
    doubled = replace(plan, gpus=2 * plan.gpus, server_gpus=2 * plan.server_gpus)
    once, twice = iteration_times(plan), iteration_times(doubled)
    assert twice.training == pytest.approx(once.training / 2)
    assert once.generation / 2 < twice.generation < once.generation
    assert refit_seconds(replace(plan, server_tensor_parallel=4)) == pytest.approx(refit_seconds(plan) / 4)


def test_the_longest_response_bounds_generation_from_below(plan):
    """With a single response on each server, its steps read the weights, and hardly anything else."""
    alone = replace(plan, samples=plan.server_gpus)
    steps = plan.longest * 2 * plan.shape.parameters / (GPU_BANDWIDTH * 0.45)
    assert generation_seconds(alone) == pytest.approx(steps, rel=0.05)


def test_recomputation_and_the_reference_cost_a_forward_pass_each_and_overlapped_parts_the_longer_of_them(plan):
    once = iteration_times(plan)
    assert iteration_times(replace(plan, recomputation=True)).training == pytest.approx(4 / 3 * once.training)
    assert iteration_times(replace(plan, reference=False)).logprobs == pytest.approx(once.training / 3)
    longer = max(once.generation, once.logprobs + once.training)
    assert iteration_times(replace(plan, overlapped=True)).total == pytest.approx(longer + once.refit)
