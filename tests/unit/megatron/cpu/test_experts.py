"""A mixture of experts, whose layers Megatron-core makes of other modules than a dense model's."""

import pytest
import torch
from helpers import tiny_models as tiny
from safetensors.torch import load_file

from nemo_edo.data.shares import MicroBatching

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


def logprobs(policy, batch):
    return tiny.logprobs(policy, batch, micro_batching=MicroBatching(2), temperature=1.0)


def test_logprobs_are_those_of_transformers(policy, folder, tiny):
    batch = tiny.random_batch()
    with torch.no_grad():
        expected = tiny.dense_logprobs(tiny.load_dense(folder), batch.tokens)
    for found, dense in zip(logprobs(policy, batch), expected, strict=True):
        torch.testing.assert_close(found * batch.mask, dense * batch.mask, rtol=0, atol=1e-4)


def test_exported_weights_are_the_loaded_ones_to_the_last_bit(policy, folder, tiny):
    found, expected = tiny.exported(policy), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_bridge_pairs_the_experts_of_two_processes_by_their_places(policy):
    """The second has experts 6 to 11: in the order of their names, 10 would come first."""
    from megatron.bridge.models.conversion import model_bridge

    def places(first: int) -> list[tuple[int, str]]:
        names = [f"decoder.layers.0.mlp.experts.local_experts.{first + place}.{layer}.weight"
                 for place in range(6) for layer in ("linear_fc1", "linear_fc2")]
        parts = [name.split(".") for name in sorted(names, key=model_bridge.extract_sort_key)]
        return [(int(part[-3]) - first, part[-2]) for part in parts]

    assert places(6) == places(0)


def test_the_router_adds_no_loss(policy):
    config = policy.chunks[0].config
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
