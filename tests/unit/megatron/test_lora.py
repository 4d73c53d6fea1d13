"""Megatron-Bridge's LoRA against its equation, W x + alpha / rank * B A x, on the dense model of ``transformers``."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nemo_edo.config import LoRAConfig, MicroBatchConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import sft_loss
from nemo_edo.megatron import checkpoint
from nemo_edo.megatron.bridge import build_model
from nemo_edo.megatron.hf_export import export_adapter_folder, export_hf_folder
from nemo_edo.megatron.platform import device_and_groups

LORA = LoRAConfig(rank=4, alpha=6.0)
SCALE = 1.5


def randomized(policy):
    """With adapters that change the model a lot: B is 0 at the start."""
    generator = torch.Generator().manual_seed(1)
    policy.load([0.3 * torch.randn(part.shape, generator=generator) for part in policy.snapshot()])
    return policy


@pytest.fixture(scope="module", params=[("qwen2", True), ("llama", False)], ids=["tied", "llama"])
def model(request, tiny, tmp_path_factory) -> SimpleNamespace:
    model_type, tied = request.param
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("model"), model_type, tie_word_embeddings=tied)
    return SimpleNamespace(folder=folder, policy=randomized(tiny.build_policy(folder, lora=LORA)))


def test_logprobs_and_gradients_are_those_of_the_equation(model, tiny):
    batch = tiny.random_batch()
    adapters = {name: value.requires_grad_() for name, value in tiny.exported_adapters(model.policy).items()}
    dense = tiny.load_dense(model.folder)
    plain = tiny.dense_logprobs(dense, batch.tokens)[0] * batch.mask
    tiny.add_dense_adapters(dense, adapters, SCALE)
    expected = tiny.dense_logprobs(dense, batch.tokens)[0] * batch.mask
    assert (expected - plain).abs().max() > 1, "the check needs adapters that matter"
    found = tiny.logprobs(model.policy, batch, micro_batching=MicroBatchConfig(2), temperature=1.0)[0]
    torch.testing.assert_close(found * batch.mask, expected.detach(), rtol=0, atol=2e-5)

    sft_loss(expected, batch.mask).mean().backward()
    tiny.clear_gradients(model.policy)
    tiny.forward_backward(model.policy, batch, **tiny.sft_settings(batch))
    found = tiny.exported_gradients(model.policy)
    assert found.keys() == adapters.keys()
    for name, gradient in found.items():
        # Layers that are one to Megatron (q, k, v; gate, up) share their A, whose gradient is their sum.
        parts = [other for other in adapters if torch.equal(adapters[other], adapters[name])]
        of_parts = sum(adapters[part].grad for part in parts)
        assert of_parts.abs().max() > 1e-3
        torch.testing.assert_close(gradient, of_parts, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_peft_folder_has_the_merged_models_weights_over_the_base_that_it_names(model, tiny, tmp_path):
    export_hf_folder(model.policy.built, tmp_path / "base", merge_adapters=False)
    export_adapter_folder(model.policy.built, tmp_path, base=str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    weights = load_file(Path(settings["base_model_name_or_path"]) / "model.safetensors")
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7  # two factors, two layers, seven matrices
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert layer.rpartition(".")[2] in settings["target_modules"]
        product = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + settings["lora_alpha"] / settings["r"] * product
    for name, expected in tiny.exported(model.policy).items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("recompute", "targets"), [
    ({"recompute_granularity": "full"}, LORA.targets),
    ({"recompute_granularity": "selective"}, ["linear_fc1", "linear_fc2"]),
])
def test_recomputed_layers_train_their_adapters(tiny, tiny_qwen2, monkeypatch, recompute, targets):
    """Without Megatron-Bridge's remedy, which comes by chance: it knows models by their addresses."""
    batch, found = tiny.random_batch(), []
    for parallelism in (ParallelismConfig(), ParallelismConfig(**recompute)):
        policy = randomized(tiny.build_policy(tiny_qwen2, parallelism, lora=replace(LORA, targets=targets)))
        tiny.forward_backward(policy, batch, **tiny.sft_settings(batch))
        found.append(tiny.exported_gradients(policy))
        monkeypatch.setattr("megatron.bridge.peft.base.maybe_enable_recompute_inputs_grad", lambda model: None)
    kept, recomputed = found
    for name, gradient in recomputed.items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(gradient, kept[name], rtol=0, atol=1e-6)


def test_adapters_start_from_b_of_zero_and_a_of_the_seed_and_the_layer_alone(tiny, tiny_qwen2):
    def adapters_of(global_seed: int, seed: int) -> dict[str, torch.Tensor]:
        device = device_and_groups(ParallelismConfig(), seed=0, threads=1)
        torch.manual_seed(global_seed)
        built = build_model(tiny_qwen2, ParallelismConfig(), PrecisionConfig(), device, lora=LORA, seed=seed)
        return tiny.exported_adapters(SimpleNamespace(built=built, chunks=built.chunks))

    first, again, other = adapters_of(1, seed=3), adapters_of(2, seed=3), adapters_of(2, seed=4)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("B.weight"):
            assert not value.any()
        else:
            assert value.any() and not torch.equal(value, other[name])
    # 4 layers to Megatron in each of the model's two: those of q, k, v and of gate, up share one A.
    assert len({tuple(value.flatten().tolist()) for name, value in first.items() if name.endswith("A.weight")}) == 8


def test_a_checkpoint_with_other_adapters_is_an_error_that_names_both(tiny, tiny_qwen2, tmp_path):
    checkpoint.save(tiny.build_policy(tiny_qwen2, lora=LORA), tmp_path / "checkpoint")
    for other, named in (
        (None, "lora is {'rank': 4, .* there and None here"),
        (LoRAConfig(rank=4, alpha=3.0, targets=["linear_qkv"]), "'alpha': 6.0, .* there and .* 'alpha': 3.0, "),
    ):
        with pytest.raises(UserError, match=named):
            checkpoint.load(tiny.build_policy(tiny_qwen2, lora=other), tmp_path / "checkpoint")
