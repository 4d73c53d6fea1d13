"""bf16 against fp32, by the error model of docs/scaling.md."""

import pytest
import torch

from nemo_edo.data.shares import MicroBatching

ROUNDOFF = 2.0**-8
"""Of bf16, whose significands have 8 bits: to nearest, a number moves by at most this share of itself."""
ROUNDINGS = 2 * 19 + 5
"""On the way from a token to its logit: 10 of each attention and 9 of each MLP, the embedding's, the last norm's weight
and result, the output layer's weight and result."""


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
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
