"""The pretended device refuses what CUDA refuses, and allows what CUDA allows."""

import pytest

REFUSED = ("same device", "expected device", "indices should be", "device type for generator", "No backend type",
           "convert cuda", "invalid device")  # fmt: skip
CASES = "rehearsal.device_cases"


@pytest.fixture(scope="module")
def answers(gpu) -> dict[str, str]:
    return gpu.run(f"{CASES}:answers")[0]


def test_operands_on_two_devices_are_refused(answers):
    refused = {name: said for name, said in answers.items() if name.startswith("refused: ")}
    assert len(refused) > 10
    for name, said in refused.items():
        assert "error" in said and any(part in said for part in REFUSED), (name, said)


def test_what_cuda_allows_of_cpu_tensors_is_allowed(answers):
    allowed = {name: said for name, said in answers.items() if name.startswith("allowed: ")}
    assert len(allowed) > 5
    assert set(allowed.values()) == {"done"}


def test_fresh_memory_is_garbage(gpu):
    assert gpu.run(f"{CASES}:fresh_memory")[0]


def test_a_copy_to_pinned_memory_arrives_with_the_synchronisation(gpu):
    before, after, of_plain_memory = gpu.run(f"{CASES}:late_copy")[0]
    assert before != after == of_plain_memory == [1.0, 2.0]


def test_numbers_and_gradients_are_the_cpus(gpu):
    assert gpu.run(f"{CASES}:same_numbers")[0]


def test_covariance_controls_select_the_same_tokens_on_every_device(gpu):
    assert gpu.run(f"{CASES}:selected")[0] == [(["cpu", "cuda"], True)] * 2


def test_a_kernel_of_triton_refuses_tensors_of_the_host(gpu):
    assert "cannot be accessed from Triton" in gpu.run(f"{CASES}:kernel_with_a_tensor_of_the_host")[0]
