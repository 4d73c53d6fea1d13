"""What sets the model families apart survives the way from transformers through Bridge: logits equal to 1e-5."""

import pytest
import torch
from helpers import split_cases
from helpers.tiny_models import write_tiny_model

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron import platform
from nemo_edo.megatron.bridge import check_model_folder

ORIGINAL = 8192
"""Positions of Llama 3's context before its scaling."""
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL}
LLAMA = {"rope_theta": 500000.0, "num_hidden_layers": 1, "max_position_embeddings": 131072}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "head_dim": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-2}  # which latent norms do not have
WINDOWS = {"query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
FAMILIES = {
    "qwen2.5, biases": ("qwen2", {}, 48),
    "qwen3, separate head size, tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, 48),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}, 48),
    **{f"experts of {kind}": (kind, fields, 48) for kind, fields in {
        "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        "glm4_moe": EXPERTS, "deepseek_v3": {**EXPERTS, **LATENT},
    }.items()},
    "deepseek 3, groups of experts": (
        "deepseek_v3", {**EXPERTS, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4,
                        "topk_group": 2}, 48),
    "gemma": ("gemma", {"tie_word_embeddings": True}, 48),
    "gemma 2, capped scores, windows, norms after": ("gemma2", WINDOWS, 48),
    "gemma 3, two rotary bases": (
        "gemma3_text", {**WINDOWS, "num_hidden_layers": 6,
                        "layer_types": 5 * ["sliding_attention"] + ["full_attention"]}, 48),
    "exaone 4, norms after alone": ("exaone4", {"tie_word_embeddings": True}, 48),
    "exaone 4 of one kind of layer, scaled positions": (
        "exaone4", {**LLAMA, "tie_word_embeddings": True, "sliding_window": None, "layer_types": ["full_attention"],
                    "rope_scaling": {**SCALED, "factor": 16.0}}, ORIGINAL + 32),
    "nemotron, norms around 1 with biases": ("nemotron", {}, 48),
    "llama 3.2, scaled positions, tied": (
        "llama", {**LLAMA, "rope_scaling": {**SCALED, "factor": 32.0}, "tie_word_embeddings": True}, ORIGINAL + 32),
}


@torch.no_grad()
def dense_logits(folder, tokens, *, scaled: bool = True):
    """Without scaled: of the same weights under positions as they are."""
    from transformers import AutoModelForCausalLM

    # torch's own attention leaves out Gemma 2's caps; the eager one would take gigabytes for the longest texts.
    attention = "eager" if tokens.shape[1] < ORIGINAL else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    if not scaled:
        base = model.config.rope_parameters["rope_theta"]
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": base}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model(tokens).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_to_one_in_a_hundred_thousand(tiny, tmp_path, family):
    model_type, fields, length = FAMILIES[family]
    # Weights of a usual spread: with tiny_models' own, logits of several units round at 1e-5 already.
    folder = tiny.write_tiny_model(tmp_path, model_type, **{"initializer_range": 0.06, **fields})
    tokens = torch.randint(2, 120, (1, length), generator=torch.Generator().manual_seed(0))
    policy = tiny.build_policy(folder)
    (chunk,) = policy.chunks
    with torch.no_grad():
        logits = chunk(tokens, torch.arange(length)[None], None)[..., : policy.built.vocab_size]
    torch.testing.assert_close(logits, dense_logits(folder, tokens), rtol=0, atol=1e-5)
    if length > ORIGINAL:
        unscaled = dense_logits(folder, tokens, scaled=False)
        assert (unscaled - logits)[:, ORIGINAL:].abs().max() > 1e-3, "positions beyond the context do not show"


def test_padding_has_no_gradient_where_a_familys_recipe_has_losses_of_the_router(tiny, tmp_path):
    """A z-loss of EXAONE MoE's, for example, is a mean over a micro-batch with its padding, whose token has zeros for
    an embedding and therefore the largest gradient of all."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    folder = write_tiny_model(tmp_path / "m", "exaone_moe", **fields)
    embeddings = split_cases.measure(folder, {})["gradients"]["model.embed_tokens.weight"]
    assert embeddings[0].abs().max() == 0 < embeddings.abs().max()


def test_windows_that_ranks_cannot_share_are_found_with_the_folder(tiny, tmp_path):
    platform.enter(1)  # Bridge is imported after it
    model_type, fields, _ = FAMILIES["gemma 3, two rotary bases"]
    folder = tiny.write_tiny_model(tmp_path, model_type, **fields)
    check_model_folder(folder)
    with pytest.raises(UserError, match="context_parallel_size 2: .*sliding windows"):
        check_model_folder(folder, ParallelismConfig(context_parallel_size=2))
