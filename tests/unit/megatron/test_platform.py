"""A machine without CUDA is adapted: what asks for CUDA gets the CPU."""

import pytest
import torch

from nemo_edo.megatron import platform


@pytest.mark.parametrize(("visible", "chosen"), [(8, 3), (4, 3), (1, 0)])  # 1: as where Slurm shows a task its own
def test_a_nodes_fourth_process_takes_its_gpu(monkeypatch, visible, chosen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert platform.local_gpu(3) == torch.device("cuda", chosen)


def test_cuda_means_the_cpu_and_a_block_that_names_a_device_still_does():
    assert platform.enter(1) == torch.device("cpu")
    plain = torch.ones(2)
    asked = [torch.zeros(2, device="cuda"), torch.tensor(2.0, device="cuda:0"), torch.empty(2, device="meta"), plain]
    assert [one.device.type for one in asked] == ["cpu", "cpu", "meta", "cpu"]
    with torch.device("meta"):
        within = [torch.zeros(2), torch.tensor(2.0), torch.empty_like(torch.ones(2)), torch.ones(2, device="cpu")]
    assert [one.device.type for one in within] == ["meta", "meta", "meta", "cpu"]
    assert plain.cuda() is plain and plain.type() == "torch.cuda.FloatTensor"
