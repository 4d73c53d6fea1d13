"""Losses on preference pairs (DPO, its relatives, and ED-iDPO), and the ranking loss of reward models.

All of them are a loss of the margin between the implicit rewards of a chosen and a rejected response,

    margin = [log pi_theta(y_w) - log pi_ref(y_w)] - [log pi_theta(y_l) - log pi_ref(y_l)]

and some add a bias on further samples, which lowers (or raises) their likelihood:

==============  =========================  ===================  ==================================================
method          loss of the margin         reference pi_ref     added term: coefficient, value, samples from
==============  =========================  ===================  ==================================================
DPO             ``dpo_loss``               initial policy       none (one static set of pairs)
cDPO            ... with label smoothing   initial policy       none
IPO             ``ipo_loss``               initial policy       none
iterative DPO   ``dpo_loss``               previous iterate     none (pairs from the previous iterate)
ETO             ``ed_idpo_loss``           initial policy       alpha = 0 (pairs from the previous iterate)
ED-iDPO         ``ed_idpo_loss``           initial policy       alpha beta (log pi_theta - log pi_old), pi_old: the
                                                                previous iterate, all of its responses
XPO             ``xpo_loss``               initial policy       alpha log pi_theta, pi_ref
SELM            ``selm_loss``              previous iterate     alpha beta (log pi_theta - log pi_ref), its
                                                                selected responses
VPO             ``vpo_loss``               initial policy       +alpha beta (log pi_theta - log pi_ref) online,
                                                                -alpha beta (...) offline, a fixed calibration
                                                                policy
==============  =========================  ===================  ==================================================

Which policy the reference is, is the caller's choice: the functions see log-probabilities only. Pairs and samples
differ in number, so a bias is a separate term: each is divided by its global count, and then they are added.

Dimensions: P pairs, B sampled responses, T response tokens, Q questions, K negatives of a question.
Log-probabilities are natural logs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_edo.config import DPOLossConfig
from nemo_edo.losses.checks import check_coefficient, checked, constant, require_finite
from nemo_edo.losses.exploration import below_floor, step_weight, weighted_log_ratio
from nemo_edo.losses.term import (
    LossTerm,
    Reduction,
    per_token,
    read_rows,
    read_tokens,
    sum_over_rows,
    token_mean,
    valid_entries,
)


@checked
def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, length_normalized: bool = False) -> Tensor:
    """log pi(y|x) of each sequence: the sum over its tokens (logprobs, mask: [B, T]), or with length_normalized their
    mean; [B]. A sequence without a token: 0."""
    valid, (logprobs,) = read_tokens(mask, "zero", logprobs=logprobs)
    sums_B = logprobs.sum(dim=1)
    return sums_B / valid.sum(dim=1).clamp(min=1) if length_normalized else sums_B


@checked
def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
) -> LossTerm:
    """-log sigmoid(beta * margin), in nats, summed over pairs; count = pairs (Rafailov et al. 2023, eq. 7).

    policy_chosen, policy_rejected, ref_chosen, ref_rejected: [P] sequence log-probabilities (``sequence_logprobs``)
        of y_w and y_l under pi_theta and pi_ref. The gradient flows through the policy's alone.
    beta: strength of the trust region, above 0: the implicit reward is beta * log(pi_theta / pi_ref).
    label_smoothing: eps in [0, 0.5), the assumed share of pairs with exchanged labels; the loss is then
        -(1 - eps) log sigmoid(beta * margin) - eps log sigmoid(-beta * margin) (conservative DPO, Mitchell 2023).
    mask: [P], 1 where a pair counts; None: all count. A pair with mask 0 contributes nothing, NaN included.
    Raises ValueError for shapes other than [P], NaN or infinity in a pair that counts, and settings out of range.
    """
    _check_beta(beta)
    valid_P, pairs = _read_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, mask)
    return sum_over_rows(_dpo(_margin(pairs), beta, label_smoothing), valid_P)


@checked
def ipo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    mask: Tensor | None = None,
) -> LossTerm:
    """(margin - 1 / (2 beta))^2, summed over pairs; count = pairs (Azar et al. 2024, eq. 17, where beta is tau).

    The equation takes token sums. TRL's implementation averages over the tokens of each response instead:
    ``sequence_logprobs`` with length_normalized gives that.
    """
    _check_beta(beta)
    valid_P, pairs = _read_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, mask)
    return sum_over_rows((_margin(pairs) - 1 / (2 * beta)).square(), valid_P)


@checked
def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    config: DPOLossConfig,
    *,
    mask: Tensor | None = None,
) -> LossTerm:
    """``dpo_loss`` or ``ipo_loss``, as config.preference_loss says; count = pairs."""
    valid_P, pairs = _read_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, mask)
    return sum_over_rows(_of_config(_margin(pairs), config), valid_P)


@checked
def preference_metrics(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    mask: Tensor | None = None,
) -> dict[str, LossTerm]:
    """What the pairs say about the policy; no gradient, count = pairs. Arguments as for ``dpo_loss``.

    reward_chosen, reward_rejected: implicit rewards beta * (log pi_theta - log pi_ref), in nats. reward_margin: their
    difference. reward_accuracy: 1 where it is above 0 (a tie does not count). logprobs_chosen, logprobs_rejected:
    log pi_theta, which show y_w and y_l falling together where the margin does not.
    """
    _check_beta(beta)
    return _pair_metrics(*_read_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, mask), beta)


@checked
def ed_idpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    sample_logprobs: Tensor,
    sample_old_logprobs: Tensor,
    sample_mask: Tensor,
    config: DPOLossConfig,
    *,
    pair_mask: Tensor | None = None,
    sample_weights: Tensor | None = None,
    exploration_weight: float | None = None,
    on_empty: str = "error",
) -> tuple[LossTerm, LossTerm, dict[str, LossTerm]]:
    """The minimised ED-iDPO loss in two terms, to be divided by two global counts and added, and its metrics:

        L = E_pairs[-log sigmoid(beta * margin)] + alpha * beta * E_{y~pi_old}[log pi_theta(y) - log pi_old(y)]

    preference: ``preference_loss``; count = pairs. exploration: ``exploration_term`` times the exploration weight;
    count = sampled responses. With weight 0 (ETO) it is a constant 0 without graph, and the total is bit-equal to the
    preference loss, in value and gradient.

    The preference term ignores lowering y_w and y_l together, and exploration rewards it: for any alpha > 0 the sum has
    no lower bound unless config.log_ratio_floor gives one. For a chosen response alone, explored with its own pair and
    y_l fixed, the optimum is finite: beta * margin = log((1 - alpha) / alpha).

    policy_chosen, policy_rejected, ref_chosen, ref_rejected: [P], as for ``dpo_loss``; pair_mask: [P], 1 where one
    counts.
    sample_logprobs, sample_old_logprobs: [B, T] of **all** responses that pi_old gave to the batch's prompts, with or
        without a pair, under pi_theta and pi_old. The gradient flows through the first.
    sample_mask: [B, T], 1 where a response token counts. A micro-batch without samples gives [0, T] for all three.
    config.length_normalized: the exploration term takes means over tokens ("seq-mean-token-mean"), not sums
    ("seq-sum"); the caller gives pairs to match (``sequence_logprobs``).
    sample_weights: [B] or [B, T] constants on the exploration term's tokens (``exploration_term``).
    exploration_weight: as for ``grpo_loss``. on_empty: for a sample_mask without a 1 (``term.read_tokens``).

    Metrics, without gradient: those of ``preference_metrics``; preference_loss; exploration (with the floor, without
    its weight; count = sampled responses), log_ratio (log pi_theta - log pi_old) and floor_fraction (count = tokens),
    response_length (tokens; count = sampled responses).
    """
    valid_P, pairs = _read_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, pair_mask, "pair_mask")
    preference = sum_over_rows(_of_config(_margin(pairs), config), valid_P)

    valid_BT, (logprobs, old_logprobs, weights) = read_tokens(
        sample_mask,
        on_empty if len(sample_mask) else "zero",
        mask_name="sample_mask",
        sample_logprobs=sample_logprobs,
        sample_old_logprobs=constant("sample_old_logprobs", sample_old_logprobs),
        sample_weights=None if sample_weights is None else per_token(sample_weights.detach(), sample_mask),
    )
    reduced = Reduction(valid_BT, "seq-mean-token-mean" if config.length_normalized else "seq-sum")
    log_ratio_BT = logprobs - old_logprobs
    exploration = reduced(weighted_log_ratio(log_ratio_BT, weights, config.log_ratio_floor))
    metrics = {
        **_pair_metrics(valid_P, pairs, config.beta),
        "preference_loss": preference.detached(),
        "exploration": exploration.detached(),
        "log_ratio": token_mean(log_ratio_BT, valid_BT),
        "floor_fraction": token_mean(below_floor(log_ratio_BT, config.log_ratio_floor), valid_BT),
        "response_length": LossTerm(valid_BT.sum().to(log_ratio_BT.dtype), reduced.count),
    }
    return preference, _weighted(exploration, step_weight(config, exploration_weight)), metrics


@checked
def xpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    policy_on_reference_samples: Tensor,
    *,
    beta: float,
    alpha: float,
    mask: Tensor | None = None,
    sample_mask: Tensor | None = None,
) -> tuple[LossTerm, LossTerm]:
    """DPO, and alpha * log pi_theta(y) for samples y of the *reference* policy (Xie et al. 2024, Algorithm 1).

    Returns the DPO term (count = pairs) and the bonus (count = samples; a constant 0 for alpha = 0), each to be divided
    by its own count and added. alpha, at least 0, is not multiplied by beta. The published sums over both sets are
    means here. The bonus has no lower bound. policy_on_reference_samples: [B] sequence log-probabilities under
    pi_theta; sample_mask: [B], 1 where one counts; all else as for ``dpo_loss``.
    """
    check_coefficient("alpha", alpha)
    preference = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=beta, mask=mask)
    samples = {"policy_on_reference_samples": policy_on_reference_samples}
    return preference, _bias(alpha, sample_mask, "sample_mask", **samples)


@checked
def vpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    policy_calibration: Tensor,
    ref_calibration: Tensor,
    *,
    beta: float,
    alpha: float,
    setting: str = "online",
    mask: Tensor | None = None,
    calibration_mask: Tensor | None = None,
) -> tuple[LossTerm, LossTerm]:
    """DPO, and +- alpha * beta * (log pi_theta(y) - log pi_ref(y)) for y of a fixed calibration policy.

    Value-incentivized preference optimization (Cen et al. 2024, Algorithms 1 and 2) biases the likelihood of the
    preferences by the value of the best policy. With rewards normalised to E_{y~pi_cal}[r] = 0 that value is
    J* = -beta * E_{y~pi_cal}[log pi - log pi_ref], and minimised is

    - setting "online": DPO - alpha J*, optimism: plus the log-ratio, which lowers the calibration samples' likelihood;
    - setting "offline": DPO + alpha J*, pessimism: minus the log-ratio, which raises it.

    Terms and counts as for ``xpo_loss``. Online the bias has no lower bound. policy_calibration, ref_calibration: [B]
    sequence log-probabilities of the calibration policy's samples under pi_theta and pi_ref; calibration_mask: [B].
    """
    if setting not in ("online", "offline"):
        raise ValueError(f"setting is {setting!r}, expected online or offline")
    check_coefficient("alpha", alpha)
    preference = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=beta, mask=mask)
    samples = {"policy_calibration": policy_calibration, "ref_calibration": ref_calibration.detach()}
    weight = alpha * beta if setting == "online" else -alpha * beta
    return preference, _bias(weight, calibration_mask, "calibration_mask", **samples)


@checked
def selm_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    policy_samples: Tensor,
    ref_samples: Tensor,
    *,
    beta: float,
    alpha: float,
    mask: Tensor | None = None,
    sample_mask: Tensor | None = None,
) -> tuple[LossTerm, LossTerm]:
    """DPO, and alpha * beta * (log pi_theta(y) - log pi_ref(y)) for the selected responses y (Zhang et al. 2024): the
    form of online ``vpo_loss`` with another sampler, the responses that SELM selects in each iteration; [B] each."""
    check_coefficient("alpha", alpha)
    preference = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=beta, mask=mask)
    samples = {"policy_samples": policy_samples, "ref_samples": ref_samples.detach()}
    return preference, _bias(alpha * beta, sample_mask, "sample_mask", **samples)


@checked
def ranking_nce_loss(
    positive_scores: Tensor,
    negative_scores: Tensor,
    *,
    l2: float = 0.0,
    negative_mask: Tensor | None = None,
    weighting: str = "softmax",
) -> LossTerm:
    """One positive against K sampled negatives, in nats, summed over questions Q; count = questions with a negative.

    | weighting | loss of a question                         | gradient                        |
    |-----------|--------------------------------------------|---------------------------------|
    | "softmax" | -r_+ + log(exp(r_+) + sum_k exp(r_k))      | p_+ - 1 on r_+, and p_k on r_k  |
    | "uniform" | -r_+ + mean_k r_k                          | -1 on r_+, and 1/K on each r_k  |

    with p the softmax over the K + 1 scores; both add l2 * (r_+^2 + mean_k r_k^2).

    "softmax" is the ranking loss of Ma and Collins (2018), which the paper's SearchLLM takes from BBox-Adapter (Sun et
    al. 2024): 0 for a perfect ranking, log(K + 1) for equal scores, and with K = 1 the Bradley-Terry loss. "uniform" is
    what BBox-Adapter's published code computes: its gradient does not look at the scores, and without l2 it is
    unbounded below.

    positive_scores: [Q] rewards r_+. negative_scores: [Q, K] rewards r_k. The gradient flows through both.
    negative_mask: [Q, K], 1 where a negative counts; None: all count. Means over k are over those. A question without
        any negative contributes nothing, the penalty and NaN included, and is not counted.
    Raises ValueError for other shapes, NaN or infinity at a score that counts, a negative or infinite l2, and an
    unknown weighting.
    """
    if weighting not in ("softmax", "uniform"):
        raise ValueError(f"weighting is {weighting!r}, expected softmax or uniform")
    check_coefficient("l2", l2)
    if negative_scores.ndim != 2 or positive_scores.shape != negative_scores.shape[:1]:
        raise ValueError(
            f"positive_scores has shape {tuple(positive_scores.shape)} and negative_scores "
            f"{tuple(negative_scores.shape)}, expected [Q] and [Q, K]"
        )
    valid_QK = valid_entries("negative_mask", negative_mask, negative_scores)
    negatives_QK = torch.where(valid_QK, negative_scores, 0.0)
    require_finite("negative_scores", negatives_QK)
    valid_Q, (positives_Q,) = read_rows(valid_QK.any(dim=1), positive_scores=positive_scores)
    count_Q = valid_QK.sum(dim=1).clamp(min=1)  # a question without negatives: 0 / 1

    if weighting == "softmax":
        # -log p_+ as -log sigmoid(r_+ - log sum_k exp(r_k)): no overflow, and exact where p_+ is all but 1.
        losses_Q = -F.logsigmoid(positives_Q - negatives_QK.masked_fill(~valid_QK, -torch.inf).logsumexp(dim=1))
    else:
        losses_Q = negatives_QK.sum(dim=1) / count_Q - positives_Q
    if l2 > 0:
        losses_Q = losses_Q + l2 * (positives_Q.square() + negatives_QK.square().sum(dim=1) / count_Q)
    return sum_over_rows(losses_Q, valid_Q)


def _read_pairs(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    mask: Tensor | None,
    mask_name: str = "mask",
) -> tuple[Tensor, list[Tensor]]:
    """Which pairs count, and the four log-probabilities; [P]."""
    return read_rows(
        mask,
        mask_name=mask_name,
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen.detach(),
        ref_rejected=ref_rejected.detach(),
    )


def _margin(pairs: list[Tensor]) -> Tensor:
    """[log pi_theta - log pi_ref](y_w) - [...](y_l) of each pair, with its gradient; [P]."""
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = pairs
    return (chosen_P - ref_chosen_P) - (rejected_P - ref_rejected_P)


def _dpo(margin_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number in [0, 0.5)")
    losses_P = -F.logsigmoid(beta * margin_P)
    if label_smoothing > 0:
        losses_P = (1 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-beta * margin_P)
    return losses_P


def _of_config(margin_P: Tensor, config: DPOLossConfig) -> Tensor:
    if config.preference_loss == "ipo":
        return (margin_P - 1 / (2 * config.beta)).square()
    return _dpo(margin_P, config.beta, config.label_smoothing)


def _pair_metrics(valid_P: Tensor, pairs: list[Tensor], beta: float) -> dict[str, LossTerm]:
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = (values_P.detach() for values_P in pairs)
    reward_chosen_P = beta * (chosen_P - ref_chosen_P)
    reward_rejected_P = beta * (rejected_P - ref_rejected_P)
    metrics_P = {
        "reward_chosen": reward_chosen_P,
        "reward_rejected": reward_rejected_P,
        "reward_margin": reward_chosen_P - reward_rejected_P,
        "reward_accuracy": (reward_chosen_P > reward_rejected_P).to(chosen_P.dtype),
        "logprobs_chosen": chosen_P,
        "logprobs_rejected": rejected_P,
    }
    return {name: sum_over_rows(values_P, valid_P) for name, values_P in metrics_P.items()}


def _bias(weight: float, mask: Tensor | None, mask_name: str, **samples: Tensor) -> LossTerm:
    """weight times the samples' log pi_theta, the first, minus log pi_ref, the second where it is given."""
    valid_B, (policy_B, *ref_B) = read_rows(mask, mask_name=mask_name, **samples)
    return _weighted(sum_over_rows(policy_B - ref_B[0] if ref_B else policy_B, valid_B), weight)


def _weighted(term: LossTerm, weight: float) -> LossTerm:
    """weight * term; for weight 0 a constant 0, so that the loss it is added to stays the same to the last bit."""
    return term.scaled(weight) if weight != 0 else LossTerm(torch.zeros_like(term.sum.detach()), term.count)


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise ValueError(f"beta is {beta}, expected a finite number above 0")
