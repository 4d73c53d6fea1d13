"""The Triton kernels in Triton's interpreter, in a process that has it switched on from its start; tests/gpu compiles
and runs them on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_give_the_numbers_of_fp64_and_hide_no_nan():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "helpers.loss_kernels"]
    tests = Path(__file__).parents[2]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tests)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert len(found["errors"]) == 3 * 2 * 2 * 2 * 3
    too_far = {case: pair for case, pair in found["errors"].items() if not pair[0] <= pair[1]}
    assert not too_far and found["nan_is_not_hidden"]
