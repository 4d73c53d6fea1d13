"""Estimates and differences, over problems in one run and over seeds in several, readings at matched accuracy,
and no claim in words beyond an interval."""

import json
import math
import re
import shutil
import statistics
from pathlib import Path

import matching_simulation as simulation
import numpy as np
import pytest
import yaml
from helpers.one_run import evaluation, one_run, settings
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, Evaluation
from nemo_edo.metrics import holm, mean_interval, paired_difference, share_interval
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.conclusions import conclusions, terminal_table
from nemo_edo.report.matching import MATCHED_MEASURES, match_accuracy
from nemo_edo.report.run_folders import find_runs
from nemo_edo.report.run_set import one_run as read_one_run
from nemo_edo.report.run_set import read_runs

SEEDS, ARMS = (1, 2, 3), ("grpo", "edo_floor")
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
    for seed in SEEDS:
        write_run_folder(tmp_path / f"{seed}", seed=seed, arms=ARMS, problems=30, iterations=3, replicate=True)
    several = compare(read_runs(find_runs([str(tmp_path)])))
    assert list(several.arms) == ["GRPO", FLOOR] and {d.arm for d in several.differences} == {FLOOR}
    apart = [r.replicate.mean("entropy") - r.evaluations["grpo"].mean("entropy") for r in several.runs.records]
    assert several.noise["entropy"] == pytest.approx(math.sqrt(sum(gap**2 for gap in apart) / 3))


def test_a_replicate_that_was_trained_by_itself_is_an_arm(tmp_path):
    write_run_folder(tmp_path / "grpo", iterations=3, problems=30, arms=("grpo",))
    write_run_folder(tmp_path / "again", iterations=3, problems=30, arms=(), replicate=True)
    alone = compare(read_one_run(tmp_path / "again"))
    assert list(alone.arms) == ["replicate"] and alone.baseline == START and alone.replicate is None
    assert alone.noise == {} and "accuracy" in alone.table["replicate"]
    both = compare(read_runs(find_runs([str(tmp_path)])))
    assert set(both.arms) == {"GRPO", "GRPO, replicate"} and both.noise == {}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Three seeds of three arms, one seed of another arm, and a run that has not finished."""
    folder = tmp_path_factory.mktemp("study")
    for seed in SEEDS:
        write_run_folder(folder / f"seed={seed}", seed=seed, arms=("grpo", "edo_paper", "edo_floor"), problems=60)
    write_run_folder(folder / "one", seed=1, arms=(), alphas={"policy": 0.1}, problems=60)
    unfinished = write_run_folder(folder / "unfinished", seed=9, arms=("grpo",), problems=60)
    (unfinished / "summary.json").unlink()
    return folder


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    return compare(read_runs(find_runs([str(study)])))


def values(comparison: Comparison, label: str, metric: str) -> list[float]:
    return [comparison.arms[label][seed].evaluation.mean(metric) for seed in SEEDS]


def test_cells_are_means_over_seeds_with_students_interval(comparison: Comparison):
    cell = comparison.table[FLOOR]["distinct_4"]
    found = values(comparison, FLOOR, "distinct_4")
    assert list(cell.by_seed.values()) == pytest.approx(found, abs=1e-15)
    assert vars(cell.interval) == pytest.approx(vars(mean_interval(found)), abs=1e-6)  # but for the metric's rounding
    half = 4.302652729911275 * statistics.stdev(found) / math.sqrt(3)
    assert cell.interval.high - cell.interval.low == pytest.approx(2 * half, rel=1e-4)


def test_differences_are_paired_by_common_seeds_and_one_of_them_shows_nothing(comparison: Comparison):
    difference = comparison.difference(FLOOR, "entropy")
    pairs = zip(values(comparison, FLOOR, "entropy"), values(comparison, "GRPO", "entropy"), strict=True)
    assert vars(difference.interval) == pytest.approx(vars(mean_interval([a - b for a, b in pairs])), abs=1e-6)
    gaps = list(difference.by_seed.values())
    t = statistics.mean(gaps) / statistics.stdev(gaps) * math.sqrt(3)  # with two degrees of freedom:
    assert difference.p_value == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-3)
    p_values = [d.p_value for d in comparison.differences if len(d.by_seed) == 3]
    assert [d.p_adjusted for d in comparison.differences if len(d.by_seed) == 3] == holm(p_values).tolist()
    assert difference.shown == (difference.p_adjusted < 0.05)
    alone = comparison.difference(ALONE, "entropy")
    assert (list(alone.by_seed), alone.known, alone.shown) == ([1], False, False)
    assert next(iter(comparison.labels)) == START
    assert list(comparison.table[START]["greedy_accuracy"].by_seed) == list(SEEDS)  # once for each seed


def test_seeds_that_tie_show_nothing_and_a_warm_up_that_they_share_counts_once(tmp_path):
    for seed in SEEDS:
        folder = write_run_folder(tmp_path / f"{seed}", seed=seed, arms=ARMS, problems=20, iterations=3)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 1}))
        for arm, right in (("grpo", 9), ("edo_floor", 10)):
            path = folder / "evaluations" / f"{arm}.json"
            record = json.loads(path.read_text())
            record["metrics"]["greedy_accuracy"]["sum"] = [1.0] * right + [0.0] * (20 - right)
            path.write_text(json.dumps(record))
    found = compare(read_runs(find_runs([str(tmp_path)])))
    tied = found.difference(FLOOR, "greedy_accuracy")
    assert (tied.interval.mean, tied.shown) == (pytest.approx(0.05), False) and 0.01 < tied.p_value < 0.1
    assert tied.interval.low < 0 and tied.detectable > 0.05
    assert 0 < found.cell("GRPO", "greedy_accuracy").interval.low < 9 / 20
    assert len(found.cell(START, "greedy_accuracy").by_seed) == 1


def test_over_problems_the_seeds_are_pooled_and_pairs_kept(comparison: Comparison):
    difference = comparison.difference(PAPER, "accuracy")
    pooled = []
    for label in (PAPER, "GRPO"):
        evaluations = [comparison.arms[label][seed].evaluation.metrics["accuracy"] for seed in SEEDS]
        pooled += [sum(sums for sums, _ in evaluations), sum(counts for _, counts in evaluations)]
    assert difference.over_problems == paired_difference(*pooled, resamples=200, seed=0)[0]
    assert difference.over_problems.mean == pytest.approx(difference.interval.mean, abs=1e-12)


def test_matched_values_are_those_of_each_seed_alone(comparison: Comparison):
    matched = comparison.matched
    for seed in SEEDS[1:]:
        curves = {arm: by[seed].lines("collection")[["reward", *MATCHED_MEASURES]].to_numpy()
                  for arm, by in comparison.arms.items() if seed in by}
        alone = match_accuracy(curves)
        assert matched.accuracies[seed] == alone.accuracy
        for place, measure in enumerate(MATCHED_MEASURES):
            assert matched.values[measure][FLOOR].by_seed[seed] == alone.values[FLOOR][place]
            assert matched.last[measure][FLOOR].by_seed[seed] == curves[FLOOR][-1, 1 + place]
            gap = alone.values[FLOOR][place] - alone.values["GRPO"][place]
            assert matched.differences[measure][FLOOR].by_seed[seed] == pytest.approx(gap, abs=1e-15)


def test_arms_are_matched_by_their_accuracy_whatever_scale_rewards_have(study: Path, tmp_path):
    folder = shutil.copytree(study / "seed=1", tmp_path / "graded")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    graded = [line | {"accuracy": line["reward"], "reward": 9.0} if "reward" in line else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in graded))
    assert compare(read_one_run(folder)).matched == compare(read_one_run(study / "seed=1")).matched


def test_a_baseline_can_be_chosen_and_has_to_exist(comparison: Comparison, study: Path):
    runs = comparison.runs
    assert compare(runs, FLOOR).baseline == FLOOR
    alone = read_one_run(study / "seed=1")
    assert compare(alone, FLOOR).baseline == compare(alone, "edo_floor").baseline == "edo_floor"
    with pytest.raises(UserError, match="--baseline: .*'DPO'.*GRPO; "):
        compare(runs, "DPO")
    with pytest.raises(UserError, match=r"summary.json: .*'c'.* a, b"):
        compared([evaluation("a"), evaluation("b")], baseline="c")


def points(*pairs) -> np.ndarray:
    """[C, 3] of (accuracy, entropy): Distinct-4 is twice the entropy."""
    return np.array([(accuracy, entropy, 2 * entropy) for accuracy, entropy in pairs]).reshape(-1, 3)


def frontier_line(*accuracies: float, bend: float = 0.0, shift: float = 0.0) -> np.ndarray:
    return points(*((a, 1 + shift - a + bend * a**2) for a in accuracies))


def test_arms_are_compared_in_the_middle_of_the_range_that_all_reached_and_a_shift_is_found_whatever_the_speeds():
    slow, fast = frontier_line(*np.linspace(0.2, 0.6, 9)), frontier_line(0.2, 0.35, 0.49, 0.7, 0.9, shift=0.1)
    matched = match_accuracy({"fast": fast, "slow": slow}, "slow")
    assert matched.accuracy == pytest.approx(0.2 + 0.55 * 0.4)
    assert matched.values["slow"] == pytest.approx([1 - 0.42, 2 * (1 - 0.42)])
    assert matched.values["fast"] == pytest.approx([1.1 - 0.42, 2 * (1.1 - 0.42)])


def test_the_chords_of_a_quadratic_frontier_cancel():
    """Read at common levels, the arm with the longer chords would be 0.02 above the other."""
    dense, sparse = frontier_line(*np.linspace(0.1, 0.9, 401), bend=2), frontier_line(*np.linspace(0.1, 0.9, 5), bend=2)
    values = match_accuracy({"dense": dense, "sparse": sparse}).values
    assert values["sparse"] == pytest.approx(values["dense"], abs=0.001)


def test_a_collection_that_falls_is_averaged_with_those_before_it_and_a_collapse_after_the_best_is_left_out():
    bumpy = points((0.2, 1.0), (0.5, 0.6), (0.3, 0.8), (0.6, 0.5), (0.0, 0.0))
    straight = points((0.2, 1.0), (0.4, 0.7), (0.6, 0.5))
    matched = match_accuracy({"bumpy": bumpy, "straight": straight})
    assert matched.values["bumpy"] == pytest.approx(matched.values["straight"])


def test_arms_that_cannot_be_matched_have_a_reason_and_do_not_pull_the_level_of_the_others_down():
    curves = {"a": frontier_line(0.3, 0.45, 0.7), "b": frontier_line(0.3, 0.5, 0.6)}
    matched = match_accuracy(curves | {"collapsed": points((0.3, 1.0), (0.31, 0.9), (0.0, 0.0))})
    assert matched.accuracy == pytest.approx(0.3 + 0.55 * 0.3)
    assert "never left the start" in matched.reasons["collapsed"] and "collapsed" not in matched.values
    apart = match_accuracy({"a": frontier_line(0.2, 0.9), "b": frontier_line(0.2, 0.8)})  # no collection in the range
    assert apart.accuracy is None and apart.values == {} and "cannot be compared" in apart.reasons["b"]
    flat, learned = points((0.3, 1.0), (0.31, 1.0)), points((0.2, 1.0), (0.6, 0.5))
    for curves in ({"a": flat, "b": flat}, {"a": learned, "b": points()}):
        matched = match_accuracy(curves)
        assert (matched.accuracy, set(matched.reasons)) == (None, {"a", "b"})
    assert "no collection" in matched.reasons["b"]


def test_collections_without_a_measure_give_nan_not_zero():
    bare = points((0.2, math.nan), (math.nan, math.nan), (0.35, math.nan), (0.6, math.nan))
    matched = match_accuracy({"a": bare, "b": frontier_line(0.2, 0.4, 0.5)})
    assert np.isnan(matched.values["a"]).all()


@pytest.mark.parametrize("frontier", ["quadratic", "hinge", "S-shaped"])
def test_a_slower_arm_on_the_same_frontier_is_found_different_in_few_of_a_hundred_studies(frontier: str):
    """By common levels it was .5 for a hinge. Of 200 studies, a share of .06 is above .105 with probability .005."""
    assert simulation.shown(np.random.default_rng(1), frontier, 10, 200, speeds=(3.0, 20.0)) <= 0.105


HALF = np.tile([0.0, 1.0], 40)
STRAIGHT = ((0.3, 0.3), (0.45, 0.25), (0.6, 0.2))


def said_of(explorer=HALF, entropy=0.2, well_formed=1.0, curve=STRAIGHT, again=None):
    """GRPO and an entropy bonus with half of the votes, an exploring arm and, if its votes are given, a replicate."""
    arms = {"grpo": settings("GRPO"), "explorer": settings("Explorer", weight=0.3),
            "bonus": settings("Bonus")}
    ones = np.ones(80)
    evaluations = [
        evaluation("explorer", 80, vote_at_7=explorer, entropy=ones * entropy, well_formed=ones * well_formed),
        *(evaluation(arm, 80, vote_at_7=HALF, entropy=ones * 0.2, well_formed=ones) for arm in ("grpo", "bonus"))]
    curves = {"grpo": STRAIGHT, "explorer": curve, "bonus": STRAIGHT}
    replicate = None if again is None else evaluation("replicate", 80, vote_at_7=again)
    return compare(one_run(evaluations, arms, baseline="grpo", curves=curves, replicate=replicate))


@pytest.mark.parametrize(("changes", "said"), [
    ({"explorer": HALF * 0}, ["2 arms differ from GRPO in vote@7 by -0.500 to +0.000", "One seed gives no verdict"]),
    ({"explorer": HALF * 0 + 1, "again": HALF * 0.5},
     ["GRPO, trained again with other samples, differs from itself by 0.250. One seed gives no verdict"]),
    ({"entropy": 1.0, "well_formed": 0.1}, ["broke down: only 10% of its answers are well-formed"]),
    ({"curve": ((0.3, 0.3), (0.4, 0.29), (0.5, 0.28))},
     ["0.410", "GRPO 0.263; Explorer 0.295 (+0.031); Bonus 0.263 (+0.000)", "carry no interval"]),
    ({"curve": ((0.3, 0.3), (0.3, 0.28))}, ["Explorer is left out of the matched", "never left the start"])])
def test_words_of_one_seed_have_values_and_the_noise_and_no_verdict(changes: dict, said: list):
    comparison = said_of(**changes)
    text = " ".join(conclusions(comparison))
    assert all(part in text for part in said)
    verdicts = [word for word in ("better", "worse", "higher", "lower", "exceed") if word in text]
    assert not verdicts and "*" not in terminal_table(comparison)


def test_words_of_several_runs_claim_what_the_seeds_show_and_state_runs_and_seeds(comparison):
    several = conclusions(comparison)
    text = "\n".join(several)
    assert "4 runs with 3 seeds (1, 2, 3) and 4 trained arms, on 60 test problems" in several[-1]
    assert re.search("Left out.*unfinished: it has not finished", several[1])
    assert re.search(f"^Over 3 seeds, 1 of 12 differences from GRPO is shown .*: {FLOOR}: higher entropy ", several[0])
    assert re.search(f"{FLOOR} against GRPO, 3 seeds: higher entropy .*; no difference shown in", text)
    assert f"{PAPER} shows no gain over GRPO" in text and f"{ALONE} has one seed only" in text
    assert not [line for line in several if line.startswith((f"{ALONE} against", f"{ALONE} exceeds"))]
