"""Guards: how training responds to a batch with unusable numbers and to a policy that collapses.

``Guards`` sees every collection and every step, and finds alarms; ``respond`` logs them, warns, and ends the run where
a guard is set to. The decisions depend on the measurements alone, and their state is in the checkpoints: a resumed run
decides as an uninterrupted one.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

from nemo_edo.algorithms.services import Position, Progress
from nemo_edo.config import GuardsConfig
from nemo_edo.errors import StoppedByGuard, UserError
from nemo_edo.types import TrainingBatch

WINDOW, ENOUGH = 50, 20
"""Steps in the window of the gradient norms' median, and the fewest that it needs."""


QUANTITIES = {
    "kl": (
        "the KL to the reference (nats per token)",
        "the policy does not move: raise optimizer.lr, or lower beta",
        "the policy is far from where it began: raise beta, or lower optimizer.lr or the exploration weight",
    ),
    "entropy": (
        "the policy's entropy (nats per token)",
        "the policy has collapsed: raise beta or the exploration weight, or lower optimizer.lr",
        "the policy becomes random: lower the exploration weight or optimizer.lr, raise beta, or set log_ratio_floor",
    ),
    "truncated": (
        "the share of truncated responses",
        "responses end early: look at the samples",
        "responses do not end: raise sampling.max_new_tokens, or set grpo.overlong_buffer",
    ),
    "reward": (
        "the share of successes in a collection",
        "no response is right: take easier problems or a longer warm-up, and look at the samples for the answers' form",
        "every response is right, and none is better than another: take harder problems, or end the run here",
    ),
    "sampler_gap": (
        "the mean gap between the trainer's and the engine's log-probabilities (nats)",
        "lower guards.sampler_gap.floor: no gap is too small",
        "the responses are not those of the policy that is trained. Look at, in this order: the engine's weights (a "
        "refit that did not reach it, stale responses), its precision (generation.servers.dtype against precision.*), "
        "its temperature and top-p, and the prompt's template; then remove the iteration's folder from the run's "
        "rollouts, and rerun the command",
    ),
    "stale_gap": (
        "the mean gap between the log-probabilities of the trainer and of the earlier sampling policy (nats)",
        "lower guards.stale_gap.floor: no gap is too small",
        "the policy has moved too far from its samples for importance correction: lower optimizer.lr, take fewer steps "
        "on a collection, or set generation.one_step_off=false",
    ),
}
"""The quantity of each guard with bounds, in words, and the advice where it is too low and where it is too high."""
OF_COLLECTIONS, OF_STEPS = ("kl", "entropy", "truncated", "reward", "sampler_gap", "stale_gap"), ("kl", "entropy")


GAP_OF_A_LAYER = {"fp32": 0.002, "bf16": 0.03, "fp8": 0.06}
"""Default ceiling of the sampler gap, nats per token, of a model of one layer: where it is no rounding any more. The
coarser precision of trainer and engine counts. Independent rounding errors of L layers add up to sqrt(L) times those of
one: so does the ceiling, about four times the gaps that were measured in bf16 (docs/reliability.md). In fp32 there is
room for TF32."""


@dataclass(frozen=True)
class Alarm:
    """A measurement at or beyond a guard's bound."""

    guard: str
    """The setting that it is about, such as guards.kl.ceiling."""
    message: str
    """What was measured, the threshold, and what to do."""
    value: float
    bound: float
    action: str
    """warn, skip or stop."""
    times: int
    """How often the guard has fired, this time included."""
    batch_matters: bool = False
    """Whether the step's batch is to be kept where the run stops."""


class Guards:
    """Finds alarms in what collections and steps measure."""

    def __init__(self, config: GuardsConfig, state: Mapping[str, Any] | None = None) -> None:
        """state: of ``state_dict``; None: at the beginning."""
        self._config = config
        beginning = {"skipped_steps": 0, "skipped_in_a_row": 0, "grad_norms": [], "beyond": {}, "fired": {}}
        self._state = deepcopy(dict(state)) if state is not None else beginning

    def state_dict(self) -> dict[str, Any]:
        """What a later ``Guards`` needs to continue exactly; survives JSON."""
        return deepcopy(self._state)

    @property
    def skipped_steps(self) -> int:
        """Since the beginning of the training."""
        return self._state["skipped_steps"]

    @property
    def grad_norm_limit(self) -> float:
        """The next step is not taken above this; inf where spikes only give a warning."""
        return self._spike_bound if self._config.on_grad_norm_spike != "warn" else math.inf

    @property
    def _spike_bound(self) -> float:
        factor, norms = self._config.grad_norm_spike, self._state["grad_norms"]
        return math.inf if factor is None or len(norms) < ENOUGH else factor * median(norms)

    def collection(self, statistics: Mapping[str, float]) -> list[Alarm]:
        """Alarms of a collection's statistics."""
        measured = dict(statistics)
        if measured.get("staleness"):
            measured["stale_gap"] = measured.pop("sampler_gap")
        if "accuracy" in measured:  # the same number, unless rewards are graded: then 0 and 1 are rewards like others
            measured["reward"] = measured["accuracy"]
        return list(self._beyond_bounds("collection", OF_COLLECTIONS, measured))

    def step(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms of a step's metrics; "loss", "grad_norm" and "skipped" are among them."""
        state, config, loss, norm = self._state, self._config, metrics["loss"], metrics["grad_norm"]
        if metrics["skipped"]:
            most, bound = config.max_skipped_steps, self.grad_norm_limit
            state["skipped_steps"] += 1
            state["skipped_in_a_row"] = in_a_row = state["skipped_in_a_row"] + 1
            if math.isfinite(loss) and bound < norm < math.inf:
                guard, value, action = "guards.grad_norm_spike", norm, config.on_grad_norm_spike
                what = _spike_in_words(norm, bound)
            else:
                guard, value, bound, action = "guards.max_skipped_steps", float(in_a_row), float(most), "skip"
                what = f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
            what += f": step not taken ({in_a_row} in a row, and guards.max_skipped_steps is {most})"
            if in_a_row >= most:
                action = "stop"
            if action == "stop":
                what += "; find the responses that cause it by a replay; lower optimizer.lr if none does"
            return [self._alarm(guard, what, value, bound, action, batch_matters=True)]
        state["skipped_in_a_row"] = 0
        bound, norms, alarms = self._spike_bound, state["grad_norms"], []
        if norm > bound:
            advice = "lower optimizer.lr if it happens often, or set guards.on_grad_norm_spike=skip"
            message = f"{_spike_in_words(norm, bound)}: {advice}"
            alarms.append(self._alarm("guards.grad_norm_spike", message, norm, bound, "warn"))
        if norm > 0:  # a batch without any advantage says nothing about the size of the others' gradients
            norms.append(norm)
            del norms[:-WINDOW]
        return [*alarms, *self._beyond_bounds("step", OF_STEPS, metrics)]

    def _beyond_bounds(self, kind: str, names: Sequence[str], measured: Mapping[str, float]) -> Iterator[Alarm]:
        for name in names:
            value, bounds = measured.get(name, math.nan), getattr(self._config, name)
            low, high = bounds.floor, bounds.ceiling
            words, too_low, too_high = QUANTITIES[name]
            # NaN compares false: an undefined measurement reaches no bound.
            sides = (
                ("floor", low, low is not None and value <= low, "below", too_low),
                ("ceiling", high, high is not None and value >= high, "above", too_high),
            )
            for side, bound, reached, relation, advice in sides:
                guard, counted, key = f"guards.{name}.{side}", self._state["beyond"], f"{kind} {name} {side}"
                counted[key] = in_a_row = counted.get(key, 0) + 1 if reached else 0
                if reached and in_a_row >= bounds.in_a_row:
                    row = f", {in_a_row} in a row" if bounds.in_a_row > 1 else ""
                    message = f"{words} is {value:.4g}, at or {relation} {guard} = {bound:g}{row}: {advice}"
                    yield self._alarm(guard, message, value, bound, bounds.action)

    def _alarm(self, guard: str, *rest: Any, **more: Any) -> Alarm:
        fired = self._state["fired"]
        fired[guard] = fired.get(guard, 0) + 1
        return Alarm(guard, *rest, times=fired[guard], **more)


def _spike_in_words(norm: float, bound: float) -> str:
    return f"the gradient norm is {norm:.4g}, above guards.grad_norm_spike times its median = {bound:.4g}"


def respond(
    alarms: Sequence[Alarm],
    position: Position,
    place: Mapping[str, int],
    *,
    log: Callable[..., None],
    progress: Progress,
    batch: TrainingBatch | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Logs the alarms and warns of each guard's 1st, 2nd, 4th, 8th ... one.

    position: where the training resumes; place: "iteration" and "step" of what was measured, for people.
    batch, about: what the step trained on, and what else its replay needs.
    Raises StoppedByGuard where one of them stops the run, once everything is saved.
    """
    where = ", ".join(f"{name} {number}" for name, number in place.items())
    for alarm in alarms:
        about_alarm = {name: getattr(alarm, name) for name in ("guard", "value", "bound", "times", "action")}
        log("guard", **place, **about_alarm)
        if alarm.action != "stop" and not alarm.times & (alarm.times - 1):
            again = f" ({alarm.times} times so far)" if alarm.times > 1 else ""
            warnings.warn(f"{where}: {alarm.message}{again}", stacklevel=2)
    stopping = next((alarm for alarm in alarms if alarm.action == "stop"), None)
    if stopping is None:
        return
    message = f"{where}: {stopping.message}"
    try:
        if stopping.batch_matters and batch is not None:
            kept = progress.keep_failure(position, batch, dict(about or {}))
            message = f"{message}; kept for nemo-edo replay: {kept}"
        progress.save(position)
    except (StoppedByGuard, UserError) as unsaved:
        raise StoppedByGuard(f"{message}; {unsaved}") from unsaved
    raise StoppedByGuard(message)


def loggable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with None for numbers that are not finite, and without the flag "skipped", which ``Guards`` counts."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    return {name: value for name, value in finite.items() if name != "skipped"}
