"""What a machine with CUDA shows: Megatron as NVIDIA means it, over NCCL, with nothing adapted. What steps compute,
in each precision and attention, and checkpoints are the selftest's (test_selftest_checks.py).

Needs a CUDA device, Transformer Engine and Megatron-Bridge, as the container has them. Written on a machine without
CUDA, where it is skipped: until it has been run on one, take its tolerances as estimates.
"""

from pathlib import Path

import pytest
import torch
from helpers import tiny_models as tiny

from nemo_edo.config import ParallelismConfig
from nemo_edo.megatron import platform

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Heads of 64, which flash attention has kernels for."""
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"), hidden_size=256, head_dim=64, initializer_range=0.08)


@pytest.fixture(scope="module")
def policy(folder):
    return tiny.build_policy(folder, ParallelismConfig(use_distributed_optimizer=True), dtype="bf16")


def state_of_torch() -> dict[str, int]:
    """What the adaptations to a CPU would change, by identity."""
    named = {f"cuda.{name}": value for name, value in vars(torch.cuda).items() if callable(value)}
    named |= {name: getattr(torch, name) for name in ("empty", "tensor", "zeros")}
    return {name: id(value) for name, value in {**named, "to": torch.Tensor.cuda, "type": torch.Tensor.type}.items()}


def test_enter_returns_the_ranks_gpu_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(platform, "_entered", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = state_of_torch()
    assert platform.enter() == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0
    assert state_of_torch() == before


def test_the_model_is_on_the_gpu_with_nccl_and_transformer_engines_layers(policy):
    assert {str(parameter.device) for chunk in policy.chunks for parameter in chunk.parameters()} == {"cuda:0"}
    assert torch.distributed.get_backend() == "nccl"
    modules = {type(module).__module__.split(".")[0] for chunk in policy.chunks for module in chunk.modules()}
    assert "transformer_engine" in modules
