"""Routing replay: the experts that the sampler chose are those of the trainer's passes."""

import numpy as np
import pytest
import torch

from nemo_edo.config import MicroBatchConfig, ParallelismConfig
from nemo_edo.data.batching import build_batch, place_experts
from nemo_edo.types import GenerationRequest, SamplingParams

LAYERS, EXPERTS, K = 2, 4, 2
LAYOUTS = {
    "padded rows": MicroBatchConfig(3),
    "packed": MicroBatchConfig(3, micro_batch_tokens=40, packing=True),
    "packed, prompts shared": MicroBatchConfig(3, micro_batch_tokens=40, packing=True, share_prompts=True),
}


@pytest.fixture
def folder(tiny, tmp_path):
    return tiny.write_tiny_model(
        tmp_path, "qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=K, moe_intermediate_size=48,
        initializer_range=0.06)


def sampled(policy, tiny, **settings) -> list:
    """Two responses to each of three prompts of different lengths."""
    engine = tiny.build_engine(policy, stop_ids=range(1, 12), keeps_experts=True, **settings)
    prompts = [tuple(range(20, 20 + length)) for length in (5, 2, 9)]
    requests = [GenerationRequest(f"{n // 2}", n % 2, prompts[n // 2], seed=n) for n in range(6)]
    return engine.generate(requests, SamplingParams(1.0, 1.0, 12))


def batch_of(rollouts):
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
    batch = build_batch(sequences, pad_id=0, sampler_logprobs=[rollout.response_logprobs for rollout in rollouts])
    experts = place_experts([rollout.routed_experts for rollout in rollouts], sequences, batch.tokens.shape[1])
    return batch.with_fields(routed_experts=experts)


def logprobs(policy, tiny, batch, how=LAYOUTS["padded rows"]):
    return tiny.logprobs(policy, batch, micro_batching=how, temperature=1.0)[0]


def perturb_routers(policy) -> None:
    """As if the weights had moved since they sampled: many tokens' experts change."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.chunks[0].named_parameters():
        if "router" in name:
            weight.data.copy_(torch.randn(weight.shape, generator=generator))


def dense_replayed(folder, policy, batch):
    """transformers' log-probabilities with the policy's routers, and the gates' indices replaced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    routers = [weight for name, weight in policy.chunks[0].named_parameters() if "router" in name]
    experts = batch.routed_experts.unflatten(-1, (LAYERS, K)).long()
    experts = torch.cat([experts, experts[:, :1]], dim=1)  # of the last token, whose output is not read
    padding = experts[..., :1] == experts[..., 1:]
    experts = torch.where(padding, torch.arange(K), experts)

    for layer, (block, weight) in enumerate(zip(model.model.layers, routers, strict=True)):
        block.mlp.gate.weight.data.copy_(weight)

        def replayed(gate, inputs, outputs, layer=layer):
            logits = inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.T
            chosen = experts[:, :, layer].reshape(-1, K)
            scores = logits.softmax(-1).gather(1, chosen)
            return outputs[0], scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores, chosen

        block.mlp.gate.register_forward_hook(replayed)
    with torch.no_grad():
        log_p = model(batch.tokens).logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1) * batch.mask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_passes_are_those_of_transformers_with_the_samplers_experts(folder, tiny, layout):
    policy = tiny.build_policy(folder)
    batch = batch_of(sampled(policy, tiny))
    perturb_routers(policy)
    found = logprobs(policy, tiny, batch, LAYOUTS[layout])
    torch.testing.assert_close(found, dense_replayed(folder, policy, batch), rtol=0, atol=1e-5)
    free = logprobs(policy, tiny, batch.with_fields(routed_experts=None), LAYOUTS[layout])
    assert (found - free).abs().max() > 0.01, "the routers would have chosen the same experts"


@pytest.mark.parametrize(("rows", "attention"), [(2, "auto"), (64, "local")])
def test_the_engine_keeps_what_the_routers_of_a_whole_pass_choose(folder, tiny, rows, attention):
    """However the prompts are read and rows refilled: a pass of the same weights chooses the same experts."""
    from nemo_edo.generation.sampling import through_stages
    from nemo_edo.megatron.decoding_cache import CacheContext
    from nemo_edo.megatron.routing import recorded, recording

    policy = tiny.build_policy(folder, attention=attention)
    for rollout in sampled(policy, tiny, max_batch_size=rows):
        tokens = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids][:-1]])
        with torch.no_grad(), recording(policy.chunks):
            context = CacheContext(*tokens.shape, by_head=False)
            through_stages(policy.chunks, tokens, torch.arange(tokens.shape[1])[None], context)
            expected = recorded(policy.chunks, tokens)[0].view(-1, LAYERS, K).sort(-1).values
        kept = torch.tensor(np.frombuffer(rollout.routed_experts, np.int16)).view(-1, LAYERS, K).sort(-1).values
        assert torch.equal(kept, expected)


def test_experts_of_all_layers_as_vllm_returns_them_are_replayed_as_those_of_the_layers_that_have_some(tiny, tmp_path):
    folder = tiny.write_tiny_model(
        tmp_path, "glm4_moe", n_routed_experts=EXPERTS, num_experts_per_tok=K, moe_intermediate_size=48, n_group=1,
        topk_group=1, first_k_dense_replace=1, num_hidden_layers=3, num_key_value_heads=4)
    policy = tiny.build_policy(folder)
    batch = batch_of(sampled(policy, tiny))
    perturb_routers(policy)
    every = torch.cat([torch.zeros_like(batch.routed_experts[..., :K]), batch.routed_experts], dim=-1)
    expected, found, free = (
        logprobs(policy, tiny, batch.with_fields(routed_experts=one)) for one in (batch.routed_experts, every, None))
    assert torch.equal(found, expected) and not torch.equal(free, expected)


def test_gradients_with_recomputed_layers_are_those_without(folder, tiny):
    batch = batch_of(sampled(tiny.build_policy(folder), tiny))

    def gradients(**recomputation):
        policy = tiny.build_policy(folder, ParallelismConfig(**recomputation))
        perturb_routers(policy)
        tiny.forward_backward(policy, batch, **tiny.sft_settings(batch))
        return {name: weight.main_grad.clone() for name, weight in policy.chunks[0].named_parameters()}

    plain = gradients()
    recomputed = gradients(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-7)
    assert any(gradient.abs().max() > 0 for name, gradient in plain.items() if "router" in name)
