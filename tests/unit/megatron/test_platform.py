"""A machine without CUDA is adapted once, and a machine with CUDA is left as it is."""

import json
import subprocess
import sys

import pytest
from helpers import platform_cases


@pytest.fixture(scope="module")
def cases():
    done = subprocess.run([sys.executable, platform_cases.__file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_module_changes_nothing_and_imports_no_framework(cases):
    assert (cases["by_import"], cases["imported"]) == ([], [])


def test_enter_changes_nothing_where_there_is_cuda(cases):
    assert cases["enter_with_cuda"] == {"device": "cuda:3", "chosen": ["cuda:3"], "changes": []}


def test_a_process_that_sees_one_gpu_takes_it_and_too_few_for_a_nodes_processes_are_refused(cases):
    assert cases["enter_with_one_gpu"] == {"device": "cuda:0", "chosen": ["cuda:0"], "changes": []}
    assert "number 4 on its node, where 3 GPUs are visible" in cases["enter_with_too_few_gpus"]


def test_an_engine_that_cannot_be_imported_is_named_with_what_it_lacks(cases):
    said = cases["enter_with_a_broken_engine"]
    assert "Transformer Engine is installed and cannot be imported: No module named 'onnx_that_is_absent'; " in said


def test_the_second_call_of_enter_changes_nothing(cases):
    result = cases["enter_twice"]
    some = {"torch.cuda.current_device", "torch.zeros", "Tensor.cuda"}
    assert some <= set(result["first"])
    assert (result["second"], result["devices"], result["threads"]) == ([], ["cpu", "cpu"], 1)


def test_cuda_means_the_cpu_and_a_block_that_names_a_device_still_does(cases):
    assert cases["make_tensors"] == {
        "asked": ["cpu", "cpu", "meta", "cpu"], "within": ["meta", "meta", "meta", "cpu"],
        "moved": True, "named": "torch.cuda.FloatTensor",
    }  # fmt: skip
