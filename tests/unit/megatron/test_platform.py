"""Each adaptation to a machine without CUDA is needed, and a machine with CUDA is left as it is.

Adaptations cannot be taken back, so ``tests/helpers/platform_cases.py`` runs every case in a process of its own.
``contiguous_scatter`` shows with two processes only: tests/distributed/test_layouts.py. ``router_product`` and
``expert_counts`` show in a model with experts: test_experts.py.
"""

import json
import subprocess
import sys

import pytest

from nemo_edo.megatron import platform

# What each one is for, by the place of Megatron's that fails without it.
NEEDED_BY = {
    "current_device": "megatron/core/distributed/param_and_grad_buffer.py",
    "device_argument": "megatron/core/optimizer/optimizer.py",
    "tensor_type": "megatron/core/optimizer/clip_grads.py",
    "synchronize": "megatron/core/dist_checkpointing/strategies/filesystem_async.py",
    "random_state": "megatron/core/tensor_parallel/random.py",
    "streams": "megatron/bridge/models/model_provider.py",
}
ELSEWHERE = {"bridge_import", "contiguous_scatter", "router_product", "expert_counts"}


def run_cases(script, *arguments: str, given: str = "") -> dict:
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def script(helpers_folder):
    return helpers_folder / "platform_cases.py"


@pytest.fixture(scope="module")
def cases(script, tiny_qwen2):
    return run_cases(script, str(tiny_qwen2))


@pytest.fixture(scope="module")
def without_stand_ins(script, cases):
    return run_cases(script, given=json.dumps(list(cases["flags"])))


@pytest.mark.parametrize("case", ["everything", "everything, distributed"])
def test_a_run_works_with_all_adaptations(cases, case):
    assert cases[case] == {"result": None}, cases[case].get("traceback")


def test_every_adaptation_has_a_test_that_shows_its_need():
    assert NEEDED_BY.keys() | ELSEWHERE == platform.ADAPTATIONS.keys()


@pytest.mark.parametrize("adaptation", NEEDED_BY)
def test_a_run_fails_without(cases, adaptation):
    assert cases[adaptation].get("raised_in") == NEEDED_BY[adaptation], cases[adaptation].get("traceback")


def test_megatron_bridge_cannot_be_imported_without_stand_ins(without_stand_ins):
    assert without_stand_ins["bridge"]["error"] == "ModuleNotFoundError: No module named 'transformer_engine'"


def test_stand_ins_never_make_megatron_core_believe_in_transformer_engine(cases, without_stand_ins):
    assert len(cases["flags"]) > 10
    assert cases["flags"] == without_stand_ins["flags"]


def test_importing_the_module_changes_nothing(cases, without_stand_ins):
    assert (cases["by_import"], without_stand_ins["by_import"], without_stand_ins["imported"]) == ([], [], [])


def test_enter_changes_nothing_where_there_is_cuda(cases):
    assert cases["cuda"] == {"result": {"device": "cuda:3", "chosen": ["cuda:3"], "changes": []}}


def test_the_second_call_of_enter_changes_nothing(cases):
    result = cases["twice"]["result"]
    some = {"torch.cuda.current_device", "torch.distributed.scatter", "torch.zeros", "Tensor.cuda"}
    assert some <= set(result["first"])
    assert (result["second"], result["devices"], result["threads"]) == ([], ["cpu", "cpu"], 1)


def test_cuda_means_the_cpu_and_a_block_that_names_a_device_still_does(cases):
    assert cases["tensors"]["result"] == {
        "asked": ["cpu", "cpu", "meta", "cpu"], "within": ["meta", "meta", "meta", "cpu"],
        "moved": True, "named": "torch.cuda.FloatTensor",
    }  # fmt: skip


def test_unknown_adaptations_are_an_error_that_names_the_known_ones(monkeypatch):
    monkeypatch.setattr(platform, "_entered", None)
    monkeypatch.setattr(platform.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"unknown adaptations \['stream'\], known are .*'streams'"):
        platform.enter(without=["stream"])
