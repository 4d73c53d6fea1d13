from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

RLLM_LOSS_REGISTRY: dict[str, Callable] = {}
RLLM_LOSS_AGG_MODE: dict[str, str] = {}


@dataclass
class LossContext:
    logp_curr: Tensor
    logp_old: Tensor
    advantages: Tensor
    action_mask: Tensor
    obs_mask: Tensor
    aggregate: Callable[..., Tensor]
    params: dict[str, Any] = field(default_factory=dict)
    backend: str = ""


def register_loss(name: str, *, agg_mode: str | None = None) -> Callable:
    if agg_mode is not None:
        RLLM_LOSS_AGG_MODE[name] = agg_mode  # the aggregation wherever ``name`` is the configured loss
    return lambda loss: RLLM_LOSS_REGISTRY.setdefault(name, loss)


def get_loss(name: str) -> Callable:
    if name not in RLLM_LOSS_REGISTRY:
        raise ValueError(f"Unknown loss {name!r}")
    return RLLM_LOSS_REGISTRY[name]


@register_loss("ppo_clip")
def ppo_clip(ctx: LossContext) -> tuple[Tensor, dict[str, float]]:
    clip = ctx.params["eps_clip"]
    ratio = (ctx.logp_curr - ctx.logp_old).exp()
    worst = (ratio * ctx.advantages).minimum(ratio.clamp(1 - clip, 1 + clip) * ctx.advantages)
    return ctx.aggregate(-worst, ctx.action_mask), {"ppo/clip_frac": 0.0}


@register_loss("gspo", agg_mode="seq-mean-token-mean")
def gspo(ctx: LossContext) -> tuple[Tensor, dict[str, float]]:
    return ppo_clip(ctx)
