"""What a machine with CUDA shows: Megatron as NVIDIA means it, over NCCL, with nothing adapted.

Needs a CUDA device, Transformer Engine and Megatron-Bridge, as the container has them. Written on a machine without
CUDA, where it is skipped: until it has been run on one, take its tolerances as estimates.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import OptimizerConfig, ParallelismConfig
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import platform
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.types import GenerationRequest, SamplingParams

HELPERS = Path(__file__).parents[1] / "helpers"
BF16 = 0.15
"""How far apart two implementations' bf16 log-probabilities of a tiny model with peaked logits may be."""


@pytest.fixture(scope="module")
def tiny():
    return SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py")))


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """Heads of 64, which flash attention has kernels for."""
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"), hidden_size=256, head_dim=64, initializer_range=0.08)


@pytest.fixture(scope="module")
def policy(tiny, folder):
    return tiny.build_policy(folder, ParallelismConfig(use_distributed_optimizer=True), dtype="bf16")


@pytest.fixture(scope="module")
def dense(tiny, folder):
    return tiny.load_dense(folder, torch.bfloat16).cuda()


def train(policy, tiny, seeds) -> list[float]:
    losses = []
    for seed in seeds:
        batch = tiny.random_batch(seed=seed)
        metrics = policy.train_step(
            batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
            loss_counts={"sft": float(reduction_count(batch.mask, "token-mean"))},
            micro_batching=MicroBatching(2), temperature=1.0,
        )
        losses.append(metrics["loss"])
    return losses


def test_enter_returns_the_ranks_gpu_and_changes_nothing(monkeypatch):
    state_of_torch = runpy.run_path(str(HELPERS / "platform_cases.py"))["state_of_torch"]
    monkeypatch.setattr(platform, "_entered", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = state_of_torch()
    assert platform.enter() == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0
    assert state_of_torch() == before


def test_the_model_is_on_the_gpu_and_its_group_is_nccl(policy):
    assert {str(parameter.device) for chunk in policy.chunks for parameter in chunk.parameters()} == {"cuda:0"}
    assert torch.distributed.get_backend() == "nccl"


def test_layers_are_those_of_transformer_engine(policy):
    modules = {type(module).__module__.split(".")[0] for chunk in policy.chunks for module in chunk.modules()}
    assert "transformer_engine" in modules


def test_log_probs_are_near_those_of_transformers(policy, tiny, dense):
    batch = tiny.random_batch()
    log_probs, entropies = policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=0.7)
    with torch.no_grad():
        expected = tiny.dense_log_probs(dense, batch.tokens.cuda(), 0.7)
    torch.testing.assert_close(log_probs, expected[0].cpu(), rtol=0, atol=BF16)
    torch.testing.assert_close(entropies, expected[1].cpu(), rtol=0, atol=BF16)


def test_generated_log_probs_are_near_those_of_a_full_forward_pass(policy, tiny, dense):
    engine = tiny.build_engine(policy)
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42)]
    requests = [GenerationRequest(str(i), 0, prompt, seed=i) for i, prompt in enumerate(prompts)]
    for rollout in engine.generate(requests, SamplingParams(1.0, 1.0, 12)):
        tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids]).cuda()
        with torch.no_grad():
            expected = tiny.dense_log_probs(dense, tokens)[0][0, len(rollout.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(rollout.response_logprobs), expected.cpu(), rtol=0, atol=BF16)


def test_training_steps_lower_the_loss(policy, tiny):
    start = policy.snapshot()
    policy.reset_optimizer(OptimizerConfig(lr=2e-3), total_steps=15)
    losses = train(policy, tiny, [0] * 15)
    policy.load(start)
    assert losses[-1] < 0.7 * losses[0]


def test_a_reloaded_policy_and_optimizer_go_on_as_the_saved_one(policy, tiny, folder, tmp_path):
    from nemo_edo.megatron import checkpoint

    policy.reset_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=2), total_steps=8)
    train(policy, tiny, [0, 1])
    checkpoint.save(policy, tmp_path / "checkpoint", with_optimizer=True)
    loaded = tiny.build_policy(folder, ParallelismConfig(use_distributed_optimizer=True), dtype="bf16")
    loaded.reset_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=2), total_steps=8)
    checkpoint.load(loaded, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, loaded.snapshot(), policy.snapshot()))
    assert train(loaded, tiny, [2, 3]) == pytest.approx(train(policy, tiny, [2, 3]), rel=1e-3)


def test_shared_prompts_have_the_gradients_of_rows_with_torchs_attention(tiny, folder):
    policy = tiny.build_policy(folder, dtype="fp32", attention="sdpa")
    policy.reset_optimizer(OptimizerConfig(), total_steps=1)
    batch = tiny.with_shared_prompts(tiny.random_batch(rows=6), {1: 0, 4: 3, 5: 3})
    found = []
    for cut in (MicroBatching(2), MicroBatching(1, 600, packing=True, share_prompts=True)):
        policy.zero_grad()
        policy.forward_backward(
            batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
            loss_counts={"sft": float(reduction_count(batch.mask, "token-mean"))}, micro_batching=cut, temperature=1.0,
        )
        found.append({name: gradient.cpu() for name, gradient in tiny.exported_gradients(policy).items()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=1e-3 * float(expected.abs().max()), msg=name)
