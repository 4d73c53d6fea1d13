"""What a machine with CUDA shows: Megatron as NVIDIA means it, over NCCL, with nothing adapted.

Needs a CUDA device, Transformer Engine and Megatron-Bridge, as the container has them. Written on a machine without
CUDA, where it is skipped: until it has been run on one, take its tolerances as estimates.
"""

from pathlib import Path

import pytest
import torch
from helpers import tiny_models as tiny
from helpers.platform_cases import state_of_torch

from nemo_edo.config import OptimizerConfig, ParallelismConfig
from nemo_edo.megatron import platform
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu
BF16 = 0.15
"""How far apart two implementations' bf16 log-probabilities of a tiny model with peaked logits may be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Heads of 64, which flash attention has kernels for."""
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"), hidden_size=256, head_dim=64, initializer_range=0.08)


@pytest.fixture(scope="module")
def policy(folder):
    return tiny.build_policy(folder, ParallelismConfig(use_distributed_optimizer=True), dtype="bf16")


@pytest.fixture(scope="module")
def dense(folder):
    return tiny.load_dense(folder, torch.bfloat16).cuda()


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


def test_logprobs_are_near_those_of_transformers(policy, dense):
    batch = tiny.random_batch()
    logprobs, entropies = policy.logprobs(batch, micro_batching=MicroBatching(2), temperature=0.7)
    with torch.no_grad():
        expected = tiny.dense_logprobs(dense, batch.tokens.cuda(), 0.7)
    counts = batch.mask.bool()  # they are zero after a response
    for found, dense_values in zip((logprobs, entropies), expected, strict=True):
        torch.testing.assert_close(found.cpu()[counts], dense_values.cpu()[counts], rtol=0, atol=BF16)


def test_generated_logprobs_are_near_those_of_a_full_forward_pass(policy, dense):
    engine = tiny.build_engine(policy)
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42)]
    requests = [GenerationRequest(str(i), 0, prompt, seed=i) for i, prompt in enumerate(prompts)]
    for rollout in engine.generate(requests, SamplingParams(1.0, 1.0, 12)):
        tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids]).cuda()
        with torch.no_grad():
            expected = tiny.dense_logprobs(dense, tokens)[0][0, len(rollout.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(rollout.response_logprobs), expected.cpu(), rtol=0, atol=BF16)


def test_training_steps_lower_the_loss(policy):
    start = policy.snapshot()
    policy.reset_optimizer(OptimizerConfig(lr=2e-3), total_steps=15)
    losses = [metrics["loss"] for metrics in tiny.train_sft(policy, [0] * 15)]
    policy.load(start)
    assert losses[-1] < 0.7 * losses[0]


def test_a_reloaded_policy_and_optimizer_resume_as_the_saved_one_continues(policy, folder, tmp_path):
    from nemo_edo.megatron import checkpoint

    loaded = tiny.build_policy(folder, ParallelismConfig(use_distributed_optimizer=True), dtype="bf16")
    for each in (policy, loaded):
        each.reset_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=2), total_steps=8)
    tiny.train_sft(policy, [0, 1])
    checkpoint.save(policy, tmp_path / "checkpoint", with_optimizer=True)
    checkpoint.load(loaded, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, loaded.snapshot(), policy.snapshot()))
    for found, expected in zip(tiny.train_sft(loaded, [2, 3]), tiny.train_sft(policy, [2, 3]), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_shared_prompts_have_the_gradients_of_rows_with_torchs_attention(folder):
    policy = tiny.build_policy(folder, dtype="fp32", attention="sdpa")
    policy.reset_optimizer(OptimizerConfig(), total_steps=1)
    batch = tiny.with_shared_prompts(tiny.random_batch(rows=6), {1: 0, 4: 3, 5: 3})
    found = []
    for cut in (MicroBatching(2), MicroBatching(1, 600, packing=True, share_prompts=True)):
        policy.zero_grad()
        policy.forward_backward(batch, **{**tiny.sft_settings(batch), "micro_batching": cut})
        found.append({name: gradient.cpu() for name, gradient in tiny.exported_gradients(policy).items()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=1e-3 * float(expected.abs().max()), msg=name)
