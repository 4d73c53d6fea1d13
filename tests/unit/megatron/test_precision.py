"""What a precision needs of machine and model; and bf16 against fp32, by the error model of docs/scaling.md."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.data.shares import MicroBatching
from nemo_edo.errors import UserError
from nemo_edo.megatron.precision import DeviceSupport, check_dimensions, check_fp8_support, configure

H100 = (9, 0)


def fp8(recipe: str, **fields) -> PrecisionConfig:
    return PrecisionConfig(dtype="bf16", fp8="hybrid", fp8_recipe=recipe, **fields)


@pytest.mark.parametrize(("recipe", "machine", "message"), [
    ("mxfp8", DeviceSupport(H100, "13.0", "2.8"), r"10.0 or higher and below 12.0 .* 9.0; .* delayed"),
    ("tensorwise", DeviceSupport(H100, "13.0", "2.1.0"), r"Transformer Engine 2.2 .* 2.1.0"),
    ("blockwise", DeviceSupport(H100, "12.8", "2.8"), r"CUDA 12.9 .* 12.8"),
    ("tensorwise", DeviceSupport(None, None, None), r"set precision=bf16"),
])
def test_a_machine_that_lacks_something_is_an_error_that_says_what(recipe, machine, message):
    with pytest.raises(UserError, match=message):
        check_fp8_support(fp8(recipe), machine)


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
        tiny.logprobs(policy, batch, micro_batching=MicroBatching(16), temperature=1.0)[0]
        for policy in (tiny.build_policy(folder, dtype=dtype) for dtype in ("fp32", "bf16"))
    )
    with torch.no_grad():
        scale = tiny.load_dense(folder)(batch.tokens).logits[:, :-1].square().mean(-1).sqrt()
    error = ((half - full) / scale)[batch.mask.bool()].square().mean().sqrt()
    assert ROUNDOFF / 10 < error < 2 * ROUNDOFF * (2 * ROUNDINGS / 3) ** 0.5
