"""The charts of docs/theory.md: what the exploration term's theory says, and what the studies' files show.

python tools/docs/theory_charts.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from studies_table import AT_1, over_tasks, studies, study_rows
from study_charts import GRID, START_COLOR, Axis, mark, nice, stroke, svg, text, write

from nemo_edo.evaluation.results import seeds_interval
from nemo_edo.losses import exploration_term
from nemo_edo.report.plotting import COLORS

ACTIONS = 32
WEIGHTS = (0.0, 0.1, 0.3, 1.0)
STEPS = 8
FORMS = {"ed_grpo": "ED-GRPO", "ed_grpo_floor": "ED-GRPO with the floor", "previous": "on an older sampler",
         "entropy_bonus": "entropy bonus", "pass_k": "pass@k training"}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 70, 500, 20, 300


def charts() -> dict[str, str]:
    """The SVG of each picture, by its file's name."""
    return {
        "theory_on_policy.svg": on_policy(),
        "theory_drift.svg": drift(),
        "theory_entropy.svg": entropy_kept(),
        "theory_accuracy.svg": accuracy_paid(),
    }


# --- computed: a softmax policy over a few actions -----------------------------------------------------------------


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a sampler and of a policy that has moved away from it."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(ACTIONS, generator=generator, dtype=torch.float64)
    return old, old + 0.3 * torch.randn(ACTIONS, generator=generator, dtype=torch.float64)


def mean_gradient_norm(logits: torch.Tensor, old: torch.Tensor, samples: int, repeats: int = 400) -> float:
    """The root mean square norm of the term's gradient for the logits, estimated on samples of the old policy."""
    generator = torch.Generator().manual_seed(samples)
    squares = []
    for _ in range(repeats):
        actions = torch.multinomial(old.softmax(0), samples, replacement=True, generator=generator)
        leaf = logits.clone().requires_grad_()
        logprobs, old_logprobs = (x.log_softmax(0)[actions, None] for x in (leaf, old))
        term = exploration_term(logprobs, old_logprobs, torch.ones_like(logprobs), reduction="seq-sum").mean()
        squares.append(torch.autograd.grad(term, leaf)[0].square().sum())
    return float(torch.stack(squares).mean().sqrt())


def on_policy() -> str:
    """Against the number of samples: without bias at the sampler, with a limit away from it."""
    old, moved = policies()
    p = old.softmax(0)
    x, y = Axis(math.log(8), math.log(1024), LEFT, RIGHT), Axis(math.log(0.02), math.log(0.6), BOTTOM, TOP)
    parts = frame(x, y, [8, 32, 128, 512], [0.03, 0.1, 0.3], math.log, "samples", "norm of the term's gradient")
    for number, (label, logits) in enumerate({"policy = sampler": old, "policy has moved": moved}.items()):
        bias = float((p - logits.softmax(0)).square().sum())
        noise = float(1 - p.square().sum())
        sizes = [8 * 2**k for k in range(8)]
        parts.append(stroke([(x(math.log(n)), y(0.5 * math.log(bias + noise / n))) for n in sizes], COLORS[number], 2))
        parts += [mark(x(math.log(n)), y(math.log(mean_gradient_norm(logits, old, n))), COLORS[number]) for n in sizes]
        parts += legend(number, label)
    return picture("The term's gradient on samples of the sampler", parts)


def drift() -> str:
    """KL(sampler || policy) over exact gradient steps on one collection, for a bandit with one right action in four."""
    old, _ = policies()
    advantages = torch.where(torch.arange(ACTIONS) % 4 == 0, 1.0, 0.0).double()
    found = {}
    for weight in WEIGHTS:
        logits, p, distances = old.clone(), old.softmax(0), []
        for _ in range(STEPS):
            leaf = logits.clone().requires_grad_()
            ratio = (leaf.log_softmax(0) - old.log_softmax(0)).exp()
            term = (p * (leaf.log_softmax(0) - old.log_softmax(0))).sum()
            loss = -(p * ratio * (advantages - p @ advantages)).sum() + weight * term
            logits = logits - 2.0 * torch.autograd.grad(loss, leaf)[0]
            distances.append(float((p * (old.log_softmax(0) - logits.log_softmax(0))).sum()))
        found[weight] = distances
    reach = nice(max(map(max, found.values())))
    x, y = Axis(1, STEPS, LEFT, RIGHT), Axis(0, reach, BOTTOM, TOP)
    steps = "optimizer steps on one collection"
    parts = frame(x, y, range(1, STEPS + 1), [0, reach / 2, reach], float, steps, "KL(sampler || policy), nats")
    for number, (weight, distances) in enumerate(found.items()):
        points = [(x(step), y(value)) for step, value in enumerate(distances, 1)]
        parts += [stroke(points, COLORS[number], 2), *(mark(*point, COLORS[number]) for point in points)]
        parts += legend(number, f"weight {weight:g}")
    return picture("What the term adds to the drift from the sampler", parts)


# --- measured: the studies with several doses ----------------------------------------------------------------------


def differences(metrics: Sequence[str]) -> list[tuple[str, float, bool, list]]:
    """(arm, dose, whether on held-out tasks, the interval of each metric's difference from GRPO) over all tasks."""
    found = []
    for study in studies():
        if study.name not in ("held_out", "held_out_doses", "development_doses"):
            continue
        by_arm: dict[tuple[str, str], dict[str, list[float]]] = {}
        for one in over_tasks(study_rows(study), study, {metric: AT_1[metric] for metric in metrics}):
            by_arm.setdefault(one.arm, {})[one.metric] = one.values
        for (arm, dose), values in by_arm.items():
            if arm in FORMS and dose:
                of_metrics = [seeds_interval(metric, values[metric], differences=True) for metric in metrics]
                found.append((arm, float(dose), "held_out" in study.name, of_metrics))
    return found


def entropy_kept() -> str:
    """Entropy minus GRPO's over the weight of the term."""
    points = [one for one in differences(["entropy"]) if one[0] in ("ed_grpo", "ed_grpo_floor")]
    reach = nice(max(interval.high for *_, (interval,) in points))
    x, y = Axis(math.log(0.002), math.log(1.5), LEFT, RIGHT), Axis(-reach / 5, reach, BOTTOM, TOP)
    parts = frame(x, y, [0.003, 0.01, 0.03, 0.1, 0.3, 1], [0, reach / 2, reach], math.log, "weight of the term",
                  "entropy minus GRPO's, nats")  # fmt: skip
    for arm, dose, held_out, (interval,) in points:
        number = list(FORMS).index(arm)
        at = x(math.log(dose)) + (4 if held_out else -4)
        parts += [stroke([(at, y(interval.low)), (at, y(interval.high))], COLORS[number], 2),
                  mark(at, y(interval.mean), COLORS[number], filled=held_out)]  # fmt: skip
    for number, label in enumerate(list(FORMS.values())[:2]):
        parts += legend(number, label)
    parts.append(text(RIGHT + 20, TOP + 60, "filled: held-out tasks", size=12))
    return picture("Entropy that the term keeps", parts)


def accuracy_paid() -> str:
    """Sampled accuracy minus GRPO's over Distinct-4 minus GRPO's, for the term and its rivals."""
    points = differences(["distinct_4", "accuracy"])
    wide = nice(max(distinct.high for *_, (distinct, _) in points))
    deep = nice(max(-accuracy.low for *_, (_, accuracy) in points))
    x, y = Axis(-wide / 5, wide, LEFT, RIGHT), Axis(-deep, deep / 5, BOTTOM, TOP)
    parts = frame(x, y, [0, wide / 2, wide], [-deep, -deep / 2, 0], float, "Distinct-4 minus GRPO's",
                  "sampled accuracy minus GRPO's")  # fmt: skip
    for arm, _, held_out, (distinct, accuracy) in points:
        color = COLORS[list(FORMS).index(arm)]
        at = x(distinct.mean), y(accuracy.mean)
        parts += [stroke([(x(distinct.low), at[1]), (x(distinct.high), at[1])], color),
                  stroke([(at[0], y(accuracy.low)), (at[0], y(accuracy.high))], color),
                  mark(*at, color, filled=held_out)]  # fmt: skip
    for number, label in enumerate(FORMS.values()):
        parts += legend(number, label)
    parts.append(text(RIGHT + 20, TOP + 20 + 22 * len(FORMS), "filled: held-out tasks", size=12))
    return picture("Accuracy that diversity costs", parts)


def frame(
    x: Axis, y: Axis, across: Sequence[float], up: Sequence[float], scale: Callable, below: str, title: str
) -> list[str]:
    """Lines and labels of both axes; ``scale`` of x, and of y where it is logarithmic too."""
    of_y = math.log if scale is math.log and min(up) > 0 else float
    parts = [text(LEFT, TOP - 6, title, size=12), text((LEFT + RIGHT) / 2, BOTTOM + 42, below, anchor="middle")]
    for value in up:
        at = y(of_y(value))
        parts += [stroke([(LEFT, at), (RIGHT, at)], GRID if value else START_COLOR),
                  text(LEFT - 6, at + 4, f"{value:g}", size=11, anchor="end")]  # fmt: skip
    for value in across:
        at = x(scale(value))
        parts += [stroke([(at, BOTTOM), (at, BOTTOM + 5)], START_COLOR),
                  text(at, BOTTOM + 20, f"{value:g}", size=11, anchor="middle")]  # fmt: skip
    return parts


def picture(title: str, parts: list[str]) -> str:
    return svg(WIDTH, HEIGHT, title, parts, "theory_charts")


def legend(number: int, label: str) -> list[str]:
    y = TOP + 10 + 22 * number
    return [mark(RIGHT + 26, y, COLORS[number]), text(RIGHT + 38, y + 4, label, size=12)]


if __name__ == "__main__":
    write(charts())
