"""Megatron's pass over a global batch against plain autograd through the same weights in ``transformers``."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import DPOLossConfig, GRPOLossConfig
from nemo_edo.data.batching import sequence_lengths
from nemo_edo.losses import (
    LossTerm,
    NotFinite,
    ed_idpo_loss,
    entropy_bonus,
    grpo_loss,
    reduce_tokens,
    reduction_count,
    sequence_logprobs,
    sft_loss,
)
from nemo_edo.megatron import forward_backward
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.types import TrainingBatch

TEMPERATURE = 0.7
ED_IDPO = DPOLossConfig(beta=0.3, exploration_coefficient=0.2)
ED_GRPO = GRPOLossConfig(beta=0.04, exploration_coefficient=0.3, log_ratio_floor=-2.0)


def ed_grpo(log_probs, entropies, micro):
    """With exploration, and an entropy bonus so that entropies have gradients too."""
    term, metrics = grpo_loss(
        log_probs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask, ED_GRPO
    )
    term = term.plus(entropy_bonus(entropies, micro.mask, reduction=ED_GRPO.aggregation), 0.1)
    return {"grpo": term}, {**metrics, "entropy": reduce_tokens(entropies.detach(), micro.mask, "token-mean")}


def sft(log_probs, entropies, micro):
    return {"sft": sft_loss(log_probs, micro.mask)}, {}


def ed_idpo(log_probs, entropies, micro):
    """Two terms with denominators of their own: pairs, and the responses that explore."""
    policy, ref = (sequence_logprobs(values, micro.mask) for values in (log_probs, micro.ref_logprobs))
    chosen, rejected = micro.pair_role == 1, micro.pair_role == -1
    samples = micro.mask * micro.exploration_weights[:, None]
    preference, exploration, metrics = ed_idpo_loss(
        policy[chosen], policy[rejected], ref[chosen], ref[rejected], log_probs, micro.old_logprobs, samples, ED_IDPO
    )
    return {"preference": preference, "exploration": exploration}, metrics


def counts(name: str, batch) -> dict[str, float]:
    """Each term's count over the batch."""
    if name == "ed-idpo":
        pairs, samples = (batch.pair_role == 1).sum(), batch.exploration_weights.sum()
        return {"preference": float(pairs), "exploration": float(samples)}
    reduction = {"ed-grpo": ED_GRPO.aggregation, "sft": "token-mean"}[name]
    return {{"ed-grpo": "grpo"}.get(name, name): float(reduction_count(batch.mask, reduction))}


LOSSES = {"ed-grpo": ed_grpo, "sft": sft, "ed-idpo": ed_idpo}


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture(scope="module")
def batch(tiny):
    """Six rows: two pairs, and two single responses one of which does not explore."""
    return tiny.random_batch(rows=6).with_fields(
        pair_role=torch.tensor([1, -1, 0, 0, 1, -1]), exploration_weights=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    )


@pytest.fixture(scope="module")
def run(policy, tiny):
    """run(batch, name of the loss, rows, tokens, packing): metrics, exported gradients and padding of one pass."""

    def one_pass(batch, name: str, rows: int, tokens: int | None = None, packing: bool = False, loss=None,
                 share_prompts: bool = False, **settings) -> SimpleNamespace:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        settings = {"loss_counts": counts(name, batch), "temperature": TEMPERATURE, **settings}
        metrics = policy.forward_backward(
            batch, loss or LOSSES[name], micro_batching=MicroBatching(rows, tokens, packing, share_prompts), **settings
        )
        padding = metrics.pop("padding_share")
        return SimpleNamespace(metrics=metrics, gradients=tiny.exported_gradients(policy), padding=padding)

    return one_pass


@pytest.fixture(scope="module")
def sharing(tiny, batch):
    """The batch, with the prompts of rows 0 and 3 shared by others: by the other row of a pair, and by two behind."""
    return tiny.with_shared_prompts(batch, {1: 0, 4: 3, 5: 3})


@pytest.fixture(scope="module")
def dense(by_autograd, batch) -> dict[str, SimpleNamespace]:
    return by_autograd(batch)


@pytest.fixture(scope="module")
def dense_sharing(by_autograd, sharing) -> dict[str, SimpleNamespace]:
    return by_autograd(sharing)


@pytest.fixture(scope="module")
def by_autograd(tiny, tiny_qwen2):
    """by_autograd(batch): each loss of the whole batch at once, by autograd through ``transformers``."""
    return partial(_by_autograd, tiny, tiny_qwen2)


def _by_autograd(tiny, tiny_qwen2, batch) -> dict[str, SimpleNamespace]:
    results = {}
    for name, loss in LOSSES.items():
        model = tiny.load_dense(tiny_qwen2)
        terms, metrics = loss(*tiny.dense_log_probs(model, batch.tokens, TEMPERATURE), batch)
        total = sum(term.mean() for term in terms.values())
        total.backward()
        results[name] = SimpleNamespace(
            metrics={"loss": float(total), **{key: float(value.mean()) for key, value in metrics.items()}},
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
@pytest.mark.parametrize(("rows", "tokens"), [(2, None), (3, None), (5, None), (64, None), (64, 30), (4, 40)])
def test_gradients_and_metrics_are_the_dense_ones_however_the_batch_is_cut(run, batch, dense, name, rows, tokens):
    assert_same(run(batch, name, rows, tokens), dense[name])


@pytest.mark.parametrize("name", ["ed-grpo", "sft"])
def test_one_sequence_at_a_time_gives_the_same_gradients(run, batch, dense, name):
    single = batch.with_fields(pair_role=None)
    assert_same(run(single, name, rows=1), dense[name])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [24, 41, 600])
def test_gradients_and_metrics_of_packs_are_the_dense_ones(run, batch, dense, name, tokens):
    """Of one pair or two sequences to a pack, of more, and of the whole batch in one."""
    assert_same(run(batch, name, rows=1, tokens=tokens, packing=True), dense[name])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [24, 41, 600])
def test_gradients_and_metrics_of_packs_that_share_prompts_are_the_dense_ones(
    run, sharing, dense_sharing, name, tokens
):
    found = run(sharing, name, rows=1, tokens=tokens, packing=True, share_prompts=True)
    assert_same(found, dense_sharing[name])
    assert found.padding == pytest.approx(0, abs=1e-9)


def test_log_probs_and_entropies_of_shared_prompts_are_those_of_rows(policy, sharing):
    """To the last response token, those of the prompt's own tokens included."""
    shared = policy.log_probs(sharing, micro_batching=MicroBatching(1, 600, True, True), temperature=TEMPERATURE)
    rows = policy.log_probs(sharing, micro_batching=MicroBatching(2), temperature=TEMPERATURE)
    for found, expected in zip(shared, rows, strict=True):
        assert expected.abs().max() > 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_shared_prompt_enters_the_model_once(policy, sharing, monkeypatch):
    seen, plain = [], forward_backward.shared_inputs
    monkeypatch.setattr(forward_backward, "shared_inputs", lambda *args: seen.append(plain(*args)) or seen[-1])
    policy.log_probs(sharing, micro_batching=MicroBatching(1, 600, True, True), temperature=TEMPERATURE)
    prompts = [int(sharing.mask[row].argmax()) for row in (0, 3, 3)]
    rows = sum(sequence_lengths(sharing)) - sharing.size
    assert sum(prompts) > 0 and [inputs.tokens.shape[1] for inputs in seen] == [rows - sum(prompts)]


def test_packs_hold_no_padding(run, batch):
    assert run(batch, "sft", 1, 41, packing=True).padding == 0


def test_a_token_budget_computes_less_padding_than_the_order_of_the_rows(run, batch):
    in_order, by_length = (run(batch, "sft", 4, tokens).padding for tokens in (None, 40))
    assert 0 <= by_length < in_order < 1


@pytest.mark.parametrize("name", LOSSES)
def test_rows_and_micro_batches_that_are_all_padding_contribute_nothing(run, batch, dense, name):
    tensors = batch.tensors().items()
    padded = TrainingBatch(**{key: torch.cat([value, torch.zeros_like(value[:4])]) for key, value in tensors})
    assert padded.size == 10 and not padded.mask[6:].any()
    assert_same(run(padded, name, rows=2), dense[name])


def test_whatever_padding_holds_changes_nothing(run, batch, dense):
    """Values at masked positions, and tokens behind the response: causal attention and the mask keep them out."""
    valid = batch.mask.bool()
    after = batch.mask.flip(1).cumsum(1).flip(1) == 0  # positions behind the last response token
    tokens = batch.tokens.clone()
    tokens[:, 1:][after] = 77
    rubbish = batch.with_fields(
        tokens=tokens,
        old_logprobs=torch.where(valid, batch.old_logprobs, torch.nan),
        ref_logprobs=torch.where(valid, batch.ref_logprobs, -torch.inf),
    )
    assert not torch.equal(tokens, batch.tokens)
    for name in ("ed-grpo", "ed-idpo"):
        assert_same(run(rubbish, name, rows=2), dense[name])


def test_a_batch_without_any_response_token_is_an_error(policy, batch):
    empty = batch.with_fields(mask=torch.zeros_like(batch.mask))
    with pytest.raises(ValueError, match="none of the batch's 6 rows has a response token"):
        policy.forward_backward(
            empty, sft, loss_counts={"sft": 0.0}, micro_batching=MicroBatching(2), temperature=TEMPERATURE
        )


def test_forward_only_gives_the_same_metrics_and_no_gradient(run, batch, dense):
    found = run(batch, "ed-grpo", rows=2, forward_only=True)
    assert found.metrics == pytest.approx(dense["ed-grpo"].metrics, rel=1e-4, abs=1e-6)
    assert not any(gradient.any() for gradient in found.gradients.values())


def test_gradients_of_two_batches_add_up(run, policy, tiny, batch):
    once = run(batch, "sft", rows=2).gradients
    policy.forward_backward(
        batch, sft, loss_counts=counts("sft", batch), micro_batching=MicroBatching(4), temperature=TEMPERATURE
    )
    for name, gradient in tiny.exported_gradients(policy).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_micro_batch_whose_loss_is_not_finite_makes_the_whole_loss_nan(run, batch, refuses):
    """Whether the loss function gives it back or refuses to compute it; the pass goes on to its end either way."""
    calls = []

    def broken(log_probs, entropies, micro):
        calls.append(micro.size)
        if len(calls) != 2:
            return sft(log_probs, entropies, micro)
        if refuses:
            raise NotFinite("log_probs has NaN")
        return {"sft": LossTerm(log_probs.sum() * torch.inf, micro.mask.sum())}, {}

    found = run(batch, "sft", rows=2, loss=broken)
    assert calls == [2, 2, 2]
    assert math.isnan(found.metrics["loss"])


def test_other_errors_of_a_loss_function_are_bugs_and_raise(run, batch):
    def wrong(log_probs, entropies, micro):
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        run(batch, "sft", rows=2, loss=wrong)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_count_that_the_terms_do_not_add_up_to_raises(run, batch, wrong):
    expected = {"sft": wrong * counts("sft", batch)["sft"]}
    with pytest.raises(RuntimeError, match=r"the micro-batches' terms 'sft' count .*, the global batch"):
        run(batch, "sft", rows=2, loss_counts=expected)


@pytest.mark.parametrize("cut", [(2, None), (6, None), (6, 30), (1, 30, True), (1, 600, True)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_those_of_transformers(policy, tiny, tiny_qwen2, batch, temperature, cut):
    found = policy.log_probs(batch, micro_batching=MicroBatching(*cut), temperature=temperature)
    with torch.no_grad():
        expected = tiny.dense_log_probs(tiny.load_dense(tiny_qwen2), batch.tokens, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours * batch.mask, theirs * batch.mask, rtol=0, atol=1e-4)


def test_log_probs_leave_the_gradients_alone(run, policy, tiny, batch):
    before = run(batch, "sft", rows=2).gradients
    policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)
    after = tiny.exported_gradients(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
