"""Settings of the objectives in ``nemo_edo.losses``."""

from dataclasses import dataclass
from typing import Annotated, Optional

from nemo_edo.config.checks import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rules,
    Section,
    Share,
    above,
    at_least,
    below,
    one_of,
    within,
)

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
SAMPLER_CORRECTIONS = ("none", "tis", "icepop", "sequence-mask")
CONTROLLERS = ("entropy", "gradient-share")
PAPER_ALPHA = 1e-3
Weight = Annotated[float, at_least(0, ": the term's sign is in the loss")]


@dataclass
class ExplorationConfig(Section):
    """The exploration term, and the factor in front of it."""

    beta: float = 0.0
    alpha: Optional[Weight] = None
    """Weight of the exploration term in units of beta; null: the paper's 1e-3 (if exploration_coefficient is null)."""
    exploration_coefficient: Optional[Weight] = None
    """Replaces the product alpha * beta, so that beta = 0 need not switch exploration off."""
    log_ratio_floor: Optional[Annotated[float, below(0)]] = None
    """A floor (below 0) under each token's log-ratio in the exploration term. Ours, not the paper's: off by default."""

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

    def rules(self) -> Rules:
        either = self.alpha is None or self.exploration_coefficient is None
        yield either, "alpha", "null with an exploration_coefficient, which replaces alpha * beta"


@dataclass
class GRPOLossConfig(ExplorationConfig):
    """The ED-GRPO objective (``losses.grpo_loss``). ``alpha = 0`` is GRPO."""

    surrogate: Annotated[str, one_of("clip", "cispo", "reinforce")] = "clip"
    """clip: PPO's clipped ratio times advantage; cispo: every token's log-probability times its advantage and its
    ratio, a constant within the bounds; reinforce: log-probability times advantage, without ratio and clip."""
    clip_low: float = 0.2  # The ratio's lower bound is 1 - clip_low (with cispo, 1: none).
    clip_high: NonNegative = 0.2  # The ratio's upper bound is 1 + clip_high (DAPO: 0.28).
    dual_clip: Optional[Annotated[float, above(1)]] = None
    """For negative advantages the surrogate is at least dual_clip * A (a number above 1)."""
    beta: NonNegative = 0.04  # Weight of the KL to the reference policy.
    kl_estimator: Annotated[str, one_of(*KL_ESTIMATORS)] = "k3"
    """k1, k2, k3: estimators of the KL from sampled tokens; k1+, k3+: with k2's gradient (``losses.kl_per_token``)."""
    kl_importance: Annotated[str, one_of("none", "on-policy", "ratio")] = "none"
    """What multiplies the KL's estimate, with its gradient, to descend the KL of the policy that samples: none;
    ratio, pi_theta / pi_old of the token (DeepSeek-V3.2, TRL's default, slime); on-policy, a 1 with the gradient of log
    pi_theta (NeMo-RL's default), exact before the first step of an iteration."""
    aggregation: Annotated[str, one_of(*AGGREGATIONS)] = "seq-mean-token-mean"
    """How token values become one number, in every term of the loss: seq-mean-token-mean (the paper), token-mean
    (DAPO) or seq-mean-token-sum-norm (Dr.GRPO); see ``losses.reduce_tokens``."""
    norm_length: Optional[int] = None  # The constant length of ``seq-mean-token-sum-norm`` (Dr.GRPO), required by it.
    importance_sampling_level: Annotated[str, one_of("token", "sequence")] = "token"
    """token: a ratio for each token; sequence: one for each response, exp of its mean log-ratio (GSPO)."""
    sampler_correction: Annotated[str, one_of(*SAMPLER_CORRECTIONS)] = "none"
    """For samples whose sampler's log-probabilities differ from the trainer's pi_old. none; tis: tokens are weighted by
    their ratio, truncated; icepop: by their ratio, and not at all where it is outside the bounds; sequence-mask: by
    their ratio, and not at all in responses whose mean log-ratio is outside the log of the bounds."""
    sampler_level: Annotated[str, one_of("token", "sequence")] = "token"
    """The ratio of tis and icepop. token: each token's own; sequence: the whole response's, the product of its tokens',
    as objectives by sequence (GSPO) need it."""
    tis_cap: Positive = 2.0  # Upper bound on tis's weights pi_old / pi_gen.
    icepop_low: NonNegative = 0.5  # Lower bound on icepop's ratios pi_old / pi_gen.
    icepop_high: float = 5.0  # Upper bound on icepop's ratios pi_old / pi_gen.
    sequence_mask_low: NonNegative = 0.999  # Lower bound on the geometric mean of a response's ratios pi_old / pi_gen.
    sequence_mask_high: float = 1.002  # Its upper bound.
    exploration_control: Annotated[str, one_of("none", "noise")] = "none"
    """none: the exploration term itself. noise: the control that weights it by the detached ratio pi_theta / pi_old,
    so that its expected gradient is zero and only noise of the same size is left."""
    exploration_tokens: Optional[PositiveInt] = None
    """The exploration term runs over this many tokens at the beginning of each response only, with the denominator of
    all of them. Ours, not the paper's. null: over all tokens."""
    covariance_control: Annotated[str, one_of("none", "clip-cov", "kl-cov")] = "none"
    """A baseline that bounds the loss of entropy by the tokens whose log-probability and advantage covary most. none;
    clip-cov: the selected tokens have no gradient; kl-cov: they pay for moving away from pi_old."""
    covariance_share: Share = 2e-4
    """Share of the tokens that clip-cov or kl-cov select (kl-cov's authors take 2e-3 with their smaller model)."""
    clip_cov_low: float = 1.0
    """clip-cov selects at random among tokens with a covariance from here on, in nats times the advantage's unit."""
    clip_cov_high: float = 5.0  # The upper bound of that covariance.
    kl_cov_coefficient: Positive = 1.0  # Weight of kl-cov's penalty |log pi_theta - log pi_old|.

    def rules(self) -> Rules:
        open_below = self.surrogate == "cispo" and self.clip_low == 1
        yield 0 <= self.clip_low < 1 or open_below, "clip_low", "a number in [0, 1), or 1 with surrogate cispo"
        alone = f"with surrogate {self.surrogate}, which has no other"
        yield from self.only_if(self.surrogate == "clip", alone, "dual_clip", "importance_sampling_level")
        has_length = self.aggregation != "seq-mean-token-sum-norm" or (self.norm_length or 0) > 0
        yield has_length, "norm_length", "a number above 0 with aggregation seq-mean-token-sum-norm"
        corrects = self.sampler_correction in ("tis", "icepop")
        yield from self.only_if(corrects, "without sampler_correction tis or icepop", "sampler_level")
        for name in ("icepop", "sequence_mask", "clip_cov"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            yield low < high, f"{name}_low", f"a number below {name}_high = {high}"


@dataclass
class DPOLossConfig(ExplorationConfig):
    """The ED-iDPO objective (``losses.ed_idpo_loss``). ``alpha = 0`` is ETO."""

    beta: Positive = 0.1  # Strength of the trust region: the implicit reward is beta * log(pi_theta / pi_ref).
    preference_loss: Annotated[str, one_of("sigmoid", "ipo")] = "sigmoid"  # sigmoid (DPO) or ipo.
    label_smoothing: Annotated[float, within(0, 0.5, "[)")] = 0.0
    """Assumed share of pairs with exchanged labels (conservative DPO); sigmoid only."""
    length_normalized: bool = False  # Sequences' log-probabilities are means over tokens, in both terms, not sums.

    def rules(self) -> Rules:
        is_dpo = self.preference_loss == "sigmoid"
        yield from self.only_if(is_dpo, "with preference_loss ipo, which has none", "label_smoothing")


@dataclass
class ScheduleConfig(Section):
    """How the exploration weight changes over optimizer steps (``losses.build_schedule``). The configured weight is
    the schedule's peak, or a controller's start."""

    kind: Annotated[str, one_of("constant", "linear", "cosine", "warmup-hold-decay", *CONTROLLERS)] = "constant"
    """constant; linear, cosine or warmup-hold-decay in steps; entropy: a controller that raises the weight while the
    entropy is under a target; gradient-share: one that keeps the term's gradient norm at a share of the task's."""
    steps: int = 0  # Optimizer steps that linear, cosine and warmup-hold-decay take in all; required by them.
    final_factor: NonNegative = 0.0  # The final weight, in units of the configured weight.
    warmup_steps: NonNegativeInt = 0  # Steps in which warmup-hold-decay rises from 0.
    hold_steps: NonNegativeInt = 0  # Steps that it then stays at the configured weight.
    entropy_target: Optional[float] = None  # Nats. The entropy controller raises the weight below it.
    entropy_ceiling: Optional[float] = None  # Nats. It lowers the weight above this; null: above the target.
    rate: Annotated[float, within(0, 1, "(]")] = 0.1
    """A controller changes the weight by a factor from exp(-rate) to exp(rate) at a time."""
    min_weight: Positive = 1e-8  # Lower bound of a controller's weight.
    max_weight: float = 1.0  # Upper bound of a controller's weight.
    gradient_share: Positive = 0.1
    """Norm of the weighted exploration gradient over that of the task gradient, which gradient-share maintains."""
    every: PositiveInt = 10  # Steps between two measurements of the gradients.

    def rules(self) -> Rules:
        in_steps = self.kind in ("linear", "cosine", "warmup-hold-decay")
        yield not in_steps or self.steps > 0, "steps", f"a number above 0 with kind {self.kind}"
        other = f"with kind {self.kind}, which does not use it"
        yield from self.only_if(self.kind == "warmup-hold-decay", other, "warmup_steps", "hold_steps")
        yield from self.only_if(in_steps, other, "final_factor")
        yield from self.only_if(self.kind == "entropy", other, "entropy_target", "entropy_ceiling")
        used = self.warmup_steps + self.hold_steps
        has_room = self.kind != "warmup-hold-decay" or used <= self.steps
        yield has_room, "steps", f"at least warmup_steps + hold_steps = {used}"
        if self.kind == "entropy":
            target, ceiling = self.entropy_target, self.entropy_ceiling
            yield (target or 0) > 0, "entropy_target", "a number above 0 (nats) with kind entropy"
            yield ceiling is None or ceiling >= target, "entropy_ceiling", f"null or at least entropy_target = {target}"
        yield self.max_weight >= self.min_weight, "max_weight", f"at least min_weight = {self.min_weight}"
