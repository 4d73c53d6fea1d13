import math

import pytest
import torch

from nemo_edo.config import OptimizerConfig
from nemo_edo.losses import LossTerm, NotFinite, reduction_count, sft_loss
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.megatron.policy import exchange_contents


def sft(log_probs, entropies, micro):
    return {"sft": sft_loss(log_probs, micro.mask)}, {}


def broken(log_probs, entropies, micro):
    return {"sft": LossTerm(log_probs.sum() * torch.nan, micro.mask.sum())}, {}


def broken_gradient(log_probs, entropies, micro):
    """The loss is 0, its gradient infinite or NaN."""
    return {"sft": LossTerm((log_probs - log_probs.detach()).abs().sqrt().sum(), micro.mask.sum())}, {}


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture(scope="module")
def half(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2, dtype="bf16")


@pytest.fixture(scope="module")
def start(policy):
    return policy.snapshot()


@pytest.fixture(autouse=True)
def from_the_start(policy, start):
    policy.load(start)


def step(policy, batch, loss=sft) -> dict[str, float]:
    counts = {"sft": float(reduction_count(batch.mask, "token-mean"))}
    return policy.train_step(batch, loss, loss_counts=counts, micro_batching=MicroBatching(2), temperature=1.0)


# --- the optimizer ------------------------------------------------------------------------------------------------


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
        loss = sft_loss(tiny.dense_log_probs(model, batch.tokens)[0], batch.mask).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
        adamw.step()
        assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert not clip_grad or norm > 2 * clip_grad, "nothing to clip"
    after = tiny.exported(policy)
    for name, expected in model.named_parameters():
        assert (expected - before[name]).abs().max() > 1e-3, f"{name} has not moved"
        torch.testing.assert_close(after[name], expected.detach(), rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


MAX, MIN, WARMUP, STEPS = 1e-3, 1e-4, 2, 6


def expected_lr(schedule: str, done: int) -> float:
    if done <= WARMUP:
        return MAX * done / WARMUP
    left = 1 - (done - WARMUP) / (STEPS - WARMUP)
    share = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[schedule]
    return MIN + (MAX - MIN) * share


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_from_zero_and_decays_to_its_minimum_at_the_last_step(policy, tiny, schedule):
    policy.reset_optimizer(OptimizerConfig(lr=MAX, min_lr=MIN, warmup_steps=WARMUP, schedule=schedule), STEPS)
    batch = tiny.random_batch(rows=2)
    rates = [step(policy, batch)["lr"] for _ in range(STEPS + 1)]
    assert rates == pytest.approx([expected_lr(schedule, done) for done in range(STEPS + 1)])


def test_a_step_at_learning_rate_zero_leaves_every_weight_as_it_is(policy, tiny, start):
    policy.reset_optimizer(OptimizerConfig(lr=MAX, warmup_steps=1, weight_decay=0.1), STEPS)
    assert step(policy, tiny.random_batch(rows=2))["lr"] == 0.0
    assert all(map(torch.equal, policy.snapshot(), start))


def test_reset_optimizer_forgets_moments_and_schedule(policy, tiny, start):
    settings = OptimizerConfig(lr=MAX, min_lr=0.0, schedule="linear")
    batch = tiny.random_batch(rows=2)

    def first_step():
        policy.load(start)
        policy.reset_optimizer(settings, STEPS)
        return step(policy, batch), policy.snapshot()

    metrics, weights = first_step()
    step(policy, batch)
    again, weights_again = first_step()
    assert metrics == again
    assert all(map(torch.equal, weights, weights_again))


def refused(log_probs, entropies, micro):
    """A loss function that will not compute with such values."""
    raise NotFinite("log_probs has NaN")


@pytest.mark.parametrize("which", ["policy", "half"])
@pytest.mark.parametrize("loss", [broken, broken_gradient, refused])
def test_a_step_with_a_loss_or_gradient_that_is_not_finite_changes_nothing(request, tiny, which, loss):
    """Neither weights nor moments nor the learning rate's schedule: the steps behind it are those without it."""
    policy = request.getfixturevalue(which)
    start, batches = policy.snapshot(), [tiny.random_batch(rows=2, seed=seed) for seed in range(3)]

    def train(losses, batches) -> tuple[list, list]:
        policy.load(start)
        policy.reset_optimizer(OptimizerConfig(lr=MAX, warmup_steps=2), STEPS)
        reports = [step(policy, batch, loss) for batch, loss in zip(batches, losses, strict=True)]
        return reports, policy.snapshot()

    expected, weights = train([sft, sft, sft], batches)
    reports, found = train([sft, loss, sft, sft], [batches[0], tiny.random_batch(rows=2, seed=9), *batches[1:]])
    skipped = reports.pop(1)
    assert skipped["skipped"] == 1.0 and not math.isfinite(skipped["grad_norm"])
    assert reports == expected and {report["skipped"] for report in reports} == {0.0}
    assert all(map(torch.equal, found, weights)) and not all(map(torch.equal, weights, start))
    policy.load(start)


def test_a_norm_above_the_limit_is_not_stepped_on_and_one_at_the_limit_is(policy, tiny, start):
    policy.reset_optimizer(OptimizerConfig(lr=MAX), STEPS)
    batch = tiny.random_batch(rows=2)
    counts = {"sft": float(reduction_count(batch.mask, "token-mean"))}

    def apply(limit: float) -> dict[str, float]:
        policy.zero_grad()
        metrics = policy.forward_backward(batch, sft, loss_counts=counts, micro_batching=MicroBatching(2),
                                          temperature=1.0)
        return policy.apply_gradients(metrics["loss"], grad_norm_limit=limit)

    norm = apply(0.0)["grad_norm"]
    assert all(map(torch.equal, policy.snapshot(), start))
    assert not any(chunk_grad.any() for chunk_grad in map(lambda p: p.main_grad, policy._parameters()))
    assert apply(norm * (1 - 1e-6))["skipped"] == 1.0
    assert all(map(torch.equal, policy.snapshot(), start))
    assert apply(norm)["skipped"] == 0.0
    assert not all(map(torch.equal, policy.snapshot(), start))


def test_a_loss_that_is_not_finite_forbids_a_step_with_a_finite_gradient(policy, tiny, start):
    policy.reset_optimizer(OptimizerConfig(lr=MAX), STEPS)

    def constant(log_probs, entropies, micro):
        terms, metrics = sft(log_probs, entropies, micro)
        return {"sft": LossTerm(terms["sft"].sum + math.inf, terms["sft"].count)}, metrics

    report = step(policy, tiny.random_batch(rows=2), constant)
    assert report["skipped"] == 1.0 and math.isfinite(report["grad_norm"])
    assert all(map(torch.equal, policy.snapshot(), start))


def test_bf16_steps_too_small_for_bf16_add_up_in_fp32(half, tiny):
    """The spacing of bf16 between 1/8 and 1/4 is 2^-10: Adam's steps of 1e-4 are a fifth of what would round up."""
    half.reset_optimizer(OptimizerConfig(lr=1e-4), total_steps=10)
    batch = tiny.random_batch(rows=2)
    start = torch.cat([weight.flatten() for weight in half.snapshot()])
    chosen = (start.abs() > 1 / 8) & (start.abs() < 1 / 4)

    def share_that_moved() -> float:
        now = torch.cat([weight.flatten() for weight in half.snapshot()])
        return float((now != start)[chosen].float().mean())

    step(half, batch)
    assert share_that_moved() == 0.0
    for _ in range(9):
        step(half, batch)
    assert share_that_moved() > 0.3


# --- frozen weights -----------------------------------------------------------------------------------------------


@pytest.fixture
def other(tiny, tmp_path):
    return tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1))


def test_weights_computes_with_the_frozen_ones_and_restores_its_own_exactly(policy, tiny, start, other):
    batch = tiny.random_batch()

    def log_probs(policy):
        return policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)[0]

    own, frozen = log_probs(policy), log_probs(other)
    with policy.weights(other.snapshot()):
        inside = log_probs(policy)
    assert torch.equal(inside, frozen) and not torch.equal(own, frozen)
    assert torch.equal(log_probs(policy), own)
    assert all(map(torch.equal, policy.snapshot(), start))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_change_places_to_the_last_bit(dtype):
    """How weights and their reference in host memory change places on a GPU."""
    one, other = torch.randn(3, 5).to(dtype), torch.randn(3, 5).to(dtype)
    kept, addresses = (one.clone(), other.clone()), (one.data_ptr(), other.data_ptr())
    exchange_contents(one, other)
    assert torch.equal(one, kept[1]) and torch.equal(other, kept[0])
    assert (one.data_ptr(), other.data_ptr()) == addresses


def test_weights_allocates_no_copy_of_the_model(policy, other):
    """Not of what is frozen, nor of the policy's own: the addresses in use are the same two sets."""
    def addresses(weights):
        return {weight.data_ptr() for weight in weights}

    frozen, own = other.snapshot(), [p for chunk in policy.chunks for p in chunk.parameters()]
    before = addresses(frozen), addresses(own)
    with policy.weights(frozen):
        assert (addresses(own), addresses(frozen)) == before
    assert (addresses(frozen), addresses(own)) == before


def test_weights_keeps_a_frozen_copy_of_finer_numbers_as_it_is(half):
    """The ema reference of a bf16 policy is fp32."""
    frozen = [weight.float() + 1e-4 for weight in half.snapshot()]
    kept = [weight.clone() for weight in frozen]
    with half.weights(frozen):
        inside = half.snapshot()
    assert all(torch.equal(now, weight.bfloat16()) for now, weight in zip(inside, kept, strict=True))
    assert all(map(torch.equal, frozen, kept))


def test_weights_restores_its_own_after_an_error(policy, start, other):
    with pytest.raises(KeyError), policy.weights(other.snapshot()):
        raise KeyError
    assert all(map(torch.equal, policy.snapshot(), start))


def test_weights_of_another_number_of_parameters_are_an_error(policy, start):
    with pytest.raises(ValueError, match="zip"), policy.weights(start[:-1]):
        pass


@pytest.mark.parametrize("name", ["policy", "half"])
def test_weights_in_the_middle_of_training_change_no_step(request, tiny, name):
    policy = request.getfixturevalue(name)
    start, batch = policy.snapshot(), tiny.random_batch(rows=2)
    frozen = [torch.zeros_like(weight) for weight in start]

    def train(swap: bool):
        policy.load(start)
        policy.reset_optimizer(OptimizerConfig(lr=MAX), STEPS)
        for _ in range(2):
            if swap:
                with policy.weights(frozen):
                    policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)
            step(policy, batch)
        return policy.snapshot()

    assert all(map(torch.equal, train(swap=False), train(swap=True)))


def test_a_snapshot_does_not_change_while_the_policy_trains(policy, tiny, start):
    copies = [weight.clone() for weight in start]
    policy.reset_optimizer(OptimizerConfig(lr=MAX), STEPS)
    step(policy, tiny.random_batch(rows=2))
    assert not all(map(torch.equal, policy.snapshot(), start))
    assert all(map(torch.equal, start, copies))


def test_a_bf16_step_after_load_starts_from_the_loaded_weights(half, tiny):
    """Not from the optimizer's own fp32 copies of what was there before."""
    start = half.snapshot()
    half.reset_optimizer(OptimizerConfig(lr=1e-6), STEPS)
    half.load([torch.full_like(weight, 0.5) for weight in start])
    step(half, tiny.random_batch(rows=2))
    assert all(((weight - 0.5).abs() < 0.01).all() for weight in half.snapshot())
    half.load(start)
