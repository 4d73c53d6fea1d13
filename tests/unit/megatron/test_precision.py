"""What a precision needs of machine and model; and bf16 against fp32, by the error model of docs/scaling.md."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from packaging.version import Version

from nemo_edo.config import MicroBatchConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.precision import SUPPORT, check_dimensions, check_fp8_support, configure, warn_of_emulated_bf16


def fp8(recipe: str, **fields) -> PrecisionConfig:
    return PrecisionConfig(dtype="bf16", fp8="hybrid", fp8_recipe=recipe, **fields)


def test_a_recipe_that_transformer_engine_does_not_allow_is_an_error_that_says_why_and_which_it_does(monkeypatch):
    """Its answers on an H100 with CUDA 12.8; its own are asked for in the rehearsal."""
    answers = dict.fromkeys(SUPPORT.values(), lambda: (False, "needs CUDA 12.9."))
    answers["is_fp8_available"] = lambda: (True, "")
    engine = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(**answers))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", engine)
    check_fp8_support(fp8("tensorwise"), Version("2.16"))
    with pytest.raises(UserError, match=r"fp8_recipe blockwise: needs CUDA 12\.9\. .* can do delayed, tensorwise"):
        check_fp8_support(fp8("blockwise"), Version("2.16"))
    for version in (None, Version("0.0.0")):
        with pytest.raises(UserError, match="set precision=bf16"):
            check_fp8_support(fp8("tensorwise"), version)


QWEN_05B = SimpleNamespace(
    hidden_size=896, num_attention_heads=14, num_query_groups=2, kv_channels=64, ffn_hidden_size=4864,
    num_moe_experts=None,
)


def test_dimensions_are_those_of_one_tensor_parallel_rank():
    check_dimensions(fp8("tensorwise"), QWEN_05B, ParallelismConfig(2))
    with pytest.raises(UserError, match="queries, keys and values 72, attention output 56:"):
        check_dimensions(fp8("tensorwise"), QWEN_05B, ParallelismConfig(16))
    with pytest.raises(UserError, match="hidden size that is a multiple of 128, the model's is 848"):
        model = SimpleNamespace(**{**vars(QWEN_05B), "hidden_size": 848})
        check_dimensions(fp8("blockwise"), model, ParallelismConfig(2, sequence_parallel=True))


@pytest.mark.parametrize("precision", [fp8("delayed", fp8_margin=1), fp8("tensorwise", bf16_layers_at_start=1)])
def test_megatrons_config_takes_what_is_set(precision):
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
    configure(config, precision)
    config.__post_init__()  # Megatron's own checks
    assert (config.fp8, config.fp8_recipe, config.fp8_margin) == ("hybrid", precision.fp8_recipe, precision.fp8_margin)
    assert config.first_last_layers_bf16 == (precision.bf16_layers_at_start > 0)
    assert config.num_layers_at_start_in_bf16 == precision.bf16_layers_at_start
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16


ROUNDOFF = 2.0**-8
"""Of bf16, whose significands have 8 bits: to nearest, a number moves by at most this share of itself."""
ROUNDINGS = 2 * 19 + 5
"""On the way from a token to its logit: 10 of each attention and 9 of each MLP, the embedding's, the last norm's weight
and result, the output layer's weight and result."""


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_bf16_moves_logprobs_no_more_than_independent_roundings_would(tiny, tmp_path, model_type):
    """Relative to the root mean square of a token's logits. A uniform error has 1 / sqrt(3) of its bound as standard
    deviation, a log-probability is the difference of two logits, and a layer makes errors up to twice as large. The
    rounding of the logits alone moves it by more than the lower bound; fp32 does by a thousandth of that."""
    folder = tiny.write_tiny_model(tmp_path, model_type, num_hidden_layers=2)
    batch = tiny.random_batch(rows=16, length=24)
    full, half = (
        tiny.logprobs(policy, batch, micro_batching=MicroBatchConfig(16), temperature=1.0)[0]
        for policy in (tiny.build_policy(folder, dtype=dtype) for dtype in ("fp32", "bf16"))
    )
    with torch.no_grad():
        scale = tiny.load_dense(folder)(batch.tokens).logits[:, :-1].square().mean(-1).sqrt()
    error = ((half - full) / scale)[batch.mask.bool()].square().mean().sqrt()
    assert ROUNDOFF / 10 < error < 2 * ROUNDOFF * (2 * ROUNDINGS / 3) ** 0.5


def test_bf16_on_a_cpu_without_instructions_for_it_is_warned_of(monkeypatch):
    supported = True
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulated_bf16(PrecisionConfig(dtype="bf16"))
        supported = False
        warn_of_emulated_bf16(PrecisionConfig(dtype="fp32"))
    with pytest.warns(UserWarning, match="set precision=fp32"):
        warn_of_emulated_bf16(PrecisionConfig(dtype="bf16"))
