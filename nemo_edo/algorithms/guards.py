"""Guards: what a training does about a batch that breaks the numbers, and about a policy that dies.

``Guards`` is told of every collection and every step, and finds alarms; ``respond`` logs them, warns, and ends the run
where a guard is set to. The decisions depend on the measurements alone, and their state goes into the checkpoints: a
run that was killed decides as one that was not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

from nemo_edo.algorithms.progress import Position, Progress
from nemo_edo.config import GRPOConfig, GuardsConfig, IDPOConfig, LoopConfig
from nemo_edo.errors import StoppedByGuard
from nemo_edo.types import TrainingBatch

WINDOW, ENOUGH = 50, 20
"""Steps that the median of the gradient norms is over, and how many it takes to be one."""


@dataclass(frozen=True)
class Quantity:
    """What a guard with bounds measures, in words, and what to do about it."""

    words: str
    too_low: str
    too_high: str


QUANTITIES = {
    "kl": Quantity(
        "the KL to the reference (nats a token)",
        "the policy does not move: raise optimizer.lr, or lower beta",
        "the policy is far from where it began: raise beta, or lower optimizer.lr or the exploration weight",
    ),
    "entropy": Quantity(
        "the policy's entropy (nats a token)",
        "the policy has collapsed: raise beta or the exploration weight, or lower optimizer.lr",
        "the policy has come apart: lower the exploration weight or optimizer.lr, raise beta, or set log_ratio_floor",
    ),
    "truncated": Quantity(
        "the share of truncated responses",
        "responses end early: look at the samples",
        "responses do not end: raise sampling.max_new_tokens, or set grpo.overlong_buffer",
    ),
    "reward": Quantity(
        "the mean reward of a collection",
        "no response is right: take easier problems or a longer warm-up, and look at the samples for the answers' form",
        "every response is right, and none is better than another: take harder problems, or end the run here",
    ),
    "sampler_gap": Quantity(
        "the mean gap between the trainer's and the engine's log-probabilities (nats)",
        "lower guards.sampler_gap.floor: no gap is too small",
        "the responses are not those of the policy that is trained. Look at, in this order: the engine's weights (a "
        "refit that did not reach it, stale responses), its precision (generation.servers.dtype beside precision.*), "
        "its temperature and top-p, and the prompt's template; then remove the iteration's folder from the run's "
        "rollouts, and it is drawn again",
    ),
    "stale_gap": Quantity(
        "the mean gap between the log-probabilities of the trainer and of the earlier policy that drew (nats)",
        "lower guards.stale_gap.floor: no gap is too small",
        "the policy has moved too far from its samples for importance correction: lower optimizer.lr, take fewer steps "
        "on a collection, or set generation.one_step_off=false",
    ),
}
OF_COLLECTIONS, OF_STEPS = ("kl", "entropy", "truncated", "reward", "sampler_gap", "stale_gap"), ("kl", "entropy")


@dataclass(frozen=True)
class Alarm:
    guard: str
    """The setting that it is about, such as guards.kl.ceiling."""
    message: str
    """What was measured, the threshold, and what to do."""
    value: float
    bound: float
    action: str
    """warn, skip or stop."""
    times: int
    """How often the guard has fired, with this time."""
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
        """What a later ``Guards`` needs to go on exactly; survives JSON."""
        return deepcopy(self._state)

    @property
    def skipped_steps(self) -> int:
        """Since the beginning of the training."""
        return self._state["skipped_steps"]

    @property
    def grad_norm_limit(self) -> float:
        """Above this the next step is not to be taken; inf where spikes are only warned of."""
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
        return list(self._beyond_bounds("collection", OF_COLLECTIONS, measured))

    def step(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms of a step's metrics; "loss", "grad_norm" and "skipped" are among them."""
        if metrics["skipped"]:
            return [self._skipped(metrics)]
        self._state["skipped_in_a_row"] = 0
        return [*self._spike(metrics["grad_norm"]), *self._beyond_bounds("step", OF_STEPS, metrics)]

    def _skipped(self, metrics: Mapping[str, float]) -> Alarm:
        state, most, bound = self._state, self._config.max_skipped_steps, self.grad_norm_limit
        state["skipped_steps"] += 1
        state["skipped_in_a_row"] += 1
        in_a_row, loss, norm = state["skipped_in_a_row"], metrics["loss"], metrics["grad_norm"]
        if math.isfinite(loss) and bound < norm < math.inf:
            guard, value, what = "guards.grad_norm_spike", norm, _spike_in_words(norm, bound)
            action = self._config.on_grad_norm_spike
        else:
            guard, value, bound, action = "guards.max_skipped_steps", float(in_a_row), float(most), "skip"
            what = f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        what += f": step not taken ({in_a_row} in a row, and guards.max_skipped_steps is {most})"
        if in_a_row >= most:
            action = "stop"
        if action == "stop":
            what += "; see by a replay which responses it comes from, and lower optimizer.lr if it is none of them"
        return self._alarm(guard, what, value, bound, action, batch_matters=True)

    def _spike(self, norm: float) -> Iterator[Alarm]:
        bound, norms = self._spike_bound, self._state["grad_norms"]
        if norm > bound:
            advice = "lower optimizer.lr if it happens often, or set guards.on_grad_norm_spike=skip"
            yield self._alarm(
                "guards.grad_norm_spike", f"{_spike_in_words(norm, bound)}: {advice}", norm, bound, "warn"
            )
        if norm > 0:  # a batch without any advantage says nothing about the size of the others' gradients
            norms.append(norm)
            del norms[:-WINDOW]

    def _beyond_bounds(self, kind: str, names: Sequence[str], measured: Mapping[str, float]) -> Iterator[Alarm]:
        for name in names:
            value, bounds, quantity = measured.get(name, math.nan), getattr(self._config, name), QUANTITIES[name]
            low, high = bounds.floor, bounds.ceiling
            # NaN compares false: a measurement that is none is at no bound.
            sides = (
                ("floor", low, low is not None and value <= low, "below", quantity.too_low),
                ("ceiling", high, high is not None and value >= high, "above", quantity.too_high),
            )
            for side, bound, reached, relation, advice in sides:
                guard, counted, key = f"guards.{name}.{side}", self._state["beyond"], f"{kind} {name} {side}"
                counted[key] = in_a_row = counted.get(key, 0) + 1 if reached else 0
                if reached and in_a_row >= bounds.in_a_row:
                    row = f", {in_a_row} in a row" if bounds.in_a_row > 1 else ""
                    message = f"{quantity.words} is {value:.4g}, at or {relation} {guard} = {bound:g}{row}: {advice}"
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

    position: where the training goes on; place: "iteration" and "step" of what was measured, for people.
    batch, about: what the step trained on, and what else its replay needs.
    Raises StoppedByGuard where one of them stops the run, once everything is saved.
    """
    where = ", ".join(f"{name} {number}" for name, number in place.items())
    for alarm in alarms:
        log(
            "guard",
            **place,
            guard=alarm.guard,
            value=alarm.value,
            bound=alarm.bound,
            times=alarm.times,
            action=alarm.action,
        )
        if alarm.action != "stop" and not alarm.times & (alarm.times - 1):
            again = f" ({alarm.times} times so far)" if alarm.times > 1 else ""
            warnings.warn(f"{where}: {alarm.message}{again}", stacklevel=2)
    stopping = next((alarm for alarm in alarms if alarm.action == "stop"), None)
    if stopping is None:
        return
    kept = ""
    if stopping.batch_matters and batch is not None:
        kept = f"; kept for nemo-edo replay: {progress.keep_failure(position, batch, dict(about or {}))}"
    progress.save(position)
    raise StoppedByGuard(f"{where}: {stopping.message}{kept}")


def loggable(values: Mapping[str, Any]) -> dict[str, Any]:
    """With None for numbers that are not finite, and without the flag "skipped", which ``Guards`` counts."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    return {name: value for name, value in finite.items() if name != "skipped"}


# --- exploration ----------------------------------------------------------------------------------------------------


def exploration_hazards(config: LoopConfig, steps_per_collection: int) -> list[str]:
    """Where the exploration term cannot act as configured, or something else acts like it, each with the reason."""
    weight, found = config.exploration_weight, []
    if isinstance(config, GRPOConfig):
        found += _hazards_of_kl(config)
    if not weight:
        return found
    if steps_per_collection == 1:
        found.append(
            "one optimizer step for each collection: while the policy equals its sampler the exploration term's "
            "expected gradient is zero, so it adds noise only; lower minibatch_size or raise epochs"
        )
    if isinstance(config, GRPOConfig) and config.dynamic_sampling:
        found.append(
            "dynamic_sampling drops groups whose rewards are all equal, and these carry much of the exploration "
            "term's effect; it acts on the others only"
        )
    if isinstance(config, IDPOConfig) and config.exploration_samples == "paired":
        found.append(
            "exploration_samples is paired: right and wrong responses stand in pairs as often as each other, not as "
            "often as the sampler draws them, so the term's gradient is not zero on average where the policy equals "
            "its sampler; exploration_samples=all is the method's term"
        )
    return found


def _hazards_of_kl(config: GRPOConfig) -> list[str]:
    found = []
    if not config.beta and config.effective_alpha:
        found.append(
            f"beta is 0, and with it the exploration weight alpha * beta: alpha = {config.effective_alpha:g} does "
            "nothing; give the weight itself, exploration_coefficient=..., or alpha=0 if no exploration is meant"
        )
    if config.kl_estimator == "k1" and config.beta and config.exploration_control == "none":
        both, weight = config.beta + config.exploration_weight, config.exploration_weight
        same = f": without a floor, the loss is that of GRPO with beta = {both:g} and alpha = 0" if weight else ""
        found.append(
            "kl_estimator k1 in the loss: its gradient is the exploration term's own, zero on average where the policy "
            f"equals its sampler, so the KL does not hold the policy{same}; kl_estimator=k3 keeps the two apart"
        )
    return found
