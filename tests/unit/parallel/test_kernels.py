"""The Triton kernels in Triton's interpreter, in a process that has it switched on from its start; tests/gpu compiles
and runs them on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found() -> dict:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "helpers.loss_kernels"]
    tests = Path(__file__).parents[2]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tests)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_results_and_gradients_of_the_kernels_are_those_of_fp64(found):
    assert len(found["errors"]) == 3 * 2 * 2 * 2 * 3
    too_far = {case: pair for case, pair in found["errors"].items() if not pair[0] <= pair[1]}
    assert not too_far


def test_a_nan_logit_is_not_hidden_by_the_kernels(found):
    assert found["nan_is_not_hidden"]
