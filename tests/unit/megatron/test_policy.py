import math

import pytest
import torch
from helpers import tiny_models as tiny

from nemo_edo.config import MicroBatchConfig, OptimizerConfig
from nemo_edo.losses import LossTerm, sft_loss
from nemo_edo.megatron.policy import exchange_contents


def broken_gradient(logprobs, entropies, micro, _=0.0):
    """The loss is 0, its gradient infinite or NaN."""
    return {"sft": LossTerm((logprobs - logprobs.detach()).abs().sqrt().sum(), micro.mask.sum())}, {}


@pytest.fixture(scope="module")
def start(policy):
    return policy.snapshot()


@pytest.fixture(autouse=True)
def from_the_start(policy, start):
    policy.load(start)


def step(policy, batch, loss=None) -> dict[str, float]:
    """loss: another one than SFT's."""
    return tiny.train_step(policy, batch, **tiny.sft_settings(batch) | ({"loss": loss} if loss else {}))


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_steps_are_those_of_adamw_on_the_dense_model(policy, tiny, tiny_qwen2, clip_grad):
    """torch.optim.AdamW, whose weight decay leaves out biases and norms, as Megatron's does."""
    # eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
    settings = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-3,
                               clip_grad=clip_grad)
    policy.reset_optimizer(settings, total_steps=4)
    model = tiny.load_dense(tiny_qwen2)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is two] for two in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.8, 0.95), eps=1e-3,
    )
    before = tiny.exported(policy)
    for seed in range(4):
        batch = tiny.random_batch(rows=4, seed=seed)
        metrics = step(policy, batch)
        adamw.zero_grad()
        loss = sft_loss(tiny.dense_logprobs(model, batch.tokens)[0], batch.mask).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
        adamw.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert not clip_grad or norm > 2 * clip_grad, "nothing to clip"
    after = tiny.exported(policy)
    for name, expected in model.named_parameters():
        assert (expected - before[name]).abs().max() > 1e-3, f"{name} has not moved"
        torch.testing.assert_close(after[name], expected.detach(), rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


MAX, STEPS = 1e-3, 6


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_learning_rate_warms_up_from_zero_and_decays_to_its_minimum_at_the_last_step(policy, tiny, start, schedule):
    policy.reset_optimizer(OptimizerConfig(lr=MAX, min_lr=0.1 * MAX, warmup_steps=2, schedule=schedule), STEPS)
    batch = tiny.random_batch(rows=2)
    rates = [step(policy, batch)["lr"]]
    assert all(map(torch.equal, policy.snapshot(), start)), "the first step's rate is 0"
    rates += [step(policy, batch)["lr"] for _ in range(STEPS)]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(1, 5)]
    decay = cosine if schedule == "cosine" else [1.0] * 4
    assert rates == pytest.approx([MAX * share for share in (0.0, 0.5, 1.0, *decay)])


def constant(logprobs, entropies, micro, _=0.0):
    """The loss is infinite, its gradient finite."""
    term = sft_loss(logprobs, micro.mask)
    return {"sft": LossTerm(term.sum + math.inf, term.count)}, {}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [broken_gradient, constant])
def test_a_step_with_a_loss_or_gradient_that_is_not_finite_changes_nothing(tiny, tiny_qwen2, dtype, loss):
    """Neither weights nor moments nor the learning rate's schedule: the steps after it are those without it."""
    policy = tiny.build_policy(tiny_qwen2, dtype=dtype)
    start, batches = policy.snapshot(), [tiny.random_batch(rows=2, seed=seed) for seed in range(3)]

    def train(losses, batches) -> tuple[list, list]:
        policy.load(start)
        policy.reset_optimizer(OptimizerConfig(lr=MAX, warmup_steps=2), STEPS)
        reports = [step(policy, batch, loss) for batch, loss in zip(batches, losses, strict=True)]
        return reports, policy.snapshot()

    expected, weights = train([None, None, None], batches)
    reports, found = train([None, loss, None, None], [batches[0], tiny.random_batch(rows=2, seed=9), *batches[1:]])
    skipped = reports.pop(1)
    assert skipped["skipped"] == 1.0 and math.isfinite(skipped["grad_norm"]) == (loss is constant)
    assert reports == expected and {report["skipped"] for report in reports} == {0.0}
    assert all(map(torch.equal, found, weights)) and not all(map(torch.equal, weights, start))


def test_a_norm_above_the_limit_is_not_stepped_on_and_one_at_the_limit_is(policy, tiny, start):
    policy.reset_optimizer(OptimizerConfig(lr=MAX), STEPS)
    batch = tiny.random_batch(rows=2)

    def apply(limit: float) -> dict[str, float]:
        policy.zero_grad()
        metrics = tiny.forward_backward(policy, batch, **tiny.sft_settings(batch))
        return policy.apply_gradients(metrics["loss"], grad_norm_limit=limit)

    norm = apply(0.0)["grad_norm"]
    assert all(map(torch.equal, policy.snapshot(), start))
    assert not any(chunk_grad.any() for chunk_grad in (p.main_grad for p in policy._parameters()))
    assert apply(norm * (1 - 1e-6))["skipped"] == 1.0
    assert all(map(torch.equal, policy.snapshot(), start))
    assert apply(norm)["skipped"] == 0.0
    assert not all(map(torch.equal, policy.snapshot(), start))


def test_weights_computes_with_the_frozen_ones_in_place_and_restores_its_own_even_after_an_error(
    policy, tiny, start, tmp_path
):
    """No copy of the model is allocated: the addresses in use are the same two sets."""
    other = tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1))
    batch, frozen = tiny.random_batch(), other.snapshot()
    own = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]

    def logprobs(policy):
        return tiny.logprobs(policy, batch, micro_batching=MicroBatchConfig(2), temperature=1.0)[0]

    def addresses() -> list[set[int]]:
        return [{weight.data_ptr() for weight in weights} for weights in (own, frozen)]

    expected, before, addresses_before = logprobs(other), logprobs(policy), addresses()
    with pytest.raises(KeyError), policy.weights(frozen):
        assert addresses() == addresses_before[::-1]
        assert torch.equal(logprobs(policy), expected) and not torch.equal(before, expected)
        raise KeyError
    assert addresses() == addresses_before
    assert torch.equal(logprobs(policy), before) and all(map(torch.equal, policy.snapshot(), start))


def test_contents_change_places_to_the_last_bit():
    """How weights and their reference in host memory change places on a GPU."""
    one, other = torch.randn(2, 3, 5).bfloat16()
    kept, addresses = (one.clone(), other.clone()), (one.data_ptr(), other.data_ptr())
    exchange_contents(one, other)
    assert torch.equal(one, kept[1]) and torch.equal(other, kept[0])
    assert (one.data_ptr(), other.data_ptr()) == addresses
