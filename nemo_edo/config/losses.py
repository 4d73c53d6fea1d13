"""Settings of the objectives in ``nemo_edo.losses``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from nemo_edo.config.checks import one_of, positive, require, share

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
SAMPLER_CORRECTIONS = ("none", "tis", "icepop", "sequence-mask")
CONTROLLERS = ("entropy", "gradient-share")
SCHEDULES = ("constant", "linear", "cosine", "warmup-hold-decay", *CONTROLLERS)
PAPER_ALPHA = 1e-3


class ExplorationWeight:
    """The factor in front of the exploration term, from ``alpha``, ``exploration_coefficient`` and ``beta``."""

    alpha: Optional[float]
    beta: float
    exploration_coefficient: Optional[float]

    @property
    def effective_alpha(self) -> Optional[float]:
        """alpha with its default; None where a coefficient replaces alpha * beta."""
        if self.exploration_coefficient is not None:
            return None
        return PAPER_ALPHA if self.alpha is None else self.alpha

    @property
    def exploration_weight(self) -> float:
        """alpha * beta, or the coefficient that replaces it."""
        if self.exploration_coefficient is not None:
            return self.exploration_coefficient
        return self.effective_alpha * self.beta


def _check_exploration(config: ExplorationWeight, section: str) -> None:
    alpha, coefficient, floor = config.alpha, config.exploration_coefficient, config.log_ratio_floor
    if alpha is not None and coefficient is not None:
        raise ValueError(
            f"{section}.alpha ({alpha}) and {section}.exploration_coefficient ({coefficient}) are both given; the "
            "coefficient replaces alpha * beta, so set one of them to null"
        )
    for name, value in (("alpha", alpha), ("exploration_coefficient", coefficient)):
        fits = value is None or 0 <= value < math.inf
        require(fits, f"{section}.{name}", value, "null or a number of at least 0: the term's sign is in the loss")
    require(floor is None or floor < 0, f"{section}.log_ratio_floor", floor, "null or a number below 0")


@dataclass
class GRPOLossConfig(ExplorationWeight):
    """The ED-GRPO objective (``losses.grpo_loss``). ``alpha = 0`` is GRPO."""

    surrogate: str = "clip"
    """clip: PPO's clipped ratio times advantage; cispo: every token's log-probability times its advantage and its
    ratio, a constant within the bounds; reinforce: log-probability times advantage, without ratio and clip."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low (with cispo, 1: none)."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high (DAPO: 0.28)."""
    dual_clip: Optional[float] = None
    """For negative advantages the surrogate is at least dual_clip * A (a number above 1)."""
    beta: float = 0.04
    """Weight of the KL to the reference policy."""
    kl_estimator: str = "k3"
    """k1, k2 or k3: how the KL to the reference is estimated from sampled tokens; k1+ and k3+: with the gradient of k2
    (``losses.kl_per_token``)."""
    kl_importance: str = "none"
    """What multiplies the KL's estimate, with its gradient, to descend the KL of the policy that samples: none;
    ratio, pi_theta / pi_old of the token (DeepSeek-V3.2, TRL's default, slime); on-policy, a 1 with the gradient of log
    pi_theta (NeMo-RL's default), exact before the first step of an iteration."""
    aggregation: str = "seq-mean-token-mean"
    """How token values become one number, in every term of the loss: seq-mean-token-mean (the paper), token-mean
    (DAPO) or seq-mean-token-sum-norm (Dr.GRPO); see ``losses.reduce_tokens``."""
    alpha: Optional[float] = None
    """Weight of the exploration term in units of beta; null: the paper's 1e-3, unless
    ``exploration_coefficient`` is given."""
    exploration_coefficient: Optional[float] = None
    """Replaces the product alpha * beta, so that beta = 0 need not switch exploration off."""
    log_ratio_floor: Optional[float] = None
    """A floor (below 0) under each token's log-ratio in the exploration term. Ours, not the paper's: off by default."""
    norm_length: Optional[int] = None
    """The constant length of ``seq-mean-token-sum-norm`` (Dr.GRPO), required by it."""
    importance_sampling_level: str = "token"
    """token: a ratio for each token; sequence: one for each response, exp of its mean log-ratio (GSPO)."""
    sampler_correction: str = "none"
    """For samples whose sampler's log-probabilities differ from the trainer's pi_old. none; tis: tokens are weighted by
    their ratio, truncated; icepop: by their ratio, and not at all where it is outside the bounds; sequence-mask: by
    their ratio, and not at all in responses whose mean log-ratio is outside the log of the bounds."""
    sampler_level: str = "token"
    """The ratio of tis and icepop. token: each token's own; sequence: the whole response's, the product of its tokens',
    as objectives by sequence (GSPO) need it."""
    tis_cap: float = 2.0
    """Upper bound on tis's weights pi_old / pi_gen."""
    icepop_low: float = 0.5
    """Lower bound on icepop's ratios pi_old / pi_gen."""
    icepop_high: float = 5.0
    """Upper bound on icepop's ratios pi_old / pi_gen."""
    sequence_mask_low: float = 0.999
    """Lower bound of sequence-mask on the geometric mean of a response's ratios pi_old / pi_gen."""
    sequence_mask_high: float = 1.002
    """Its upper bound."""
    exploration_control: str = "none"
    """none: the exploration term itself. noise: the control that weights it by the detached ratio pi_theta / pi_old,
    so that its expected gradient is zero and only noise of the same size is left."""
    exploration_tokens: Optional[int] = None
    """The exploration term runs over this many tokens at the beginning of each response only, with the denominator of
    all of them. Ours, not the paper's. null: over all tokens."""
    covariance_control: str = "none"
    """A baseline that bounds the loss of entropy by the tokens whose log-probability and advantage covary most. none;
    clip-cov: the selected tokens have no gradient; kl-cov: they pay for moving away from pi_old."""
    covariance_share: float = 2e-4
    """Share of the tokens that clip-cov or kl-cov select (kl-cov's authors take 2e-3 with their smaller model)."""
    clip_cov_low: float = 1.0
    """clip-cov selects at random among tokens with a covariance from here on, in nats times the advantage's unit."""
    clip_cov_high: float = 5.0
    """The upper bound of that covariance."""
    kl_cov_coefficient: float = 1.0
    """Weight of kl-cov's penalty |log pi_theta - log pi_old|."""

    def __post_init__(self) -> None:
        one_of("grpo.surrogate", self.surrogate, ("clip", "cispo", "reinforce"))
        fits = 0 <= self.clip_low < 1 or (self.surrogate == "cispo" and self.clip_low == 1)
        require(fits, "grpo.clip_low", self.clip_low, "a number in [0, 1), or 1 with surrogate cispo")
        for name, default in (("dual_clip", None), ("importance_sampling_level", "token")):
            value, only = getattr(self, name), "null" if default is None else default
            fits = self.surrogate == "clip" or value == default
            require(fits, f"grpo.{name}", value, f"{only} with surrogate {self.surrogate}, which has no other")
        require(self.clip_high >= 0, "grpo.clip_high", self.clip_high, "a number of at least 0")
        require(self.dual_clip is None or self.dual_clip > 1, "grpo.dual_clip", self.dual_clip, "null or a number > 1")
        require(self.beta >= 0, "grpo.beta", self.beta, "a number of at least 0")
        one_of("grpo.kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        one_of("grpo.kl_importance", self.kl_importance, ("none", "on-policy", "ratio"))
        one_of("grpo.aggregation", self.aggregation, AGGREGATIONS)
        needs_length = self.aggregation == "seq-mean-token-sum-norm"
        require(
            not needs_length or (self.norm_length or 0) > 0,
            "grpo.norm_length",
            self.norm_length,
            "a number above 0 with aggregation seq-mean-token-sum-norm",
        )
        _check_exploration(self, "grpo")
        one_of("grpo.importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        one_of("grpo.sampler_correction", self.sampler_correction, SAMPLER_CORRECTIONS)
        one_of("grpo.sampler_level", self.sampler_level, ("token", "sequence"))
        by_sequence = self.sampler_correction in ("tis", "icepop")
        fits = self.sampler_level == "token" or by_sequence
        require(fits, "grpo.sampler_level", self.sampler_level, "token, but with sampler_correction tis or icepop")
        one_of("grpo.exploration_control", self.exploration_control, ("none", "noise"))
        first = self.exploration_tokens
        require(first is None or first > 0, "grpo.exploration_tokens", first, "null or a number above 0")
        one_of("grpo.covariance_control", self.covariance_control, ("none", "clip-cov", "kl-cov"))
        positive(self, "grpo", "tis_cap", "kl_cov_coefficient")
        for name in ("icepop", "sequence_mask", "clip_cov"):
            low, high = f"{name}_low", f"{name}_high"
            below, above = getattr(self, low), getattr(self, high)
            require(below < above, f"grpo.{low}", below, f"a number below grpo.{high} = {above}")
        for name in ("icepop_low", "sequence_mask_low"):
            require(getattr(self, name) >= 0, f"grpo.{name}", getattr(self, name), "a number of at least 0")
        share(self, "grpo", "covariance_share")


@dataclass
class DPOLossConfig(ExplorationWeight):
    """The ED-iDPO objective (``losses.ed_idpo_loss``). ``alpha = 0`` is ETO."""

    beta: float = 0.1
    """Strength of the trust region: the implicit reward is beta * log(pi_theta / pi_ref)."""
    preference_loss: str = "sigmoid"
    """sigmoid (DPO) or ipo."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with exchanged labels (conservative DPO); sigmoid only."""
    length_normalized: bool = False
    """Log-probabilities of sequences are means over their tokens, in both terms, instead of sums."""
    alpha: Optional[float] = None
    """Weight of the exploration term in units of beta; null: the paper's 1e-3, unless
    ``exploration_coefficient`` is given."""
    exploration_coefficient: Optional[float] = None
    """Replaces the product alpha * beta."""
    log_ratio_floor: Optional[float] = None
    """A floor (below 0) under each token's log-ratio in the exploration term. Ours, not the paper's: off by default."""

    def __post_init__(self) -> None:
        positive(self, "idpo", "beta")
        one_of("idpo.preference_loss", self.preference_loss, ("sigmoid", "ipo"))
        smoothing = self.label_smoothing
        require(0 <= smoothing < 0.5, "idpo.label_smoothing", smoothing, "a number in [0, 0.5)")
        if smoothing and self.preference_loss == "ipo":
            raise ValueError(f"idpo.label_smoothing is {smoothing}, but preference_loss ipo has none: set it to 0")
        _check_exploration(self, "idpo")


@dataclass
class ScheduleConfig:
    """How the exploration weight changes over optimizer steps (``losses.build_schedule``). The configured weight is
    the schedule's peak, or a controller's start."""

    kind: str = "constant"
    """constant; linear, cosine or warmup-hold-decay in steps; entropy: a controller that raises the weight while the
    entropy is under a target; gradient-share: one that keeps the term's gradient norm at a share of the task's."""
    steps: int = 0
    """Optimizer steps that linear, cosine and warmup-hold-decay take in all; required by them."""
    final_factor: float = 0.0
    """The final weight, in units of the configured weight."""
    warmup_steps: int = 0
    """Steps in which warmup-hold-decay rises from 0."""
    hold_steps: int = 0
    """Steps that it then stays at the configured weight."""
    entropy_target: Optional[float] = None
    """Nats. The entropy controller raises the weight below it."""
    entropy_ceiling: Optional[float] = None
    """Nats. It lowers the weight above this; null: above the target."""
    rate: float = 0.1
    """A controller changes the weight by a factor from exp(-rate) to exp(rate) at a time."""
    min_weight: float = 1e-8
    """Lower bound of a controller's weight."""
    max_weight: float = 1.0
    """Upper bound of a controller's weight."""
    gradient_share: float = 0.1
    """Norm of the weighted exploration gradient over that of the task gradient, which gradient-share maintains."""
    every: int = 10
    """Steps between two measurements of the gradients."""

    def __post_init__(self) -> None:
        one_of("schedule.kind", self.kind, SCHEDULES)
        if self.kind in ("linear", "cosine", "warmup-hold-decay"):
            positive(self, "schedule", "steps")
        for name in ("final_factor", "warmup_steps", "hold_steps"):
            require(getattr(self, name) >= 0, f"schedule.{name}", getattr(self, name), "a number of at least 0")
        used = self.warmup_steps + self.hold_steps
        if self.kind == "warmup-hold-decay":
            require(used <= self.steps, "schedule.steps", self.steps, f"at least warmup_steps + hold_steps = {used}")
        if self.kind == "entropy":
            target, ceiling = self.entropy_target, self.entropy_ceiling
            require((target or 0) > 0, "schedule.entropy_target", target, "a number above 0 (nats) with kind entropy")
            fits = ceiling is None or ceiling >= target
            require(fits, "schedule.entropy_ceiling", ceiling, f"null or at least entropy_target = {target}")
        positive(self, "schedule", "min_weight", "gradient_share", "every")
        require(0 < self.rate <= 1, "schedule.rate", self.rate, "a number in (0, 1]")
        above = self.max_weight >= self.min_weight
        require(above, "schedule.max_weight", self.max_weight, f"at least min_weight = {self.min_weight}")
