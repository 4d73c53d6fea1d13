"""The arms of a run: their labels, which of them is the baseline, and its replicate."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_edo.config.run import RunConfig
from nemo_edo.config.training import GRPOConfig, IDPOConfig, LoopConfig

PLAIN_LABELS = ("GRPO", "ETO")
"""Arms without exploration or another change: what the others are compared with."""
REPLICATE = "replicate"
"""The name of the arm that ``replicate_baseline`` adds: the baseline, trained again with another seed."""
REPLICATE_SEED_DISTANCE = 10**9
"""From the run's seed to the replicate's: further than the seeds of runs that anyone compares lie apart."""


def baseline_arm(arms: Mapping[str, LoopConfig]) -> str | None:
    """The first arm that is plain GRPO or ETO, otherwise the first; None where there is no arm."""
    plain = (name for name, settings in arms.items() if name != REPLICATE and arm_label(settings) in PLAIN_LABELS)
    return next(plain, next(iter(arms), None))


def arm_seed(cfg: RunConfig, arm: str) -> int:
    """The seed of an arm's samples in training, and of their order. All arms are evaluated with the run's."""
    return cfg.seed + (REPLICATE_SEED_DISTANCE if arm == REPLICATE else 0)


def arm_label(settings: LoopConfig) -> str:
    """What an arm is, from its settings: "GRPO", "ED-GRPO α=0.001", "GRPO, entropy bonus 0.03"."""
    plain, exploring = ("ETO", "ED-iDPO") if isinstance(settings, IDPOConfig) else ("GRPO", "ED-GRPO")
    parts = [plain]
    if settings.exploration_weight:
        strength = (
            f"α={settings.effective_alpha:g}"
            if settings.effective_alpha is not None
            else f"αβ={settings.exploration_coefficient:g}"
        )
        parts = [f"{exploring} {strength}"]
        if settings.log_ratio_floor is not None:
            parts.append(f"floor {settings.log_ratio_floor:g}")
    if settings.exploration_weight and settings.schedule.kind != "constant":
        parts.append(f"{settings.schedule.kind} schedule")
    return ", ".join(parts + (_baseline_labels(settings) if isinstance(settings, GRPOConfig) else []))


def _baseline_labels(settings: GRPOConfig) -> list[str]:
    """How a GRPO arm differs from GRPO, exploration aside; variants of the term only if it explores."""
    labels = {
        "pure noise": settings.exploration_weight and settings.exploration_control == "noise",
        "redundancy-weighted": settings.exploration_weight and settings.redundancy_weighted,
        "without zero-advantage groups": settings.exploration_weight and not settings.explore_uninformative_groups,
        "solved groups only": settings.exploration_weight and settings.explore_solved_groups_only,
        f"on samples of the {settings.exploration_samples} policy": settings.exploration_weight
        and settings.exploration_samples != "own",
        f"first {settings.exploration_tokens} tokens": settings.exploration_weight and settings.exploration_tokens,
        f"entropy bonus {settings.entropy_coefficient:g}": settings.entropy_coefficient,
        settings.covariance_control: settings.covariance_control != "none",
        f"pass@{settings.pass_k}": settings.pass_k,
        f"novelty {settings.novelty_strength:g}": settings.novelty_strength,
        "dynamic sampling": settings.dynamic_sampling,
        settings.surrogate: settings.surrogate != "clip",
        "sequence ratios": settings.importance_sampling_level == "sequence",
    }
    return [label for label, present in labels.items() if present]
