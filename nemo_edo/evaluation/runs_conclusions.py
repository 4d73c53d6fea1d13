"""Several runs in words: what exceeds its interval over seeds, what does not, and what seeds do not allow to say."""

from __future__ import annotations

import json
from collections.abc import Iterable

from nemo_edo.evaluation.comparison import metric_name
from nemo_edo.evaluation.conclusions import MALFORMED_BELOW, direction, signed
from nemo_edo.evaluation.run_set import arm_settings
from nemo_edo.evaluation.runs_comparison import OverSeeds, RunsComparison, SeedDifference

LEVEL = 0.05


def runs_conclusions(comparison: RunsComparison, left_out: dict) -> list[str]:
    """What the runs show and do not show, one paragraph a string, the scope first."""
    return [
        _scope(comparison),
        *_left_out(left_out),
        *_one_seed(comparison),
        *_breakdowns(comparison),
        *_by_arm(comparison),
        *_alpha(comparison),
        *_matched(comparison),
        *_multiplicity(comparison),
    ]


def count(number: int, noun: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _scope(comparison: RunsComparison) -> str:
    seeds = ", ".join(map(str, comparison.seeds))
    return (
        f"{count(comparison.runs, 'run')} with {count(len(comparison.seeds), 'seed')} ({seeds}) and "
        f"{count(len(comparison.arms), 'trained arm')}, on {comparison.problems} test problems. Intervals over seeds "
        "are Student's t: with few seeds they are wide, but they cover the luck of training. Intervals over problems "
        "cover the choice of test problems only."
    )


def _left_out(left_out: dict) -> list[str]:
    if not left_out:
        return []
    named = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
    return [f"Left out, because incomplete: {named}."]


def _one_seed(comparison: RunsComparison) -> list[str]:
    single = [arm for arm, by_seed in comparison.arms.items() if len(by_seed) == 1]
    if not single:
        return []
    which = (
        "Every arm has"
        if len(single) == len(comparison.arms)
        else f"{' and '.join(single)} {'has' if len(single) == 1 else 'have'}"
    )
    return [f"{which} one seed only, so nothing is claimed there: a difference may be the luck of one training."]


def _breakdowns(comparison: RunsComparison) -> list[str]:
    cells = {arm: comparison.table[arm].get("well_formed") for arm in comparison.arms}
    return [
        f"{arm} broke down: only {cell.interval.mean:.0%} of its answers are well-formed. Read its entropy and "
        "diversity as noise, not as exploration."
        for arm, cell in cells.items()
        if cell and cell.interval.mean < MALFORMED_BELOW
    ]


def _by_arm(comparison: RunsComparison) -> list[str]:
    paragraphs = []
    for arm in comparison.arms:
        found = [d for d in comparison.differences if d.arm == arm and d.over_seeds.known]
        if not found:
            continue
        shown = [_in_words(d) for d in found if d.exceeds_interval]
        unclear = [_word(d.metric) for d in found if not d.exceeds_interval]
        words = ", ".join(shown) if shown else "nothing differs by more than its interval over seeds"
        rest = f"; no difference shown in {', '.join(unclear)}" if shown and unclear else ""
        seeds = count(len(found[0].over_seeds.by_seed), "seed")
        paragraphs.append(f"{arm} against {comparison.baseline}, {seeds}: {words}{rest}.")
    return paragraphs


def _in_words(difference: SeedDifference) -> str:
    word = direction(difference.over_seeds_only)
    return f"{word} {_word(difference.metric)} ({signed(difference.over_seeds.interval)})"


def _alpha(comparison: RunsComparison) -> list[str]:
    """For arms that differ in alpha alone: whether it makes a measurable difference against alpha = 0."""
    paragraphs = []
    for family in _alpha_families(comparison):
        base = next((arm for alpha, arm in family if alpha == 0), None)
        others = {arm: alpha for alpha, arm in family if alpha}
        if base is None or base != comparison.baseline or not others:
            continue
        found = [d for d in comparison.differences if d.arm in others and d.over_seeds.known]
        if not found:
            paragraphs.append("Whether alpha matters cannot be said from one seed.")
            continue
        exceeding = [d for d in found if d.exceeds_interval]
        values = ", ".join(f"{alpha:g}" for alpha in others.values())
        if exceeding:
            names = "; ".join(f"{d.arm}: {_in_words(d)}" for d in exceeding)
            outcome = f"{len(exceeding)} of {len(found)} differences exceed their interval over seeds ({names})"
        else:
            outcome = (
                "alpha makes no measurable difference here: none of "
                f"{len(found)} differences in {', '.join(dict.fromkeys(_word(d.metric) for d in found))} exceeds its "
                "interval over seeds"
            )
        paragraphs.append(f"Alpha {values} against 0: {outcome}.")
    return paragraphs


def _alpha_families(comparison: RunsComparison) -> Iterable[list[tuple[float, str]]]:
    """(alpha, arm) of the arms that share every setting but the strength of exploration, by rising alpha."""
    families: dict[str, list[tuple[float, str]]] = {}
    for arm, by_seed in comparison.arms.items():
        trained = next(iter(by_seed.values()))
        if trained.settings.alpha is None:
            continue
        settings = arm_settings(trained.record, trained.name)
        rest = {key: value for key, value in settings.items() if key not in ("alpha", "exploration_coefficient")}
        families.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append((trained.settings.alpha, arm))
    return [sorted(family) for family in families.values() if len(family) > 1]


def _matched(comparison: RunsComparison) -> list[str]:
    matched = comparison.matched
    if len(comparison.arms) < 2:
        return []
    if not matched.accuracies:
        return ["No comparison at matched accuracy is possible in any seed."]
    readings = [
        f"{_word(measure)}: {'; '.join(_matched_reading(arm, cell) for arm, cell in by_arm.items())}."
        for measure, by_arm in matched.differences.items()
        if by_arm
    ]
    levels = ", ".join(f"{accuracy:.3f} (seed {seed})" for seed, accuracy in matched.accuracies.items())
    compared = f"minus {comparison.baseline}, {' '.join(readings)}" if readings else "no arm has a baseline beside it."
    left_out = [
        f"{arm} is left out of the matched comparison in {count(len(reasons), 'seed')}: {next(iter(reasons.values()))}."
        for arm, reasons in matched.left_out.items()
    ]
    return [
        f"At matched accuracy on the training problems, {levels}: {compared} Arms learn at different speeds, so this "
        "is the fairer view of diversity.",
        *left_out,
    ]


def _matched_reading(arm: str, cell: OverSeeds) -> str:
    if not cell.known:
        return f"{arm} {cell.interval.mean:+.3f} (one seed)"
    beyond = "" if cell.interval.low > 0 or cell.interval.high < 0 else ", no difference shown"
    return f"{arm} {signed(cell.interval)}{beyond}"


def _multiplicity(comparison: RunsComparison) -> list[str]:
    tested = [d for d in comparison.differences if d.over_seeds.known]
    if not tested:
        return []
    exceeding = sum(d.exceeds_interval for d in tested)
    surviving = sum(d.p_adjusted < LEVEL for d in comparison.differences)
    return [
        f"{len(tested)} differences were tested against {comparison.baseline}, and {exceeding} exceed their interval "
        f"over seeds; with no difference at all about {LEVEL * len(tested):.1f} would be expected to. Over problems, "
        f"{surviving} of {len(comparison.differences)} have a p-value below {LEVEL:g} after Holm's correction; that "
        "says the trained policies differ, not that the methods do."
    ]


def _word(metric: str) -> str:
    return metric_name(metric).removesuffix(" (nats)")
