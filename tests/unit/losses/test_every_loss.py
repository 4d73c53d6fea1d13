"""What all losses share: padding, gradients, micro-batches, checks of values, and arguments that do not fit."""

import math
from functools import partial

import pytest
import torch
from helpers.synchronisations import counted

from nemo_edo import losses
from nemo_edo.config import DPOLossConfig, GRPOLossConfig
from nemo_edo.losses.term import REDUCTIONS, reduce_tokens

GRPO = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "sampler_logprobs", "exploration_factors", "selected")
BEHAVIOR = ("logprobs", "behavior_logprobs")
PAIRS = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
GRPO_CONFIGS = {
    "a": GRPOLossConfig(importance_sampling_level="sequence", sampler_correction="tis", tis_cap=1.1, alpha=1.0,
                        covariance_control="clip-cov", exploration_control="noise", log_ratio_floor=-0.1),
    "b": GRPOLossConfig(aggregation="token-mean", sampler_correction="icepop", icepop_low=0.6, icepop_high=1.5,
                        alpha=1.0, covariance_control="kl-cov", dual_clip=1.3, kl_estimator="k2", exploration_tokens=3),
    "c": GRPOLossConfig(aggregation="token-mean", sampler_correction="sequence-mask", sequence_mask_low=0.6, alpha=1.0,
                        covariance_control="kl-cov", surrogate="cispo", kl_importance="ratio"),
}


def of_tokens(function, *tensors, **settings):
    return partial(function, **settings), tensors, {"mask_BT" if "_BT" in tensors[0] else "mask": torch.clone}


def rows(mask_BT):
    return mask_BT.any(dim=1)


def of_pairs(function, *samples, masks=("mask",), **settings):
    return partial(function, beta=0.3, **settings), (*PAIRS, *samples), dict.fromkeys(masks, rows)


# Each function with its settings, the tensors that it takes, and its masks as functions of the tokens that count. Its
# gradient goes into the first tensor and those in TRAINED.
TRAINED = {"policy_rejected", "policy_on_reference_samples", "policy_calibration", "policy_samples", "sample_logprobs",
           "negative_scores"}
TOKEN_LOSSES = {
    "sft_loss": of_tokens(losses.sft_loss, "logprobs_BT"),
    "entropy_bonus": of_tokens(losses.entropy_bonus, "entropies_BT", reduction="token-mean"),
    "ppo_clip_loss": of_tokens(losses.ppo_clip_loss, "logprobs", "old_logprobs", "advantages", clip_low=0.2,
                               clip_high=0.2, reduction="seq-sum"),
    **{f"grpo_loss {key}": of_tokens(losses.grpo_loss, *GRPO, config=config) for key, config in GRPO_CONFIGS.items()},
}
for reduction in REDUCTIONS:
    options = {"reduction": reduction, "norm_length": 7}
    of_log_ratio = partial(of_tokens, log_ratio_floor=-0.2, **options)
    TOKEN_LOSSES |= {
        f"reduce_tokens {reduction}": of_tokens(reduce_tokens, "values_BT", **options),
        f"exploration {reduction}": of_log_ratio(losses.exploration_term, "logprobs", "old_logprobs", "weights"),
        f"noise {reduction}": of_log_ratio(losses.exploration_noise_term, "logprobs", "old_logprobs", "weights"),
    }
biased = partial(of_pairs, masks=("mask", "sample_mask"), alpha=0.4)
ranking = ("positive_scores", "negative_scores"), {"negative_mask": torch.clone}
PREFERENCES = {
    "dpo_loss": of_pairs(losses.dpo_loss, label_smoothing=0.1),
    "ipo_loss": of_pairs(losses.ipo_loss),
    "xpo_loss": biased(losses.xpo_loss, "policy_on_reference_samples"),
    "selm_loss": biased(losses.selm_loss, "policy_samples", "ref_samples"),
    "vpo_loss": of_pairs(losses.vpo_loss, "policy_calibration", "ref_calibration", alpha=0.4,
                         masks=("mask", "calibration_mask")),
    "ed_idpo_loss": (partial(losses.ed_idpo_loss, config=DPOLossConfig(alpha=1.0, log_ratio_floor=-0.1)),
                     (*PAIRS, "sample_logprobs", "sample_old_logprobs", "sample_weights"),
                     {"pair_mask": rows, "sample_mask": torch.clone}),
    "softmax ranking": (partial(losses.ranking_nce_loss, l2=0.1), *ranking),
    "uniform ranking": (partial(losses.ranking_nce_loss, weighting="uniform"), *ranking),
}
DIFFERENTIABLE = TOKEN_LOSSES | PREFERENCES | {
    "sequence_logprobs": of_tokens(losses.sequence_logprobs, "logprobs"),
    "mean sequence_logprobs": of_tokens(losses.sequence_logprobs, "logprobs", length_normalized=True),
}
SUMS = {
    "floor_share": of_tokens(losses.floor_share, "logprobs", "old_logprobs", log_ratio_floor=-0.2),
    "sampler_gap": of_tokens(losses.sampler_gap, "logprobs", "sampler_logprobs"),
    "preference_metrics": of_pairs(losses.preference_metrics),
}
FUNCTIONS = DIFFERENTIABLE | SUMS | {
    "token weights": of_tokens(losses.truncated_importance_weights, *BEHAVIOR, cap=1.1),
    "sequence weights": of_tokens(losses.truncated_importance_weights, *BEHAVIOR, cap=1.1, level="sequence"),
    "icepop": of_tokens(losses.icepop_weights, *BEHAVIOR, low=0.7, high=1.2),
    "sequence-mask": of_tokens(losses.sequence_masked_weights, *BEHAVIOR, low=0.7, high=1.2),
    "sampler_mismatch": of_tokens(losses.sampler_mismatch, "logprobs", "sampler_logprobs"),
    "covariances": of_tokens(losses.token_covariances, "logprobs", "advantages"),
    "clip-cov": of_tokens(losses.clip_cov_selection, "covariances", share=0.3, low=-5, high=5, seed=1),
    "kl-cov": of_tokens(losses.kl_cov_selection, "covariances", share=0.3),
    "token_spread": of_tokens(losses.token_spread, "logprobs", "entropies", "old_logprobs"),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_loss = pytest.mark.parametrize("name", TOKEN_LOSSES | PREFERENCES)


def tensors_of(batch, name) -> dict[str, torch.Tensor]:
    known = {"logprobs": batch.logprobs.detach(), "logprobs_BT": batch.old, "values_BT": batch.old,
             "ref_logprobs": batch.ref, "covariances": batch.ref, "advantages": batch.advantages,
             "weights": batch.ref.exp(), "exploration_factors": batch.advantages.abs(), "entropies": -batch.ref,
             "entropies_BT": -batch.ref, "selected": (batch.ref > -0.8).double(), "policy_chosen": batch.ref[:, 0],
             "sample_logprobs": batch.logprobs.detach(), "sample_weights": batch.advantages.abs(),
             "negative_scores": batch.ref, "policy_samples": batch.ref[:, 1]}
    of_row = batch.old[:, 0]
    one_for_each_row = ("policy_", "ref_chosen", "ref_rejected", "ref_samples", "ref_calibration", "positive_scores")
    return {key: known.get(key, of_row if key.startswith(one_for_each_row) else batch.old)
            for key in FUNCTIONS[name][1]}


def call(name, tensors, mask_BT, /, **changes):
    function, _, masks = FUNCTIONS[name]
    return function(**{**tensors, **{key: shaped(mask_BT) for key, shaped in masks.items()}, **changes})


def flat(result) -> list[torch.Tensor]:
    """All sums and counts, or other numbers."""
    if isinstance(result, losses.LossTerm):
        return [result.sum, torch.as_tensor(result.count)]
    if isinstance(result, (torch.Tensor, float)):
        return [torch.as_tensor(result)]
    return [x for part in (result.values() if isinstance(result, dict) else result) for x in flat(part)]


def means(values) -> torch.Tensor:
    """The sum of what has a gradient, each by its count."""
    return sum(total / count for total, count in zip(values[::2], values[1::2], strict=True) if total.requires_grad)


def values_and_gradients(name, tensors, mask):
    leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    values = flat(call(name, leaves, mask))
    total = sum(value.sum() for value in values if value.requires_grad)  # 0: none has a gradient
    gradients = torch.autograd.grad(total, [*leaves.values()], allow_unused=True) if torch.is_tensor(total) else ()
    return values, {key: x for key, x in zip(leaves, gradients, strict=False) if x is not None}


@every_function
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_content_changes_neither_value_nor_gradient(random_batch, name, garbage):
    for seed in range(3):
        batch, results = random_batch(seed), []
        for filler in (0.0, garbage):
            tensors = {key: torch.where(batch.mask == 1 if value.ndim == 2 else batch.lengths > 0, value, filler)
                       for key, value in tensors_of(batch, name).items()}
            values, gradients = values_and_gradients(name, tensors, batch.mask)
            results.append([*values, *gradients.values()])
        assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


@every_function
def test_gradients_flow_into_the_policys_values_alone(random_batch, name):
    batch = random_batch(0)
    tensors = tensors_of(batch, name)
    _, gradients = values_and_gradients(name, tensors, batch.mask)
    trained = {key for key in tensors if key == next(iter(tensors)) or key in TRAINED}
    assert gradients.keys() == (trained if name in DIFFERENTIABLE else set())
    assert all(gradient.any() for gradient in gradients.values())


@every_function
@pytest.mark.parametrize("broken", ["shape", torch.nan, torch.inf, -torch.inf])
def test_an_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    tensors = tensors_of(batch, name)
    for key, value in tensors.items():
        wrong = value[1:] if broken == "shape" else value.clone().index_fill_(0, torch.tensor(0), broken)
        compared = broken == "shape" and key.startswith(("policy_", "negative_"))  # with another one, which is named
        with pytest.raises(ValueError, match="^\\w+ has shape" if compared else f"^{key} has "):
            call(name, {**tensors, key: wrong}, batch.mask)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_is_an_error_or_gives_zero_with_a_gradient_of_zeros(name, shape):
    tensors = {key: torch.full(shape, torch.nan, requires_grad=True) for key in FUNCTIONS[name][1]}
    with pytest.raises(ValueError, match="mask.* is empty"):
        call(name, tensors, torch.zeros(shape))
    total, count, *_ = flat(call(name, tensors, torch.zeros(shape), on_empty="zero"))
    assert (total.item(), int(count), losses.LossTerm(total, count).mean().item()) == (0, 0, 0)
    assert torch.equal(torch.autograd.grad(total, next(iter(tensors.values())))[0], torch.zeros(shape))


@pytest.mark.parametrize("name", [name for name in TOKEN_LOSSES | PREFERENCES | SUMS if "grpo" not in name])
@pytest.mark.parametrize("cuts", [(1,), (2, 2, 4), (1, 2, 3, 5)], ids=str)
def test_micro_batches_add_up_to_the_whole_batch(random_batch, name, cuts):
    for seed in range(3):
        batch = random_batch(seed)
        leaves = {key: x.clone().requires_grad_() for key, x in tensors_of(batch, name).items()}
        whole, total = flat(call(name, leaves, batch.mask)), None
        for start, end in zip((0, *cuts), (*cuts, 6), strict=True):
            if batch.mask[start:end].any():  # padding alone is no micro-batch
                part = flat(call(name, {key: x[start:end] for key, x in leaves.items()}, batch.mask[start:end]))
                total = part if total is None else [x + y for x, y in zip(total, part, strict=True)]
        for found, expected in zip(total, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        if name in DIFFERENTIABLE:
            gradients = [torch.autograd.grad(means(x), leaves.values(), allow_unused=True) for x in (total, whole)]
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


ALL, HALVES, FAR = torch.ones(6, 5), torch.full((6, 5), 0.5), torch.full((6, 5), -1000.0)
SINGLE = dict.fromkeys(BEHAVIOR, torch.zeros(6, 5))
ETO = {"config": DPOLossConfig(alpha=0.0)}
NO_WEIGHTS, NO_FLOORS, NO_BETAS = (-0.1, math.nan, math.inf), (0.0, 0.1, math.nan), (0.0, -0.1, math.nan, math.inf)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("reduce_tokens token-mean", {"mask_BT": ALL[0]}, r"mask has shape \(5,\)"),
    ("reduce_tokens token-mean", {"mask_BT": HALVES}, "mask has values other than 0 and 1"),
    *(("reduce_tokens token-mean", {option: "some"}, f"{option} is 'some', expected one of")
      for option in ("reduction", "rows", "on_empty")),
    *(("reduce_tokens seq-mean-token-sum-norm", {"norm_length": length}, f"norm_length is {length}")
      for length in (0, math.inf, math.nan)),
    ("exploration seq-sum", {"old_logprobs": None}, "old_logprobs is None"),
    ("exploration seq-sum", {"old_logprobs": HALVES}, r"old_logprobs has 0.5 at \[0, 0\]"),
    *((name, {"log_ratio_floor": floor}, "log_ratio_floor is")
      for name in ("exploration seq-sum", "floor_share") for floor in NO_FLOORS),
    *(("token weights", {"cap": cap, **SINGLE}, "cap is") for cap in (0.0, math.nan, 1e39)),
    *((name, {"level": "group"}, "level is 'group'") for name in ("token weights", "icepop")),
    ("sequence-mask", {"low": 2.0, "high": 0.5}, "low and high are 2.0 and 0.5"),
    *(("icepop", {"low": low, "high": high}, "low and high are")
      for low, high in ((-0.1, 2.0), (2.0, 2.0), (0.5, math.inf), (math.nan, 2.0))),
    ("grpo_loss a", {"old_logprobs": FAR}, "the ratio exp"),
    ("grpo_loss a", {"logprobs": FAR, "old_logprobs": FAR}, "the KL estimate"),
    ("grpo_loss a", {"ref_logprobs": None}, "ref_logprobs is None, but beta is 0.04"),
    ("grpo_loss b", {"sampler_logprobs": None}, "sampler_logprobs is None, but sampler_correction is 'icepop'"),
    ("grpo_loss a", {"config": GRPOLossConfig()}, "selected is given, but covariance_control is none"),
    ("grpo_loss b", {"selected": HALVES}, "selected has values other than 0 and 1"),
    *((name, {"exploration_weight": weight}, "exploration_weight is")
      for name in ("grpo_loss a", "ed_idpo_loss") for weight in NO_WEIGHTS),
    *((name, {"beta": beta}, f"beta is {beta}")
      for name in ("dpo_loss", "ipo_loss", "preference_metrics") for beta in NO_BETAS),
    ("dpo_loss", {"mask": ALL[0]}, r"mask has shape \(5,\), expected \(6,\)"),
    ("ed_idpo_loss", {"pair_mask": HALVES[:, 0], **ETO}, "pair_mask has values other than 0 and 1"),
    ("ed_idpo_loss", {"sample_mask": ALL[1:], **ETO}, r"sample_logprobs has .*, but sample_mask has \(5, 5\)"),
    ("ed_idpo_loss", {"sample_mask": 0 * ALL, **ETO}, "sample_mask is empty"),
    ("softmax ranking", {"weighting": "mean"}, "weighting is 'mean'"),
    ("softmax ranking", {"l2": -0.1}, "l2 is -0.1"),
    ("softmax ranking", {"negative_mask": ALL[1:]}, r"negative_mask has shape \(5, 5\), expected \(6, 5\)"),
    ("softmax ranking", {"negative_mask": HALVES}, "negative_mask has values other than 0 and 1"),
])
def test_settings_and_masks_that_do_not_fit_are_named(random_batch, name, changes, message):
    batch = random_batch(0)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(name, tensors_of(batch, name), batch.mask, **changes)


# Checks of values


def numbers_of(name, mask):
    """The function of the tensors alone, with all of its results in one tensor."""
    def numbers(*tensors):
        values = flat(call(name, dict(zip(FUNCTIONS[name][1], tensors, strict=True)), mask))
        return torch.stack([value.double() for value in values])

    return numbers


@every_loss
def test_a_loss_waits_for_the_device_once_and_never_without_checks(random_batch, name):
    batch = random_batch(0)
    with counted() as asked:
        call(name, tensors_of(batch, name), batch.mask)
    assert sum(asked.values()) == 1, asked
    with counted() as asked, losses.without_checks():
        call(name, tensors_of(batch, name), batch.mask)
    assert not asked


def test_several_losses_are_checked_together_and_the_first_fault_is_named(random_batch):
    batch = random_batch(0)
    with counted() as asked, losses.one_check():
        for name in TOKEN_LOSSES | PREFERENCES:
            call(name, tensors_of(batch, name), batch.mask)
    assert sum(asked.values()) == 1, asked
    broken = batch.old.clone()
    broken[0, 3] = torch.nan
    with pytest.raises(losses.NotFinite, match=r"^logprobs_BT has NaN .* first at \[0, 3\]"), losses.one_check():
        losses.sft_loss(batch.old, batch.mask)
        losses.sft_loss(broken, batch.mask)
        losses.sft_loss(batch.old, 2 * batch.mask)


@pytest.mark.parametrize("name", ["sft_loss", "entropy_bonus", "exploration seq-sum", "grpo_loss a", "grpo_loss b",
                                  "grpo_loss c", "ed_idpo_loss"])
def test_losses_compile_without_a_graph_break(random_batch, name):
    batch = random_batch(0)
    loss, leaves = numbers_of(name, batch.mask), [x.clone().requires_grad_() for x in tensors_of(batch, name).values()]
    results = [torch.compile(loss, fullgraph=True, backend="eager")(*leaves), loss(*leaves)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), leaves, allow_unused=True) for x in results))


@every_loss
def test_losses_run_under_vmap_without_checks(random_batch, name):
    batch = random_batch(0)
    loss, tensors = numbers_of(name, batch.mask), tensors_of(batch, name).values()
    with losses.without_checks():
        found = torch.func.vmap(loss)(*(torch.stack([x, x.flip(0)]) for x in tensors))
    torch.testing.assert_close(found, torch.stack([loss(*tensors), loss(*(x.flip(0) for x in tensors))]))


def test_without_checks_a_value_that_does_not_fit_is_not_found_but_a_shape_is():
    with losses.without_checks():
        assert reduce_tokens(math.nan * ALL, ALL, "token-mean").sum.isnan()
        with pytest.raises(ValueError, match="^values_BT has shape"):
            reduce_tokens(ALL[1:], ALL, "token-mean")
