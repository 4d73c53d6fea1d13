"""Megatron's pass over a global batch against plain autograd through the same weights in ``transformers``."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from nemo_edo import losses
from nemo_edo.config import DPOLossConfig, GRPOLossConfig, MicroBatchConfig
from nemo_edo.data.batching import sequence_lengths
from nemo_edo.data.shares import InputShapes
from nemo_edo.megatron import forward_backward, packing
from nemo_edo.megatron.output_layer import LossHead
from nemo_edo.types import TrainingBatch

TEMPERATURE = 0.7
ED_IDPO = DPOLossConfig(beta=0.3, exploration_coefficient=0.2)
ED_GRPO = GRPOLossConfig(beta=0.04, exploration_coefficient=0.3, log_ratio_floor=-2.0)


def ed_grpo(logprobs, entropies, micro, _=0.0):
    """With exploration, and an entropy bonus so that entropies have gradients too."""
    given = logprobs, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask
    term, metrics = losses.grpo_loss(*given, ED_GRPO)
    term = term.plus(losses.entropy_bonus(entropies, micro.mask, reduction=ED_GRPO.aggregation), 0.1)
    return {"grpo": term}, {**metrics, "entropy": losses.reduce_tokens(entropies.detach(), micro.mask, "token-mean")}


def sft(logprobs, entropies, micro, _=0.0):
    return {"sft": losses.sft_loss(logprobs, micro.mask)}, {}


def ed_idpo(logprobs, entropies, micro, _=0.0):
    """Two terms with separate denominators: pairs, and the responses that explore."""
    policy, ref = (losses.sequence_logprobs(values, micro.mask) for values in (logprobs, micro.ref_logprobs))
    chosen, rejected = micro.pair_role == 1, micro.pair_role == -1
    samples = micro.mask * micro.exploration_factors[:, None]
    preference, exploration, metrics = losses.ed_idpo_loss(
        policy[chosen], policy[rejected], ref[chosen], ref[rejected], logprobs, micro.old_logprobs, samples, ED_IDPO
    )
    return {"preference": preference, "exploration": exploration}, metrics


def counts(name: str, batch) -> dict[str, float]:
    """Each term's count over the batch."""
    if name == "ed-idpo":
        pairs, samples = (batch.pair_role == 1).sum(), batch.exploration_factors.sum()
        return {"preference": float(pairs), "exploration": float(samples)}
    reduction = {"ed-grpo": ED_GRPO.aggregation, "sft": "token-mean"}[name]
    return {{"ed-grpo": "grpo"}.get(name, name): float(losses.reduction_count(batch.mask, reduction))}


LOSSES = {"ed-grpo": ed_grpo, "sft": sft, "ed-idpo": ed_idpo}
# Most rows, most tokens, packing, shared prompts. Packs have one pair or two sequences, more, or the whole batch.
ROWS = [(2, None), (3, None), (5, None), (64, None), (64, 30), (4, 40)]
PACKS = [(1, tokens, True, shares) for tokens in (24, 41, 600) for shares in (False, True)]


@pytest.fixture(scope="module")
def batch(tiny):
    """Six rows: two pairs, and two single responses one of which does not explore. The prompts of rows 0 and 3 are also
    those of the pair's other row and of the two rows after row 3."""
    batch = tiny.random_batch(rows=6).with_fields(
        pair_role=torch.tensor([1, -1, 0, 0, 1, -1]), exploration_factors=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    )
    return tiny.with_shared_prompts(batch, {1: 0, 4: 3, 5: 3})


@pytest.fixture(scope="module")
def run(policy, tiny):
    """run(batch, name of the loss, cut): metrics, exported gradients and padding of one pass."""

    def one_pass(batch, name: str, cut: tuple, loss=None, **settings) -> SimpleNamespace:
        tiny.clear_gradients(policy)
        settings = {"loss_counts": counts(name, batch), "temperature": TEMPERATURE, **settings}
        loss = loss or LOSSES[name]
        metrics = tiny.forward_backward(policy, batch, loss, micro_batching=MicroBatchConfig(*cut), **settings)
        padding = metrics.pop("padding_share")
        return SimpleNamespace(metrics=metrics, gradients=tiny.exported_gradients(policy), padding=padding)

    return one_pass


@pytest.fixture(scope="module")
def dense(tiny, tiny_qwen2, batch) -> dict[str, SimpleNamespace]:
    """Each loss of the whole batch at once, by autograd through ``transformers``."""
    results = {}
    for name, loss in LOSSES.items():
        model = tiny.load_dense(tiny_qwen2)
        terms, metrics = loss(*tiny.dense_logprobs(model, batch.tokens, TEMPERATURE), batch)
        total = sum(term.mean() for term in terms.values())
        total.backward()
        results[name] = SimpleNamespace(
            metrics={"loss": total.item(), **{key: value.mean().item() for key, value in metrics.items()}},
            gradients={key: parameter.grad for key, parameter in model.named_parameters()},
        )
    return results


def assert_same(found: SimpleNamespace, expected: SimpleNamespace) -> None:
    """Gradients to 1e-5 of each tensor's largest element: fp32 sums in another order, most in the keys' biases, whose
    terms nearly cancel."""
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        assert scale > 0, f"{name} has no gradient to compare"
        error = float((found.gradients[name] - gradient).abs().max()) / scale
        assert error < 1e-5, f"{name} is off by {error} of its largest element"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", ROWS + PACKS)
def test_gradients_and_metrics_are_the_dense_ones_however_the_batch_is_cut(run, batch, dense, name, cut):
    found = run(batch, name, cut)
    assert_same(found, dense[name])
    assert (found.padding == pytest.approx(0, abs=1e-9)) == (cut in PACKS)


def test_a_term_that_counts_one_token_has_the_gradient_of_two_copies_of_it(run, batch):
    row = batch.with_fields(pair_role=None, exploration_factors=None).rows(slice(1))
    row = row.with_fields(mask=(row.mask.cumsum(1) == 1).float() * row.mask)
    twice = TrainingBatch(**{key: torch.cat([value, value]) for key, value in row.tensors().items()})
    one, two = (run(each, "sft", (1,)) for each in (row, twice))
    assert int(row.mask.sum()) == 1 and any(gradient.any() for gradient in one.gradients.values())
    for name, gradient in two.gradients.items():
        assert float((one.gradients[name] - gradient).abs().max()) < 1e-5 * float(gradient.abs().max()), name


@pytest.mark.parametrize(("cut", "multiple", "group"), [
    ((2,), 1, 5), ((1, 24, True), 1, 5), ((1, 24, True, True), 1, 5), ((1, 41, True), 7, 1),
])
def test_padding_that_a_layout_asks_for_changes_nothing(run, batch, dense, monkeypatch, cut, multiple, group):
    """Empty micro-batches, as interleaved pipeline stages take them in groups; packs of a multiple of tokens."""
    seen, plain = [], forward_backward._inputs
    monkeypatch.setattr(forward_backward, "_inputs", lambda *args: seen.append(plain(*args)) or seen[-1])
    monkeypatch.setattr(packing, "input_shapes", lambda _: InputShapes(multiple, uniform=group > 1, group=group))
    assert_same(run(batch, "ed-idpo", cut), dense["ed-idpo"])
    [inputs] = seen
    assert group in (1, len(inputs))
    assert all(one.tokens.shape[1] % multiple == 0 and one.tokens.shape[1] <= 41 for one in inputs)


def test_a_shared_prompt_enters_the_model_once(policy, tiny, batch, monkeypatch):
    seen, plain = [], forward_backward.shared_inputs
    monkeypatch.setattr(forward_backward, "shared_inputs", lambda *args: seen.append(plain(*args)) or seen[-1])
    tiny.logprobs(policy, batch, micro_batching=MicroBatchConfig(1, 600, True, True), temperature=TEMPERATURE)
    prompts = sum(int(batch.mask[row].argmax()) for row in (0, 3, 3))
    assert prompts > 0
    assert [inputs.tokens.shape[1] for inputs in seen] == [sum(sequence_lengths(batch)) - batch.size - prompts]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", [(2, None), (6, 30), (1, 41, True)])
def test_the_shares_of_two_data_parallel_ranks_add_up_to_the_dense_gradients(
    policy, tiny, batch, dense, monkeypatch, name, cut
):
    """One rank after the other in this process, without the reduction between them; each has its rows alone."""
    totals, means = [], forward_backward._means
    monkeypatch.setattr(forward_backward, "_means", lambda sums, _: totals.append(sums) or {"loss": math.nan})
    with monkeypatch.context() as two:
        two.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
        shares = tiny.shares(policy, batch, MicroBatchConfig(*cut), counts(name, batch))
    assert sorted(place for share in shares for place in share.places) == list(range(batch.size))
    assert all(share.rows.size == len(share.places) for share in shares)
    tiny.clear_gradients(policy)
    for share in shares:
        forward_backward.forward_backward(policy, share, LOSSES[name], exploration_weight=0.0, temperature=TEMPERATURE)
    both = {key: tuple(map(sum, zip(*(part[key] for part in totals if key in part), strict=True)))
            for key in totals[0].keys() | totals[1].keys()}
    assert all(part != both for part in totals), "one rank has it all"
    found = SimpleNamespace(metrics=means(both, counts(name, batch)), gradients=tiny.exported_gradients(policy))
    assert_same(found, dense[name])


def test_the_contents_of_padding_change_nothing(run, batch, dense):
    """Values at masked positions, and tokens after the response: causal attention and the mask keep them out."""
    valid = batch.mask.bool()
    after = batch.mask.flip(1).cumsum(1).flip(1) == 0  # positions after the last response token
    tokens = batch.tokens.clone()
    tokens[:, 1:][after] = 77
    garbage = batch.with_fields(
        tokens=tokens,
        old_logprobs=torch.where(valid, batch.old_logprobs, torch.nan),
        ref_logprobs=torch.where(valid, batch.ref_logprobs, -torch.inf),
    )
    assert not torch.equal(tokens, batch.tokens)
    for name in ("ed-grpo", "ed-idpo"):
        assert_same(run(garbage, name, (2,)), dense[name])


@pytest.mark.parametrize("refuses", [True, False])
def test_a_micro_batch_whose_loss_is_not_finite_makes_the_whole_loss_nan(run, batch, refuses):
    """Whether the loss function gives it back or refuses to compute it; the pass runs to its end either way."""
    calls = []

    def broken(logprobs, entropies, micro, _=0.0):
        calls.append(micro.size)
        if len(calls) != 2:
            return sft(logprobs, entropies, micro)
        if refuses:
            raise losses.NotFinite("logprobs has NaN")
        return {"sft": losses.LossTerm(logprobs.sum() * torch.inf, micro.mask.sum())}, {}

    found = run(batch, "sft", (2,), loss=broken)
    assert calls == [2, 2, 2]
    assert math.isnan(found.metrics["loss"])


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_count_that_the_terms_do_not_add_up_to_raises(run, batch, wrong):
    expected = {"sft": wrong * counts("sft", batch)["sft"]}
    with pytest.raises(RuntimeError, match=r"the micro-batches' terms 'sft' count .*, the global batch"):
        run(batch, "sft", (2,), loss_counts=expected)


def test_logprobs_that_no_trained_weight_changes_raise(run, batch, monkeypatch):
    """As of adapters within recomputed layers whose input needs no gradient: Megatron skips the backward pass."""
    plain = LossHead.__call__
    monkeypatch.setattr(LossHead, "__call__", lambda *given: tuple(value.detach() for value in plain(*given)))
    with pytest.raises(RuntimeError, match="depend on no trained weight"):
        run(batch, "sft", (2,))


@pytest.mark.parametrize("cut", [(2, None), (6, None), (6, 30), (1, 30, True), (1, 600, True), (1, 600, True, True)])
def test_logprobs_and_entropies_are_those_of_transformers(policy, tiny, tiny_qwen2, batch, cut):
    """At the tokens that count; zero at every other."""
    found = tiny.logprobs(policy, batch, micro_batching=MicroBatchConfig(*cut), temperature=TEMPERATURE)
    inside = batch.mask > 0
    with torch.no_grad():
        expected = tiny.dense_logprobs(tiny.load_dense(tiny_qwen2), batch.tokens, TEMPERATURE)
    for ours, theirs in zip(found, expected, strict=True):
        assert not inside.all() and theirs.abs().max() > 1
        torch.testing.assert_close(ours, theirs * inside, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [3.0, math.nan])
def test_a_sum_on_the_gpu_and_a_count_on_the_host_become_a_pair_on_the_gpu(count):
    on_gpu = torch.ones((), device="meta")  # like CUDA, refuses operands on another device
    assert forward_backward._pairs({"sft": losses.LossTerm(on_gpu, count)})["sft"].device == on_gpu.device
