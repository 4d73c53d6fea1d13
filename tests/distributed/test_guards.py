"""A step whose numbers break on one of two processes is skipped by both, in every layout, and leaves no trace."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HELPERS = Path(__file__).parents[1] / "helpers"
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """By layout, what tests/helpers/guards_worker.py saw."""
    folder = tmp_path_factory.mktemp("guards")
    runpy.run_path(str(HELPERS / "tiny_models.py"))["write_tiny_model"](folder / "model")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(HELPERS / "guards_worker.py"), str(folder / "model"), str(folder / "out.pt"), json.dumps(LAYOUTS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-8000:]
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("fault", ["advantage", "gradient", "weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_processes_skip_a_step_that_breaks_on_one_and_go_on_as_if_it_had_not_been(results, layout, fault):
    found = results[layout]
    broken = found[f"{fault} broken"]
    assert broken["skipped"] == [1.0, 1.0]
    assert all(math.isfinite(loss) for loss in broken["loss"]) == (fault == "gradient")
    assert not any(math.isfinite(norm) for norm in broken["grad_norm"])
    assert found[f"{fault} taken"] == found["None taken"]
    assert {skipped for report in found[f"{fault} taken"] for skipped in report["skipped"]} == {0.0}
    weights, expected = found[f"{fault} weights"], found["None weights"]
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_processes_see_the_same_loss_and_norm_to_the_last_bit(results, layout):
    """What the guards decide by."""
    for report in results[layout]["None taken"]:
        for name, (first, second) in report.items():
            assert first == second, name
