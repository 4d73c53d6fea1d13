"""The exploration weight over optimizer steps: fixed schedules, and two controllers. Ours: the paper's is constant.

Read a schedule before an optimizer step, and call ``step`` after it:

    loss = base.plus(exploration, schedule.weight)
    ...                                                # if schedule.needs_gradients, measure both gradients' norms
    schedule.step(entropy=..., gradient_ratio=...)

**constant, linear, cosine, warmup-hold-decay**: the configured weight (alpha * beta, or the coefficient that replaces
it) times a function of the steps taken. With p = steps taken / ``steps``, at most 1, and f = ``final_factor``:

    constant            1
    linear              (1 - p) + p f
    cosine              (1 - q) + q f,  q = (1 - cos(pi p)) / 2
    warmup-hold-decay   0 to 1 in ``warmup_steps``, 1 for ``hold_steps``, then linearly to f

Controllers begin at the configured weight and stay within [``min_weight``, ``max_weight``].

**entropy** raises the weight while the entropy H is below ``entropy_target``, lowers it above ``entropy_ceiling``, at
each step, and leaves it between the two:

    H < target     weight *= exp(rate * min((target - H) / target, 1))
    H > ceiling    weight *= exp(-rate * min((H - ceiling) / ceiling, 1))

**gradient-share** keeps the weighted exploration gradient's norm at ``gradient_share`` of the task gradient's. With
ratio = |gradient of the term at weight 1| / |task gradient| the weight that does so is share / ratio: a setting that
means the same for any reduction, length and model. It is measured at the first step and then every ``every`` steps. The
first measurement sets the weight; later ones, noisy as those of single batches are, move it by a factor of exp(rate) at
most. A ratio of 0, NaN or infinity (a batch without samples, or without advantages) says nothing about the weight: it
stays, and the next step measures again.
"""

import math
from typing import Any

from nemo_edo.config import ScheduleConfig


class Schedule:
    """The exploration weight of the next optimizer step."""

    def __init__(self, config: ScheduleConfig, weight: float) -> None:
        """The schedule of ``config`` around the configured exploration weight (``exploration_weight`` of a loss's
        config).

        Raises ValueError for a weight that is not finite, and for one outside [min_weight, max_weight] with a
        controller: 0 is outside, so that a baseline without exploration never gets any."""
        if not math.isfinite(weight):
            raise ValueError(f"the exploration weight is {weight}, expected a finite number")
        self._config, self._peak = config, weight
        self._state: dict[str, Any] = {"kind": config.kind}
        if config.kind not in ("entropy", "gradient-share"):
            self._state["steps"] = 0
            return
        if not config.min_weight <= weight <= config.max_weight:
            off = " (0 means no exploration, which a controller would switch on; use kind constant)"
            raise ValueError(
                f"the exploration weight is {weight}{off if weight == 0 else ''}, expected schedule.min_weight = "
                f"{config.min_weight} to schedule.max_weight = {config.max_weight} with kind {config.kind}"
            )
        self._state["weight"] = float(weight)
        if config.kind == "gradient-share":
            self._state |= {"measured": False, "steps_to_wait": 0}

    @property
    def weight(self) -> float:
        """The weight for the next optimizer step."""
        if "weight" in self._state:
            return self._state["weight"]
        config, taken = self._config, self._state["steps"]
        warm_up, hold = 0, 0
        if config.kind == "warmup-hold-decay":
            warm_up, hold = config.warmup_steps, config.hold_steps
        if config.kind == "constant":
            factor = 1.0
        elif taken >= config.steps:
            factor = config.final_factor
        elif taken < warm_up:
            factor = taken / warm_up
        elif taken <= warm_up + hold:
            factor = 1.0
        else:
            progress = (taken - warm_up - hold) / (config.steps - warm_up - hold)
            if config.kind == "cosine":
                progress = (1 - math.cos(math.pi * progress)) / 2
            factor = (1 - progress) + progress * config.final_factor
        return self._peak * factor

    @property
    def needs_gradients(self) -> bool:
        """Whether the next ``step`` wants a measured gradient ratio."""
        return self._state.get("steps_to_wait") == 0

    def step(self, *, entropy: float | None = None, gradient_ratio: float | None = None) -> None:
        """Call after each optimizer step. A schedule ignores the measurements that it does not need, and raises
        ValueError for one that it needs and that is missing or not valid.

        entropy: mean entropy of the policy at sampled positions, nats.
        gradient_ratio: norm of the exploration term's gradient at weight 1 over that of the task's gradient (the loss
            without the term), of the same batch at the same parameters.
        """
        config, state = self._config, self._state
        if config.kind == "entropy":
            if entropy is None:
                raise ValueError("entropy is missing: schedule.kind entropy needs it at every step")
            if not math.isfinite(entropy):
                raise ValueError(f"entropy is {entropy}, expected a finite number (nats)")
            target = config.entropy_target
            assert target is not None, "ScheduleConfig refuses kind entropy without it"
            ceiling = target if config.entropy_ceiling is None else config.entropy_ceiling
            too_low = min(max(target - entropy, 0.0) / target, 1.0)
            too_high = min(max(entropy - ceiling, 0.0) / ceiling, 1.0)
            self._set_weight(self.weight * math.exp(config.rate * (too_low - too_high)))
        elif config.kind != "gradient-share":
            state["steps"] += 1
        elif state["steps_to_wait"] > 0:
            state["steps_to_wait"] -= 1
        else:
            if gradient_ratio is None:
                raise ValueError("gradient_ratio is missing: schedule.kind gradient-share needs it at this step")
            if gradient_ratio < 0:
                raise ValueError(f"gradient_ratio is {gradient_ratio}, expected a quotient of norms, at least 0")
            if not 0 < gradient_ratio < math.inf:
                return
            weight = config.gradient_share / gradient_ratio
            if state["measured"]:
                most = math.exp(config.rate)
                weight = min(max(weight, self.weight / most), self.weight * most)
            self._set_weight(weight)
            state |= {"measured": True, "steps_to_wait": config.every - 1}

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to resume exactly; survives JSON."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where ``state_dict`` was taken, with this schedule's own settings. Raises ValueError, and changes
        nothing, for the state of another kind of schedule, or other keys."""
        own = self._state
        if state.keys() != own.keys() or state["kind"] != own["kind"]:
            raise ValueError(
                f"the state is of schedule kind {state.get('kind')!r} with keys {list(state)}, but this schedule is of "
                f"kind {own['kind']!r} with keys {list(own)}"
            )
        self._state = dict(state)

    def _set_weight(self, weight: float) -> None:
        self._state["weight"] = min(max(float(weight), self._config.min_weight), self._config.max_weight)


build_schedule = Schedule
