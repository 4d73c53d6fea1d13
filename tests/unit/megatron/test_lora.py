"""Megatron-Bridge's LoRA against its equation, W x + alpha / rank * B A x, on the dense model of ``transformers``."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import checkpoint, lora
from nemo_edo.megatron.build import build_model, device_and_groups, export_hf_folder
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.megatron.splits import check_adapters
from nemo_edo.types import GenerationRequest, SamplingParams

LORA = LoRAConfig(rank=4, alpha=6.0)
SCALE = 1.5
OPTIMIZER = OptimizerConfig(lr=1e-2, adam_eps=1e-3, weight_decay=0.1, warmup_steps=2)
LOG_PROBS = {"micro_batching": MicroBatching(2), "temperature": 1.0}
MODELS = {"untied": ("qwen2", {}), "tied": ("qwen2", {"tie_word_embeddings": True}), "llama": ("llama", {})}


def sft(log_probs, entropies, micro):
    return {"sft": sft_loss(log_probs, micro.mask)}, {}


def settings(batch) -> dict:
    return {"loss_counts": {"sft": float(reduction_count(batch.mask, "token-mean"))}, **LOG_PROBS}


def train(policy, tiny, seeds) -> list[dict[str, float]]:
    batches = [tiny.random_batch(rows=3, seed=seed) for seed in seeds]
    return [policy.train_step(batch, sft, **settings(batch)) for batch in batches]


def randomized(policy):
    """With adapters that change the model a lot: B is 0 at the start."""
    generator = torch.Generator().manual_seed(1)
    policy.load([0.3 * torch.randn(part.shape, generator=generator) for part in policy.snapshot()])
    return policy


def log_probs(policy, batch) -> torch.Tensor:
    return policy.log_probs(batch, **LOG_PROBS)[0]


def dense_log_probs(tiny, model, batch) -> torch.Tensor:
    return tiny.dense_log_probs(model, batch.tokens)[0] * batch.mask


@pytest.fixture(scope="module", params=MODELS)
def model(request, tiny, tmp_path_factory) -> SimpleNamespace:
    model_type, fields = MODELS[request.param]
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("model"), model_type, **fields)
    return SimpleNamespace(folder=folder, policy=randomized(tiny.build_policy(folder, lora=LORA)))


@pytest.fixture
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2, lora=LORA)


# --- the equation -------------------------------------------------------------------------------------------------


def test_new_adapters_leave_every_log_probability_as_it_is(policy, tiny, tiny_qwen2):
    batch = tiny.random_batch()
    assert torch.equal(log_probs(policy, batch), log_probs(tiny.build_policy(tiny_qwen2), batch))


def test_log_probs_and_gradients_are_those_of_the_equation(model, tiny):
    batch = tiny.random_batch()
    adapters = {name: value.requires_grad_() for name, value in tiny.exported_adapters(model.policy).items()}
    dense = tiny.load_dense(model.folder)
    plain = dense_log_probs(tiny, dense, batch).detach()
    tiny.add_dense_adapters(dense, adapters, SCALE)
    expected = dense_log_probs(tiny, dense, batch)
    assert (expected - plain).abs().max() > 1, "the check needs adapters that matter"
    torch.testing.assert_close(log_probs(model.policy, batch) * batch.mask, expected.detach(), rtol=0, atol=2e-5)

    sft_loss(expected, batch.mask).mean().backward()
    for chunk in model.policy.chunks:
        chunk.zero_grad_buffer()
    model.policy.forward_backward(batch, sft, **settings(batch))
    found = tiny.exported_gradients(model.policy)
    assert found.keys() == adapters.keys()
    for name, gradient in found.items():
        # Layers that are one to Megatron (q, k, v; gate, up) share their A, whose gradient is their sum.
        parts = [other for other in adapters if torch.equal(adapters[other], adapters[name])]
        of_parts = sum(adapters[part].grad for part in parts)
        assert of_parts.abs().max() > 1e-3
        torch.testing.assert_close(gradient, of_parts, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_exported_weights_are_the_base_plus_alpha_over_rank_times_the_product(model, tiny):
    base, adapters = load_file(model.folder / "model.safetensors"), tiny.exported_adapters(model.policy)
    found = tiny.exported(model.policy)
    assert len(adapters) == 2 * 2 * 7  # two factors, two layers, seven matrices
    for name in base:
        expected = base[name]
        if (key := name.removesuffix(".weight")) + ".lora_A.weight" in adapters:
            expected = expected + SCALE * adapters[f"{key}.lora_B.weight"] @ adapters[f"{key}.lora_A.weight"]
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_transformers_gives_the_exported_folder_the_log_probabilities_of_the_policy(model, tiny, tmp_path):
    export_hf_folder(model.policy.built, tmp_path / "hf")
    batch = tiny.random_batch()
    expected = dense_log_probs(tiny, tiny.load_dense(tmp_path / "hf"), batch).detach()
    torch.testing.assert_close(log_probs(model.policy, batch) * batch.mask, expected, rtol=0, atol=2e-5)


def test_generation_uses_the_adapters(model, tiny, tmp_path):
    export_hf_folder(model.policy.built, tmp_path / "hf")
    requests = [GenerationRequest("p", index, (20 + index, 21), index) for index in range(4)]
    sampling = SamplingParams(1.0, 1.0, 12)
    found, expected, without = (
        tiny.build_engine(policy).generate(requests, sampling)
        for policy in (model.policy, tiny.build_policy(tmp_path / "hf"), tiny.build_policy(model.folder))
    )
    assert [r.response_ids for r in found] == [r.response_ids for r in expected]
    assert [r.response_ids for r in found] != [r.response_ids for r in without]


# --- what is trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_only_adapters_move_and_only_they_have_gradients_and_an_optimizer(
    tiny, tiny_qwen2, dtype, distributed_optimizer
):
    parallelism = ParallelismConfig(use_distributed_optimizer=distributed_optimizer)
    policy = tiny.build_policy(tiny_qwen2, parallelism, dtype, LORA)
    base, start = tiny.exported(policy, merged=False), policy.snapshot()
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(policy, tiny, range(4))
    after = tiny.exported(policy, merged=False)
    assert base.keys() == after.keys() == load_file(tiny_qwen2 / "model.safetensors").keys()
    assert [name for name in base if not torch.equal(base[name], after[name])] == []
    assert not any(torch.equal(old, new) for old, new in zip(start, policy.snapshot(), strict=True))

    # hidden 64, qkv 64 + 2 * 32, intermediate 96 (gate and up: 192); two layers
    trained = 2 * LORA.rank * ((64 + 128) + (64 + 64) + (64 + 192) + (96 + 64))
    (inner,) = policy.optimizer.chained_optimizers
    groups = inner.optimizer.param_groups
    # With the distributed optimizer the buffer of gradients is padded, the parameters are not.
    assert sum(p.numel() for group in groups for p in group["params"]) == trained
    assert sum(p.numel() for p in policy.snapshot()) == trained
    with_gradient = [p for chunk in policy.chunks for p in chunk.parameters() if hasattr(p, "main_grad")]
    assert sum(p.numel() for p in with_gradient) == trained


def test_only_target_layers_get_adapters(tiny, tiny_qwen2):
    targets = ["linear_proj", "linear_fc1"]
    policy = tiny.build_policy(tiny_qwen2, lora=LoRAConfig(rank=2, targets=targets))
    layers = {name.split(".")[-3] for name in tiny.exported_adapters(policy)}
    assert layers == {"o_proj", "gate_proj", "up_proj"}


def adapters_of(tiny, folder, seed: int) -> dict[str, torch.Tensor]:
    device = device_and_groups(ParallelismConfig(), seed=0, threads=1)
    built = build_model(folder, ParallelismConfig(), PrecisionConfig(), device, lora=LORA, seed=seed)
    return tiny.exported_adapters(SimpleNamespace(built=built, chunks=built.chunks))


def test_adapters_start_from_b_of_zero_and_a_of_the_seed_and_the_layer_alone(tiny, tiny_qwen2):
    torch.manual_seed(1)
    first = adapters_of(tiny, tiny_qwen2, seed=3)
    torch.manual_seed(2)
    again, other = (adapters_of(tiny, tiny_qwen2, seed) for seed in (3, 4))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("B.weight"):
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            expected = (2 / (value.shape[0] + value.shape[1])) ** 0.5  # Glorot and Bengio's
            assert float(value.std()) == pytest.approx(expected, rel=0.25)
    # 4 layers to Megatron in each of the model's two: those of q, k, v and of gate, up share one A.
    assert len({tuple(value.flatten().tolist()) for name, value in first.items() if name.endswith("A.weight")}) == 8


# --- frozen copies and merging ------------------------------------------------------------------------------------


def test_weights_of_a_snapshot_serve_for_a_block_and_the_own_return(policy, tiny):
    batch, start = tiny.random_batch(), policy.snapshot()
    before = log_probs(policy, batch)
    own = log_probs(randomized(policy), batch)
    with policy.weights(start):
        assert torch.equal(log_probs(policy, batch), before)
    assert torch.equal(log_probs(policy, batch), own)
    assert not torch.allclose(own, before, atol=0.1)


def test_merging_keeps_the_policy_and_starts_the_adapters_anew(policy, tiny, tiny_qwen2):
    batch, start = tiny.random_batch(), policy.snapshot()
    randomized(policy)
    weights, before = tiny.exported(policy), log_probs(policy, batch)
    policy.merge_adapters()
    torch.testing.assert_close(log_probs(policy, batch), before, rtol=0, atol=2e-5)
    assert all(map(torch.equal, policy.snapshot(), start))
    base = tiny.exported(policy, merged=False)
    for name, expected in weights.items():
        torch.testing.assert_close(base[name], expected, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_step_after_merging_in_bf16_starts_from_the_new_adapters(tiny, tiny_qwen2, distributed_optimizer):
    """Not from the optimizer's own fp32 copies of the merged ones."""
    parallelism = ParallelismConfig(use_distributed_optimizer=distributed_optimizer)
    policy = tiny.build_policy(tiny_qwen2, parallelism, "bf16", LORA)
    start = policy.snapshot()
    randomized(policy)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    policy.merge_adapters()
    train(policy, tiny, [0])
    for after, new in zip(policy.snapshot(), start, strict=True):
        assert (after.float() - new.float()).abs().max() < 0.03


def test_merging_without_lora_changes_nothing(tiny, tiny_qwen2):
    policy = tiny.build_policy(tiny_qwen2)
    start = policy.snapshot()
    policy.merge_adapters()
    assert all(map(torch.equal, policy.snapshot(), start))


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_loaded_policy_goes_on_as_the_saved_one_to_the_last_bit(
    tiny, tiny_qwen2, tmp_path, dtype, distributed_optimizer
):
    parallelism = ParallelismConfig(use_distributed_optimizer=distributed_optimizer)
    saved = tiny.build_policy(tiny_qwen2, parallelism, dtype, LORA)
    saved.merge_adapters()
    other = tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1), parallelism, dtype, LORA)
    for policy in (saved, other):
        policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(saved, tiny, [0, 1])
    checkpoint.save(saved, tmp_path / "checkpoint", with_optimizer=True)
    checkpoint.load(other, tmp_path / "checkpoint", with_optimizer=True)
    assert train(other, tiny, [2, 3]) == train(saved, tiny, [2, 3])
    for merged in (True, False):
        weights, expected = tiny.exported(other, merged=merged), tiny.exported(saved, merged=merged)
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_a_checkpoint_keeps_a_reference_of_adapters_to_the_last_bit(policy, tiny, tmp_path):
    reference = randomized(policy).snapshot()
    policy.load([torch.zeros_like(part) for part in reference])
    checkpoint.save(policy, tmp_path / "checkpoint", reference=reference)
    assert all(map(torch.equal, checkpoint.load_reference(policy, tmp_path / "checkpoint"), reference))


OTHERS = {
    "no adapters": None,
    "another rank": LoRAConfig(rank=2, alpha=6.0),
    "another alpha": LoRAConfig(rank=4, alpha=3.0),
    "other targets": LoRAConfig(rank=4, alpha=6.0, targets=["linear_qkv"]),
}


@pytest.mark.parametrize("there, here", [*((LORA, other) for other in OTHERS.values()), (None, LORA)])
def test_a_checkpoint_with_other_adapters_is_an_error_that_names_both(tiny, tiny_qwen2, tmp_path, there, here):
    checkpoint.save(tiny.build_policy(tiny_qwen2, lora=there), tmp_path / "checkpoint")
    policy = tiny.build_policy(tiny_qwen2, lora=here)
    with pytest.raises(UserError) as caught:
        checkpoint.load(policy, tmp_path / "checkpoint")
    assert f"lora is {lora.describe(there)!r} there and {lora.describe(here)!r} here" in str(caught.value)


def test_the_order_of_targets_does_not_make_a_checkpoint_another_one():
    one, other = (LoRAConfig(rank=2, targets=targets) for targets in (["linear_qkv", "linear_fc1"],
                                                                      ["linear_fc1", "linear_qkv"]))
    assert lora.describe(one) == lora.describe(other)


# --- what cannot be had -------------------------------------------------------------------------------------------


def test_targets_that_the_model_does_not_have_are_an_error_that_names_those_it_has(tiny, tiny_qwen2):
    config = LoRAConfig(rank=2, targets=["linear_qkv", "linear_fc2"])
    config.targets[0] = "linear_q_proj"  # of another kind of attention
    with pytest.raises(UserError, match="lora.targets linear_q_proj name no layer of this model.*it has linear_fc2$"):
        tiny.build_policy(tiny_qwen2, lora=config)


DENSE = {"num_moe_experts": None, "gated_linear_unit": True}


@pytest.mark.parametrize(
    "config, model, tensor_parallel, message",
    [
        (LoRAConfig(rank=3), DENSE, 2, r"lora.rank 3 is not a multiple of .*tensor_model_parallel_size 2"),
        (LoRAConfig(rank=2), {**DENSE, "num_moe_experts": 8}, 1, "'linear_fc1', 'linear_fc2'.* are experts"),
        (LoRAConfig(rank=2), {**DENSE, "gated_linear_unit": False}, 2, "linear_fc1 needs .*parallel_size 1"),
    ],
)
def test_adapters_that_cannot_be_split_are_an_error_before_the_model_is_built(config, model, tensor_parallel, message):
    with pytest.raises(UserError, match=message):
        check_adapters(config, SimpleNamespace(**model), tensor_parallel)


@pytest.mark.parametrize(
    "config, model, tensor_parallel",
    [
        (LoRAConfig(rank=4), DENSE, 2),
        (LoRAConfig(rank=2, targets=["linear_qkv"]), {**DENSE, "num_moe_experts": 8}, 2),
        (LoRAConfig(rank=3), {**DENSE, "gated_linear_unit": False}, 1),
    ],
)
def test_adapters_that_can_be_split_are_let_pass(config, model, tensor_parallel):
    check_adapters(config, SimpleNamespace(**model), tensor_parallel)
