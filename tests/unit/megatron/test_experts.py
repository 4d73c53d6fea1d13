"""A mixture of experts, whose layers Megatron-core makes of other modules than a dense model's."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from nemo_edo.megatron.forward_backward import MicroBatching

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return tiny.write_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def policy(tiny, folder):
    return tiny.build_policy(folder)


def log_probs(policy, batch):
    return policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)


def test_log_probs_are_those_of_transformers(policy, folder, tiny):
    batch = tiny.random_batch()
    with torch.no_grad():
        expected = tiny.dense_log_probs(tiny.load_dense(folder), batch.tokens)
    for found, dense in zip(log_probs(policy, batch), expected, strict=True):
        torch.testing.assert_close(found * batch.mask, dense * batch.mask, rtol=0, atol=1e-4)


def test_the_router_adds_no_loss_of_its_own(policy):
    config = policy.chunks[0].config
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)


def test_without_its_adaptation_the_router_fails(policy, tiny, monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    with pytest.raises(NameError, match="te_general_gemm"):
        log_probs(policy, tiny.random_batch())
