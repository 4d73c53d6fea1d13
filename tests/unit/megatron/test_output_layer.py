"""The fused head in a Megatron model, against plain autograd through the same weights in ``transformers``."""

from types import SimpleNamespace

import pytest
import torch
from helpers.split_cases import loss
from megatron.core.utils import unwrap_model

from nemo_edo.config import MicroBatchConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.megatron import output_layer
from nemo_edo.megatron.policy import MegatronPolicy
from nemo_edo.parallel import logprobs

CUT = {"micro_batching": MicroBatchConfig(2), "temperature": 0.7}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of the tiny vocabulary."""
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(logprobs, "MIN_COLUMNS", 50)


def with_head(policy, kind: str, dtype: str = "fp32") -> MegatronPolicy:
    """The same weights with another head."""
    return MegatronPolicy(policy.built, ParallelismConfig(), PrecisionConfig(dtype), policy.device, kind)


def one_pass(policy, batch, tiny) -> SimpleNamespace:
    tiny.clear_gradients(policy)
    metrics = tiny.forward_backward(policy, batch, loss, loss_counts={"loss": float(batch.mask.sum())}, **CUT)
    values = tiny.logprobs(policy, batch, **CUT) * batch.mask
    return SimpleNamespace(loss=metrics["loss"], values=values, gradients=tiny.exported_gradients(policy))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients_of_the_fused_head_are_the_dense_ones(tiny, tmp_path, tied):
    """Tied, the embedding's gradient has the parts of both its uses."""
    folder = tiny.write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    batch = tiny.random_batch()
    found = one_pass(with_head(tiny.build_policy(folder), "fused"), batch, tiny)
    dense = tiny.load_dense(folder)
    values = tiny.dense_logprobs(dense, batch.tokens, CUT["temperature"])
    expected = loss(*values, batch)[0]["loss"].mean()
    expected.backward()
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(found.values, torch.stack(values).detach() * batch.mask, rtol=0, atol=2e-5)
    assert found.gradients.keys() == dict(dense.named_parameters()).keys()
    far = {name: distance(found.gradients[name], parameter.grad) for name, parameter in dense.named_parameters()}
    assert max(far.values()) < 1e-5, far


@pytest.mark.parametrize("kind", ["fused", "logits"])
def test_only_positions_that_the_loss_reads_are_multiplied(policy, tiny, monkeypatch, kind):
    """Prompts and padding cost no logits, and a micro-batch that has only these no product at all."""
    policy, batch, rows = with_head(policy, kind), tiny.random_batch(), []
    original = output_layer.LossHead._of_positions

    def watched(head, outputs, *arguments):
        rows.append(outputs.shape[1])
        return original(head, outputs, *arguments)

    monkeypatch.setattr(output_layer.LossHead, "_of_positions", watched)
    found = tiny.logprobs(policy, batch, **CUT)
    assert sum(rows) == int(batch.mask.sum()) < batch.mask.numel()
    assert all((values != 0).equal(batch.mask > 0) for values in found)


def test_the_models_own_output_layer_is_back_after_a_pass_even_one_that_fails(policy, tiny):
    fused, batch = with_head(policy, "fused"), tiny.random_batch()
    layer = unwrap_model(policy.chunks[0]).output_layer

    def broken(logprobs, entropies, micro, _=0.0):
        assert layer.forward != type(layer).forward.__get__(layer)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        tiny.forward_backward(fused, batch, broken, loss_counts={"loss": 1.0}, **CUT)
    assert "forward" not in vars(layer)
    hidden = torch.randn(3, 1, 64)
    assert layer(hidden)[0].shape == (3, 1, tiny.VOCAB_SIZE)


def test_bf16_outputs_are_not_copied_to_fp32_and_both_heads_agree(tiny, tiny_qwen2, monkeypatch):
    policy, batch, types = tiny.build_policy(tiny_qwen2, dtype="bf16"), tiny.random_batch(), []
    original = output_layer.LossHead.__call__

    def watched(head, outputs, *arguments):
        types.append(outputs.dtype)
        return original(head, outputs, *arguments)

    monkeypatch.setattr(output_layer.LossHead, "__call__", watched)
    fused, logits = (one_pass(with_head(policy, kind, "bf16"), batch, tiny) for kind in ("fused", "logits"))
    assert set(types) == {torch.bfloat16}
    torch.testing.assert_close(fused.values, logits.values, rtol=0, atol=1e-4)
    far = {name: distance(fused.gradients[name], gradient) for name, gradient in logits.gradients.items()}
    # The hidden states' gradient is rounded once more (2^-8), and two layers make that up to 2.6 times as large.
    assert max(far.values()) < 2**-5, far
