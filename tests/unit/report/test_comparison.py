"""Estimates and differences: over problems in one run, over seeds in several."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from helpers.one_run import evaluation, one_run, settings
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, Evaluation
from nemo_edo.metrics import holm, mean_interval, paired_difference, share_interval
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.matching import MATCHED_MEASURES, match_accuracy
from nemo_edo.report.run_set import find_runs, read_runs
from nemo_edo.report.run_set import one_run as read_one_run

SEEDS = (1, 2, 3)
PAPER, FLOOR, ALONE = "ED-GRPO, the paper's alpha", "ED-GRPO 0.3, floor -0.1", "ED-GRPO α=0.1"
BASE = np.linspace(0, 1, 50)


def compared(evaluations, names=("a", "b"), baseline="a") -> Comparison:
    return compare(one_run(evaluations, {name: settings(name) for name in names}, baseline=baseline, seed=7))


def test_one_runs_estimates_are_over_problems_and_what_only_one_arm_has_is_not_compared():
    ones = np.ones(50)
    rows = dict.fromkeys(("vote_at_4", "vote_at_16", "well_formed"), ones)
    ours, theirs = evaluation("a", accuracy=BASE**2, entropy=ones, **rows), evaluation("b", accuracy=BASE, **rows)
    result = compared([ours, theirs])
    assert result.table["a"]["accuracy"].interval == share_interval(BASE**2, ones, resamples=200, seed=7)
    found = result.difference("b", "accuracy")
    expected, _ = paired_difference(BASE, ones, BASE**2, ones, resamples=200, seed=7)
    assert found.interval == found.over_problems == expected
    assert [(d.arm, d.metric) for d in result.differences] == [("b", "accuracy"), ("b", "vote@16")]
    empty = Evaluation("a", ("x",), {"entropy": (np.zeros(1), np.zeros(1))})
    assert compared([empty], names=("a",)).cell("a", "entropy") is None


def test_a_replicate_is_no_arm_and_its_distance_from_the_baseline_is_the_noise(tmp_path):
    ours = [evaluation("a", accuracy=BASE), evaluation("b", accuracy=BASE)]
    again = evaluation("replicate", accuracy=BASE / 2)
    found = compare(one_run(ours, {name: settings(name) for name in "ab"}, baseline="a", replicate=again))
    assert (list(found.labels), [d.arm for d in found.differences]) == (["a", "b"], ["b"])
    assert found.noise == {"accuracy": pytest.approx(0.25)}
    for seed in SEEDS:
        write_run_folder(tmp_path / f"{seed}", seed=seed, arms=("grpo", "edo_floor"), problems=30, iterations=3,
                         replicate=True)
    several = compare(read_runs(find_runs([str(tmp_path)])))
    assert list(several.arms) == ["GRPO", FLOOR]
    apart = [r.replicate.mean("entropy") - r.evaluations["grpo"].mean("entropy") for r in several.runs.records]
    assert several.noise["entropy"] == pytest.approx(math.sqrt(sum(gap**2 for gap in apart) / 3))


@pytest.fixture(scope="module")
def runs(study: Path):
    return read_runs(find_runs([str(study)]))


@pytest.fixture(scope="module")
def comparison(runs) -> Comparison:
    return compare(runs)


def values(runs, label: str, metric: str) -> list[float]:
    return [runs.arms[label][seed].evaluation.mean(metric) for seed in SEEDS]


def test_cells_are_means_over_seeds_with_students_interval(runs, comparison: Comparison):
    cell = comparison.table[FLOOR]["distinct_4"]
    found = values(runs, FLOOR, "distinct_4")
    assert list(cell.by_seed.values()) == pytest.approx(found, abs=1e-15)
    assert cell.interval == mean_interval(found)
    half = 4.302652729911275 * statistics.stdev(found) / math.sqrt(3)
    assert cell.interval.high - cell.interval.low == pytest.approx(2 * half, rel=1e-9)
    assert cell.band == (min(found), max(found))


def test_differences_are_paired_by_common_seeds_and_one_of_them_shows_nothing(runs, comparison: Comparison):
    difference = comparison.difference(FLOOR, "entropy")
    pairs = zip(values(runs, FLOOR, "entropy"), values(runs, "GRPO", "entropy"), strict=True)
    assert difference.interval == mean_interval([ours - theirs for ours, theirs in pairs])
    gaps = list(difference.by_seed.values())
    t = statistics.mean(gaps) / statistics.stdev(gaps) * math.sqrt(3)  # with two degrees of freedom:
    assert difference.p_value == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-9)
    p_values = [d.p_value for d in comparison.differences if len(d.by_seed) == 3]
    assert [d.p_adjusted for d in comparison.differences if len(d.by_seed) == 3] == holm(p_values).tolist()
    assert difference.shown == (difference.p_adjusted < 0.05)
    alone = comparison.difference(ALONE, "entropy")
    assert (list(alone.by_seed), alone.known, alone.shown) == ([1], False, False)
    assert next(iter(comparison.labels)) == START
    assert list(comparison.table[START]["greedy_accuracy"].by_seed) == list(SEEDS)  # once for each seed


def test_over_problems_the_seeds_are_pooled_and_pairs_kept(runs, comparison: Comparison):
    difference = comparison.difference(PAPER, "accuracy")
    pooled = []
    for label in (PAPER, "GRPO"):
        evaluations = [runs.arms[label][seed].evaluation.metrics["accuracy"] for seed in SEEDS]
        pooled += [sum(sums for sums, _ in evaluations), sum(counts for _, counts in evaluations)]
    assert difference.over_problems == paired_difference(*pooled, resamples=200, seed=0)[0]
    assert difference.over_problems.mean == pytest.approx(difference.interval.mean, abs=1e-12)


def test_matched_values_are_those_of_each_seed_alone(runs, comparison: Comparison):
    matched = comparison.matched
    for seed in SEEDS[1:]:
        curves = {arm: by[seed].lines("collection")[["reward", *MATCHED_MEASURES]].to_numpy()
                  for arm, by in runs.arms.items() if seed in by}
        alone = match_accuracy(curves)
        assert matched.accuracies[seed] == alone.accuracy
        for place, measure in enumerate(MATCHED_MEASURES):
            assert matched.values[measure][FLOOR].by_seed[seed] == alone.values[FLOOR][place]
            assert matched.last[measure][FLOOR].by_seed[seed] == curves[FLOOR][-1, 1 + place]
            gap = alone.values[FLOOR][place] - alone.values["GRPO"][place]
            assert matched.differences[measure][FLOOR].by_seed[seed] == pytest.approx(gap, abs=1e-15)


def test_changes_count_problems_against_the_start_and_the_baseline(runs, comparison: Comparison):
    def solved(evaluation) -> set[int]:
        return {place for place, value in enumerate(evaluation.metrics["greedy_accuracy"][0]) if value == 1}

    for before, found in ((START, comparison.from_start), ("GRPO", comparison.from_baseline)):
        gained = lost = 0
        for seed in SEEDS:
            new = solved(runs.arms[FLOOR][seed].evaluation)
            old = solved(runs.policies[before][seed].evaluation)
            gained, lost = gained + len(new - old), lost + len(old - new)
        assert found[FLOOR] == (gained / 3, lost / 3)


def test_a_baseline_can_be_chosen_and_has_to_exist(runs, study: Path):
    assert compare(runs, FLOOR).baseline == FLOOR
    alone = read_one_run(study / "seed=1")
    assert compare(alone, FLOOR).baseline == compare(alone, "edo_floor").baseline == "edo_floor"
    with pytest.raises(UserError, match="--baseline: .*'DPO'.*GRPO; "):
        compare(runs, "DPO")
    with pytest.raises(UserError, match=r"summary.json: .*'c'.* a, b"):
        compared([evaluation("a"), evaluation("b")], baseline="c")
