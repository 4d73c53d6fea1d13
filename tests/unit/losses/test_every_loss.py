"""What all functions of masked token values share: padding, gradients, micro-batches, and arguments that do not fit."""

from functools import partial

import pytest
import torch

from nemo_edo.losses import (
    GRPOLossConfig,
    LossTerm,
    clip_cov_selection,
    entropy_bonus,
    exploration_noise_term,
    exploration_term,
    floor_share,
    grpo_loss,
    icepop_weights,
    kl_cov_selection,
    ppo_clip_loss,
    sampler_gap,
    sampler_mismatch,
    sequence_logprobs,
    sequence_masked_weights,
    sft_loss,
    token_covariances,
    token_spread,
    truncated_importance_weights,
)
from nemo_edo.losses.term import REDUCTIONS, reduce_tokens

EXPLORATION = ("logprobs", "old_logprobs", "weights")
SAMPLER = ("logprobs", "sampler_logprobs")
GRPO = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "sampler_logprobs", "exploration_factors", "selected")
BEHAVIOR = ("logprobs", "behavior_logprobs")
grpo_a = GRPOLossConfig(importance_sampling_level="sequence", sampler_correction="tis", tis_cap=1.1, alpha=1.0,
                        covariance_control="clip-cov", exploration_control="noise", log_ratio_floor=-0.1)
grpo_b = GRPOLossConfig(aggregation="token-mean", sampler_correction="icepop", icepop_low=0.6, icepop_high=1.5,
                        alpha=1.0, covariance_control="kl-cov", dual_clip=1.3, kl_estimator="k2")
grpo_c = GRPOLossConfig(aggregation="token-mean", sampler_correction="sequence-mask", sequence_mask_low=0.6, alpha=1.0,
                        covariance_control="kl-cov", surrogate="cispo", kl_importance="ratio")
# A function of a mask and the tensors that are named, whose gradient goes into the first one alone.
DIFFERENTIABLE = {
    "sft_loss": (sft_loss, ("logprobs_BT",)),
    "entropy_bonus": (partial(entropy_bonus, reduction="token-mean"), ("entropies_BT",)),
    "sequence_logprobs": (sequence_logprobs, ("logprobs",)),
    "mean sequence_logprobs": (partial(sequence_logprobs, length_normalized=True), ("logprobs",)),
    "ppo_clip_loss": (partial(ppo_clip_loss, clip_low=0.2, clip_high=0.2, reduction="seq-sum"),
                      ("logprobs", "old_logprobs", "advantages")),
    "grpo_loss a": (partial(grpo_loss, config=grpo_a), GRPO),
    "grpo_loss b": (partial(grpo_loss, config=grpo_b), GRPO),
    "grpo_loss c": (partial(grpo_loss, config=grpo_c), GRPO),
}
for reduction in REDUCTIONS:
    options = {"reduction": reduction, "norm_length": 7}
    DIFFERENTIABLE |= {
        f"reduce_tokens {reduction}": (partial(reduce_tokens, **options), ("values_BT",)),
        f"exploration {reduction}": (partial(exploration_term, log_ratio_floor=-0.2, **options), EXPLORATION),
        f"noise {reduction}": (partial(exploration_noise_term, log_ratio_floor=-0.2, **options), EXPLORATION),
    }
WITHOUT_GRADIENT = {
    "floor_share": (partial(floor_share, log_ratio_floor=-0.2), ("logprobs", "old_logprobs")),
    "token weights": (partial(truncated_importance_weights, cap=1.1), BEHAVIOR),
    "sequence weights": (partial(truncated_importance_weights, cap=1.1, level="sequence"), BEHAVIOR),
    "icepop": (partial(icepop_weights, low=0.7, high=1.2), BEHAVIOR),
    "sequence-mask": (partial(sequence_masked_weights, low=0.7, high=1.2), BEHAVIOR),
    "sampler_gap": (sampler_gap, SAMPLER),
    "sampler_mismatch": (sampler_mismatch, SAMPLER),
    "covariances": (token_covariances, ("logprobs", "advantages")),
    "clip-cov": (partial(clip_cov_selection, share=0.3, low=-5, high=5, seed=1), ("covariances",)),
    "kl-cov": (partial(kl_cov_selection, share=0.3), ("covariances",)),
    "token_spread": (token_spread, ("logprobs", "entropies", "old_logprobs")),
}
FUNCTIONS = DIFFERENTIABLE | WITHOUT_GRADIENT
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def tensors_of(batch, names) -> dict[str, torch.Tensor]:
    known = {"logprobs": batch.logprobs.detach(), "logprobs_BT": batch.old, "values_BT": batch.old,
             "ref_logprobs": batch.ref, "covariances": batch.ref, "advantages": batch.advantages,
             "weights": batch.ref.exp(), "exploration_factors": batch.advantages.abs(), "entropies": -batch.ref,
             "entropies_BT": -batch.ref, "selected": (batch.ref > -0.8).double()}
    return {name: known.get(name, batch.old) for name in names}


def call(name, tensors, mask):
    function, _ = FUNCTIONS[name]
    return function(**tensors, **{"mask_BT" if "_BT" in next(iter(tensors)) else "mask": mask})


def flat(result) -> list[torch.Tensor]:
    if isinstance(result, LossTerm):
        return [result.sum, torch.as_tensor(result.count)]
    if isinstance(result, torch.Tensor | float):
        return [torch.as_tensor(result)]
    return [x for part in (result.values() if isinstance(result, dict) else result) for x in flat(part)]


def values_and_gradients(name, tensors, mask):
    leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    values = flat(call(name, leaves, mask))
    differentiable = [value.sum() for value in values if value.requires_grad]
    if not differentiable:
        return values, []
    return values, torch.autograd.grad(sum(differentiable), list(leaves.values()), allow_unused=True)


@every_function
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_content_changes_neither_value_nor_gradient(random_batch, name, garbage):
    for seed in range(3):
        batch, results = random_batch(seed), []
        for filler in (0.0, garbage):
            tensors = {
                key: torch.where(batch.mask == 1 if value.ndim == 2 else batch.lengths > 0, value, filler)
                for key, value in tensors_of(batch, FUNCTIONS[name][1]).items()
            }
            values, gradients = values_and_gradients(name, tensors, batch.mask)
            results.append([*values, *gradients[:1]])
        assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


@every_function
def test_gradients_flow_into_the_policys_values_alone(random_batch, name):
    batch = random_batch(0)
    _, gradients = values_and_gradients(name, tensors_of(batch, FUNCTIONS[name][1]), batch.mask)
    assert bool(gradients) == (name in DIFFERENTIABLE)
    assert all(x is None for x in gradients[1:]) and (not gradients or gradients[0].any())


@every_function
@pytest.mark.parametrize("broken", ["shape", torch.nan, torch.inf, -torch.inf])
def test_an_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    tensors = tensors_of(batch, FUNCTIONS[name][1])
    for key, value in tensors.items():
        wrong = value[1:] if broken == "shape" else value.clone().index_fill_(0, torch.tensor(0), broken)
        with pytest.raises(ValueError, match=f"^{key} has "):
            call(name, {**tensors, key: wrong}, batch.mask)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "sequence_logprobs" not in name])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_is_an_error_or_gives_zero_with_a_gradient_of_zeros(name, shape):
    function, names = FUNCTIONS[name]
    tensors = {key: torch.full(shape, torch.nan, requires_grad=True) for key in names}
    with pytest.raises(ValueError, match="mask.* is empty"):
        call(name, tensors, torch.zeros(shape))
    mask = {"mask_BT" if "_BT" in names[0] else "mask": torch.zeros(shape)}
    total, count, *_ = flat(function(**tensors, **mask, on_empty="zero"))
    assert (total.item(), int(count), LossTerm(total, count).mean().item()) == (0, 0, 0)
    assert torch.equal(torch.autograd.grad(total, tensors[names[0]])[0], torch.zeros(shape))


SUMS_AND_COUNTS = ("sft_loss", "entropy_bonus", "ppo_clip_loss", "reduce_tokens", "exploration", "noise",
                   "floor_share", "sampler_gap")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith(SUMS_AND_COUNTS)])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 2, 4), (1, 2, 3, 5)], ids=str)
def test_micro_batches_add_up_to_the_whole_batch(random_batch, name, cuts):
    for seed in range(3):
        batch = random_batch(seed)
        leaves = {key: x.clone().requires_grad_() for key, x in tensors_of(batch, FUNCTIONS[name][1]).items()}
        first = next(iter(leaves.values()))
        whole, total = flat(call(name, leaves, batch.mask)), None
        for start, end in zip((0, *cuts), (*cuts, 6), strict=True):
            if batch.mask[start:end].any():  # padding alone is no micro-batch
                rows = {key: x[start:end] for key, x in leaves.items()}
                part = flat(call(name, rows, batch.mask[start:end]))
                total = part if total is None else [x + y for x, y in zip(total, part, strict=True)]
        for found, expected in zip(total, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        if whole[0].requires_grad:
            gradients = [torch.autograd.grad(x[0] / x[1], first)[0] for x in (total, whole)]
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
