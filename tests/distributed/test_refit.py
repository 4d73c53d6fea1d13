"""Refits by two processes: whatever the split, the server gets whole weights, and both know how it ended."""

import json
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
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """By layout, what tests/helpers/refit_ranks_worker.py saw."""
    folder = tmp_path_factory.mktemp("refit")
    runpy.run_path(str(HELPERS / "tiny_models.py"))["write_tiny_model"](folder / "model")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(HELPERS / "refit_ranks_worker.py"), str(folder / "model"), str(folder / "out.pt"),
               json.dumps(LAYOUTS)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-8000:]
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_a_server_gets_the_whole_weights_of_a_split_model(results, layout: str, transport: str):
    found, expected = results[layout][transport]["weights"], results[layout]["expected"]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_processes_know_version_and_folder_and_of_a_refit_that_failed(results, layout: str):
    disk = results[layout]["disk"]
    first, second = disk["state"]
    assert first == second and first[0] == 1 and first[1].endswith("version_00001")
    assert all("no server has taken the weights" in error for error in disk["refused"])
    assert disk["version"] == [1, 1]
    assert results[layout]["nccl"]["state"] == [1, 1]


def test_both_processes_see_the_state_and_the_error_of_a_drawing_that_one_of_them_does(results):
    assert results["ahead"]["seen"] == [[False, False], ["nothing"] * 2, [False, False], ["no server is left"] * 2]
    assert results["ahead"]["speed"][0] == {"t": 1.0}
