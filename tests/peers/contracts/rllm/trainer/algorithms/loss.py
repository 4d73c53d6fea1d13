from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

RLLM_LOSS_REGISTRY: dict[str, Callable] = {}


@dataclass
class LossContext:
    logp_curr: Tensor
    logp_old: Tensor
    advantages: Tensor
    action_mask: Tensor
    obs_mask: Tensor
    aggregate: Callable[..., Tensor]
    params: dict[str, Any] = field(default_factory=dict)


def register_loss(name: str, *, agg_mode: str | None = None) -> Callable:
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
