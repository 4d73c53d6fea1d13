"""bf16 against fp32, by the error model of docs/precision.md: no constant in here is fitted."""

import math

import pytest
import torch

from nemo_edo.megatron.forward_backward import MicroBatching

ROUNDOFF = 2.0**-8
"""Of bf16, whose significands have 8 bits: to nearest, a number moves by at most this share of itself."""
LAYERS = 2


def roundings(layers: int) -> int:
    """On the way from a token to its logit: 10 of an attention, 9 of an MLP, and 5 of embedding, last norm and output
    layer."""
    return 19 * layers + 5


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def errors(request, tiny, tmp_path_factory):
    """Of every response token's log-probability, over the root mean square of its row of logits."""
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("bf16"), request.param, num_hidden_layers=LAYERS)
    batch = tiny.random_batch(rows=16, length=24)
    full, half = (
        tiny.build_policy(folder, dtype=dtype).log_probs(batch, micro_batching=MicroBatching(16), temperature=1.0)[0]
        for dtype in ("fp32", "bf16")
    )
    with torch.no_grad():
        logits = tiny.load_dense(folder)(batch.tokens).logits[:, :-1]
    return ((half - full) / logits.square().mean(-1).sqrt())[batch.mask.bool()]


def test_bf16_moves_log_probs_no_more_than_independent_roundings_would(errors):
    """A uniform error has 1 / sqrt(3) of its bound as standard deviation; a log-probability is the difference of two
    logits, the token's and the mean one."""
    assert errors.square().mean().sqrt() < ROUNDOFF / math.sqrt(3) * math.sqrt(2 * roundings(LAYERS))


def test_no_log_prob_is_further_off_than_one_in_a_thousand_batches_would_be(errors):
    """Hoeffding's inequality for a sum of independent errors, over all tokens."""
    deviations = math.sqrt(2 * math.log(2 * len(errors) / 1e-3))
    assert errors.abs().max() < deviations * ROUNDOFF * math.sqrt(2 * roundings(LAYERS))


def test_bf16_is_what_was_measured(errors):
    """The rounding of the logits alone moves log-probabilities by more than this; fp32 does by a thousandth of it."""
    assert errors.square().mean().sqrt() > ROUNDOFF / 10
