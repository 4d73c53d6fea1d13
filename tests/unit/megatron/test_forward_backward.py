"""Megatron's pass over a global batch against plain autograd through the same weights in ``transformers``."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import GRPOLossConfig
from nemo_edo.data.batching import pad_rows
from nemo_edo.losses import LossTerm, entropy_bonus, grpo_loss, reduce_tokens, reduction_count, sft_loss

TEMPERATURE = 0.7
ED_GRPO = GRPOLossConfig(beta=0.04, exploration_coefficient=0.3, log_ratio_floor=-2.0)


def ed_grpo(log_probs, entropies, micro):
    """With exploration, and an entropy bonus so that entropies have gradients too."""
    term, metrics = grpo_loss(
        log_probs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask, ED_GRPO
    )
    term = term.plus(entropy_bonus(entropies, micro.mask, reduction=ED_GRPO.aggregation), 0.1)
    return term, {**metrics, "entropy": reduce_tokens(entropies.detach(), micro.mask, "token-mean")}


def sft(log_probs, entropies, micro):
    return sft_loss(log_probs, micro.mask), {}


LOSSES = {"ed-grpo": (ed_grpo, ED_GRPO.aggregation), "sft": (sft, "token-mean")}


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture(scope="module")
def batch(tiny):
    return tiny.random_batch(rows=5)


def run(policy, tiny, batch, loss, reduction: str, micro_batch_size: int, **settings) -> SimpleNamespace:
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    settings = {"loss_count": float(reduction_count(batch.mask, reduction)), **settings}
    metrics = policy.forward_backward(
        batch, loss, micro_batch_size=micro_batch_size, temperature=TEMPERATURE, **settings
    )
    return SimpleNamespace(metrics=metrics, gradients=tiny.exported_gradients(policy))


@pytest.fixture(scope="module")
def dense(tiny, tiny_qwen2, batch) -> dict[str, SimpleNamespace]:
    """Each loss of the whole batch at once, by autograd through ``transformers``."""
    results = {}
    for name, (loss, _) in LOSSES.items():
        model = tiny.load_dense(tiny_qwen2)
        term, metrics = loss(*tiny.dense_log_probs(model, batch.tokens, TEMPERATURE), batch)
        term.mean().backward()
        results[name] = SimpleNamespace(
            metrics={key: float(value.mean()) for key, value in {"loss": term, **metrics}.items()},
            gradients={key: parameter.grad for key, parameter in model.named_parameters()},
        )
    return results


def assert_same(found: SimpleNamespace, expected: SimpleNamespace) -> None:
    """Gradients to 5e-6 of each tensor's largest element: fp32 sums in another order."""
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        assert scale > 0, f"{name} has no gradient to compare"
        error = float((found.gradients[name] - gradient).abs().max()) / scale
        assert error < 5e-6, f"{name} is off by {error} of its largest element"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 64])
def test_gradients_and_metrics_are_the_dense_ones_whatever_the_micro_batch_size(
    policy, tiny, batch, dense, name, micro_batch_size
):
    assert_same(run(policy, tiny, batch, *LOSSES[name], micro_batch_size), dense[name])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_and_micro_batches_that_are_all_padding_contribute_nothing(policy, tiny, batch, dense, name):
    padded = pad_rows(batch, 9, pad_id=0)
    assert padded.size == 9 and not padded.mask[5:].any()
    assert_same(run(policy, tiny, padded, *LOSSES[name], micro_batch_size=2), dense[name])


def test_whatever_padding_holds_changes_nothing(policy, tiny, batch, dense):
    """Values at masked positions, and tokens behind the response: causal attention and the mask keep them out."""
    valid = batch.mask.bool()
    after = batch.mask.flip(1).cumsum(1).flip(1) == 0  # positions behind the last response token
    tokens = batch.tokens.clone()
    tokens[:, 1:][after] = 77
    rubbish = replace(
        batch, tokens=tokens,
        old_logprobs=torch.where(valid, batch.old_logprobs, torch.nan),
        ref_logprobs=torch.where(valid, batch.ref_logprobs, -torch.inf),
    )
    assert not torch.equal(tokens, batch.tokens)
    assert_same(run(policy, tiny, rubbish, *LOSSES["ed-grpo"], micro_batch_size=2), dense["ed-grpo"])


def test_a_batch_without_any_response_token_has_loss_and_gradients_of_zero(policy, tiny, batch):
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    found = run(policy, tiny, empty, *LOSSES["ed-grpo"], micro_batch_size=2)
    assert set(found.metrics.values()) == {0.0}
    assert not any(gradient.any() for gradient in found.gradients.values())


def test_forward_only_gives_the_same_metrics_and_no_gradient(policy, tiny, batch, dense):
    found = run(policy, tiny, batch, *LOSSES["ed-grpo"], micro_batch_size=2, forward_only=True)
    assert found.metrics == pytest.approx(dense["ed-grpo"].metrics, rel=1e-4, abs=1e-6)
    assert not any(gradient.any() for gradient in found.gradients.values())


def test_gradients_of_two_batches_add_up(policy, tiny, batch):
    once = run(policy, tiny, batch, *LOSSES["sft"], micro_batch_size=2).gradients
    count = float(reduction_count(batch.mask, "token-mean"))
    policy.forward_backward(batch, sft, loss_count=count, micro_batch_size=5, temperature=TEMPERATURE)
    for name, gradient in tiny.exported_gradients(policy).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_raises_and_the_message_has_the_metrics(policy, tiny, batch):
    def broken(log_probs, entropies, micro):
        return LossTerm(log_probs.sum() * torch.nan, micro.mask.sum()), {"own": LossTerm(micro.mask.sum(), 1.0)}

    with pytest.raises(FloatingPointError, match="the loss is nan; the optimizer step was not taken.*'own'"):
        run(policy, tiny, batch, broken, "token-mean", micro_batch_size=2)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_count_that_the_terms_do_not_add_up_to_raises(policy, tiny, batch, wrong):
    count = wrong * float(reduction_count(batch.mask, "token-mean"))
    with pytest.raises(RuntimeError, match=r"the loss terms count .*, the global batch"):
        run(policy, tiny, batch, sft, "token-mean", micro_batch_size=2, loss_count=count)


@pytest.mark.parametrize("micro_batch_size", [2, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_those_of_transformers(
    policy, tiny, tiny_qwen2, batch, temperature, micro_batch_size
):
    found = policy.log_probs(batch, micro_batch_size=micro_batch_size, temperature=temperature)
    with torch.no_grad():
        expected = tiny.dense_log_probs(tiny.load_dense(tiny_qwen2), batch.tokens, temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_log_probs_leave_the_gradients_alone(policy, tiny, batch):
    before = run(policy, tiny, batch, *LOSSES["sft"], micro_batch_size=2).gradients
    policy.log_probs(batch, micro_batch_size=2, temperature=1.0)
    after = tiny.exported_gradients(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
