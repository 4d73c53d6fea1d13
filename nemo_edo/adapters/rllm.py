"""ED-GRPO as a loss of rLLM: ``algorithm.loss_fn: ed_grpo_rllm``, found by the entry point ``rllm.losses``.

One of rLLM's own losses plus coefficient * E_old[log pi_theta - log pi_old], aggregated by the function that rLLM's
backend gives to each loss. rLLM prefers a backend's own loss of the same name, hence not ``ed_grpo``, which is verl's.
"""

import warnings

from rllm.trainer.algorithms.loss import RLLM_LOSS_AGG_MODE, LossContext, get_loss, register_loss
from torch import Tensor

from nemo_edo.adapters.exploration_settings import ExplorationSettings, refuse_near_misses, warn_of_untested

LOSS = "ed_grpo_rllm"
SCHEDULE = (
    "rLLM shows its schedule to no loss: the exploration term is zero-mean noise while the policy equals its sampler. "
    "Take several optimizer steps for each batch of samples, or samples that are older than the weights"
)


@register_loss(LOSS)
def ed_grpo_loss(ctx: LossContext) -> tuple[Tensor, dict[str, float]]:
    """rLLM's loss with the term; with a coefficient of 0, that loss to the last bit.

    ctx.params, from ``algorithm.loss_params``: exploration_coefficient, log_ratio_floor (``ExplorationSettings``; the
    second may be absent), and base_loss, the name of a loss of rLLM's, ``ppo_clip`` by default; its own settings stand
    beside them. Tensors are [B, T], or [T] where the backend gives one response at a time.
    Metrics: the base loss's, ``exploration`` (mean over tokens, in nats, floored, without the coefficient) and
    ``floor_share``.
    Raises ValueError for a missing coefficient and a base loss that is this one or unknown, or whose aggregation rLLM
    fixes by its name.
    """
    warn_of_untested("rllm")
    if "exploration_coefficient" not in ctx.params:
        raise ValueError(f"algorithm.loss_params.exploration_coefficient is missing: set it with loss_fn={LOSS}")
    refuse_near_misses(frozenset(ctx.params), "algorithm.loss_params.")
    exploration = ExplorationSettings(ctx.params["exploration_coefficient"], ctx.params.get("log_ratio_floor"))
    base = ctx.params.get("base_loss", "ppo_clip")
    if base == LOSS:
        raise ValueError(f"algorithm.loss_params.base_loss is {LOSS}, which adds the term to another loss")
    if base in RLLM_LOSS_AGG_MODE and ctx.backend != "verl":
        raise ValueError(
            f"algorithm.loss_params.base_loss is {base}, which rLLM aggregates by {RLLM_LOSS_AGG_MODE[base]} under its "
            "own name alone (on verl's backend always): choose another one"
        )
    loss, metrics = get_loss(base)(ctx)
    rows = (ctx.logp_curr, ctx.logp_old, ctx.action_mask)
    values_BT, sums = exploration.term(*(x[None] if x.dim() == 1 else x for x in rows))
    metrics |= exploration.metrics(sums)
    if exploration.coefficient != 0:
        warnings.warn(SCHEDULE, stacklevel=2)
        values, fixed = values_BT.reshape(ctx.logp_curr.shape), RLLM_LOSS_AGG_MODE.get(base)
        mode = {"mode": fixed} if fixed else {}
        loss = loss + exploration.coefficient * ctx.aggregate(values, ctx.action_mask, **mode)
    return loss, metrics
