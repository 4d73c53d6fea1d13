"""A machine without CUDA is adapted once, and a machine with CUDA is left as it is."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import platform_cases

from nemo_edo.megatron import platform


@pytest.fixture(scope="module")
def cases():
    done = subprocess.run([sys.executable, platform_cases.__file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_module_changes_nothing_and_imports_no_framework(cases):
    assert (cases["by_import"], cases["imported"]) == ([], [])


def test_enter_changes_nothing_where_there_is_cuda(cases):
    assert cases["enter_with_cuda"] == {"device": "cuda:3", "chosen": ["cuda:3"], "changes": []}


@pytest.mark.parametrize(("visible", "chosen"), [(8, 3), (4, 3), (1, 0)])  # 1: as where Slurm shows a task its own
def test_a_nodes_fourth_process_takes_its_gpu(monkeypatch, visible, chosen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert platform.local_gpu(3) == torch.device("cuda", chosen)


def test_cuda_means_the_cpu_and_a_block_that_names_a_device_still_does(cases):
    assert cases["make_tensors"] == {
        "asked": ["cpu", "cpu", "meta", "cpu"], "within": ["meta", "meta", "meta", "cpu"],
        "moved": True, "named": "torch.cuda.FloatTensor",
    }  # fmt: skip
