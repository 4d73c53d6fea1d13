"""bf16 against fp32, by the error model of docs/scaling.md: no constant in here is fitted."""

import math
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.data.shares import MicroBatching

ROUNDOFF = 2.0**-8
"""Of bf16, whose significands have 8 bits: to nearest, a number moves by at most this share of itself."""
LAYERS = 2
OF_A_LAYER, AFTER_LAYERS = 19, 4
"""Roundings on the way from a token to its logit: 10 of an attention and 9 of an MLP; the last norm's weight and
result, the output layer's weight and result. One more is the embedding's."""


@torch.no_grad()
def gains(model, tokens) -> list[float]:
    """How much larger a relative error of each layer's input is among the last hidden states, in fp64. Errors are
    uniform and as large as bf16's roundings."""
    model, generator, found = model.double(), torch.Generator().manual_seed(0), []
    expected = model.model(tokens).last_hidden_state
    for layer in model.model.layers:
        moved = []

        def round_off(_, arguments, moved=moved):
            error = ROUNDOFF * (2 * torch.rand(arguments[0].shape, generator=generator, dtype=torch.float64) - 1)
            moved.append((arguments[0] * error).norm() / arguments[0].norm())
            return arguments[0] * (1 + error), *arguments[1:]

        hook = layer.register_forward_pre_hook(round_off)
        error = model.model(tokens).last_hidden_state - expected
        hook.remove()
        found.append(float(error.norm() / expected.norm() / moved[0]))
    return found


def roundings(found: list[float]) -> float:
    """The number of roundings, each times its squared gain: of a layer's, the gain before it or after it, whichever is
    larger."""
    after = [*found[1:], 1.0]
    layers = sum(max(gain, next_gain, 1.0) ** 2 for gain, next_gain in zip(found, after, strict=True))
    return OF_A_LAYER * layers + max(found[0], 1.0) ** 2 + AFTER_LAYERS


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def measured(request, tiny, tmp_path_factory) -> SimpleNamespace:
    """errors: of every response token's log-probability, divided by the root mean square of its row of logits."""
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("bf16"), request.param, num_hidden_layers=LAYERS)
    batch = tiny.random_batch(rows=16, length=24)
    full, half = (
        tiny.logprobs(policy, batch, micro_batching=MicroBatching(16), temperature=1.0)[0]
        for policy in (tiny.build_policy(folder, dtype=dtype) for dtype in ("fp32", "bf16"))
    )
    counted, model = batch.mask.bool(), tiny.load_dense(folder)
    with torch.no_grad():
        scale = model(batch.tokens).logits[:, :-1].square().mean(-1).sqrt()
    return SimpleNamespace(errors=((half - full) / scale)[counted], gains=gains(model, batch.tokens))


def test_bf16_moves_logprobs_no_more_than_independent_roundings_would(measured):
    """A uniform error has 1 / sqrt(3) of its bound as standard deviation; a log-probability is the difference of two
    logits, the token's and the mean one. The rounding of the logits alone moves it by more than the lower bound; fp32
    does by a thousandth of that."""
    bound = ROUNDOFF / math.sqrt(3) * math.sqrt(2 * roundings(measured.gains))
    assert ROUNDOFF / 10 < measured.errors.square().mean().sqrt() < bound
