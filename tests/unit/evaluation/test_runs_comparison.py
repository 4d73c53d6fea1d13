"""Means over seeds, differences paired by seed and by problem, and the words and files that they become."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path

import pytest

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import START_LABEL, match_accuracy
from nemo_edo.evaluation.run_record import compare_run, curve
from nemo_edo.evaluation.run_set import find_runs, read_runs
from nemo_edo.evaluation.runs_charts import over_seeds, pareto_front, runs_charts
from nemo_edo.evaluation.runs_comparison import RunsComparison, compare_runs
from nemo_edo.evaluation.runs_conclusions import runs_conclusions
from nemo_edo.evaluation.runs_report import COLUMNS, write_runs_report
from nemo_edo.metrics import mean_interval, paired_bootstrap

SEEDS = (1, 2, 3)
PAPER, FLOOR = "ED-GRPO, the paper's alpha", "ED-GRPO 0.3, floor -0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_run_folder) -> Path:
    folder = tmp_path_factory.mktemp("study")
    for seed in SEEDS:
        write_run_folder(folder / f"seed={seed}", seed=seed, arms=("grpo", "edo_paper", "edo_floor"), problems=60)
    write_run_folder(folder / "one", seed=1, arms=(), alphas={"policy": 0.1}, problems=60)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path):
    return read_runs(find_runs([str(folder)]))


@pytest.fixture(scope="module")
def comparison(runs) -> RunsComparison:
    return compare_runs(runs)


def value(runs, label: str, seed: int, metric: str) -> float:
    sums, counts = runs.arms[label][seed].evaluation.metrics[metric]
    return sums.sum() / counts.sum()


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_cells_are_means_over_seeds_with_students_interval(runs, comparison: RunsComparison):
    cell = comparison.table[FLOOR]["distinct_4"]
    values = [value(runs, FLOOR, seed, "distinct_4") for seed in SEEDS]
    assert list(cell.by_seed.values()) == pytest.approx(values, abs=1e-15)
    assert cell.interval == mean_interval(values)
    half = 4.302652729911275 * statistics.stdev(values) / math.sqrt(3)
    assert cell.interval.high - cell.interval.low == pytest.approx(2 * half, rel=1e-9)


def test_the_start_stands_first_once_for_each_seed(comparison: RunsComparison):
    assert comparison.labels[0] == START_LABEL
    assert list(comparison.table[START_LABEL]["greedy_accuracy"].by_seed) == list(SEEDS)


def test_differences_are_paired_by_seed(runs, comparison: RunsComparison):
    difference = comparison.difference(FLOOR, "entropy")
    gaps = [value(runs, FLOOR, seed, "entropy") - value(runs, "GRPO", seed, "entropy") for seed in SEEDS]
    assert difference.over_seeds.interval == mean_interval(gaps)
    assert difference.exceeds_interval


def test_over_problems_the_seeds_are_pooled_and_pairs_kept(runs, comparison: RunsComparison):
    difference = comparison.difference(PAPER, "accuracy")
    pooled = []
    for label in (PAPER, "GRPO"):
        evaluations = [runs.arms[label][seed].evaluation.metrics["accuracy"] for seed in SEEDS]
        pooled += [sum(sums for sums, _ in evaluations), sum(counts for _, counts in evaluations)]
    assert difference.over_problems == paired_bootstrap(*pooled, resamples=200, seed=0)
    assert difference.over_problems.mean == pytest.approx(difference.over_seeds.interval.mean, abs=1e-12)
    assert difference.p_adjusted >= difference.p_value > 0.05


def test_large_differences_have_small_p_values_that_the_correction_raises(comparison: RunsComparison):
    difference = comparison.difference(FLOOR, "entropy")
    assert difference.p_value < difference.p_adjusted < 0.05


def test_only_common_seeds_are_paired_and_one_seed_shows_nothing(comparison: RunsComparison):
    difference = comparison.difference("ED-GRPO α=0.1", "entropy")
    assert list(difference.over_seeds.by_seed) == [1]
    assert not difference.over_seeds.known
    assert not difference.exceeds_interval


def test_matched_values_are_those_of_each_seed_alone(runs, comparison: RunsComparison):
    for seed in SEEDS[1:]:
        matched = match_accuracy({label: curve(found[seed].record, found[seed].name)
                                  for label, found in runs.arms.items() if seed in found})
        assert comparison.matched.accuracies[seed] == matched.accuracy
        assert comparison.matched.values["entropy"][FLOOR].by_seed[seed] == matched.values["entropy"][FLOOR]
        gap = matched.values["entropy"][FLOOR] - matched.values["entropy"]["GRPO"]
        assert comparison.matched.differences["entropy"][FLOOR].by_seed[seed] == pytest.approx(gap, abs=1e-15)


def test_changes_count_problems_against_the_start_and_the_baseline(runs, comparison: RunsComparison):
    def solved(evaluation) -> set[int]:
        return {place for place, value in enumerate(evaluation.metrics["greedy_accuracy"][0]) if value == 1}

    for before, found in (("start", comparison.from_start), ("GRPO", comparison.from_baseline)):
        gained = lost = 0
        for seed in SEEDS:
            trained = runs.arms[FLOOR][seed]
            old = solved(trained.start if before == "start" else runs.arms["GRPO"][seed].evaluation)
            gained, lost = gained + len(solved(trained.evaluation) - old), lost + len(old - solved(trained.evaluation))
        assert (found[FLOOR].newly_solved, found[FLOOR].lost, found[FLOOR].seeds) == (gained / 3, lost / 3, 3)


def test_one_run_says_the_same_means_as_its_own_report(folder: Path):
    runs = read_runs(find_runs([str(folder / "seed=1"), str(folder / "one")]))
    ours, single = compare_runs(runs), compare_run(runs.records[0])
    for label, arm in (("GRPO", "grpo"), (FLOOR, "edo_floor")):
        for metric in ours.metrics:
            mean = ours.table[label][metric].interval.mean
            assert mean == pytest.approx(single.table[arm][metric].mean, abs=1e-12)


def test_a_baseline_can_be_chosen_and_has_to_exist(runs):
    assert compare_runs(runs, FLOOR).baseline == FLOOR
    with pytest.raises(UserError, match="there is no arm 'DPO'; the arms are .*GRPO; "):
        compare_runs(runs, "DPO")


def test_seeds_of_one_arm_alone_are_compared_with_their_start(folder: Path, tmp_path, write_run_folder):
    for seed in SEEDS:
        write_run_folder(tmp_path / f"{seed}", seed=seed, arms=("edo_floor",), problems=30, iterations=3)
    comparison = compare_runs(read_runs(find_runs([str(tmp_path)])))
    assert comparison.baseline == START_LABEL
    assert comparison.difference(FLOOR, "greedy_accuracy").over_seeds.interval.mean > 0


# --- words ------------------------------------------------------------------------------------------------------------


def test_words_claim_what_exceeds_its_interval_over_seeds_and_no_more(comparison: RunsComparison):
    text = "\n".join(runs_conclusions(comparison, {}))
    assert f"{PAPER} against GRPO, 3 seeds: nothing differs by more than its interval over seeds." in text
    assert f"{FLOOR} against GRPO, 3 seeds: " in text
    assert "higher entropy" in text


def test_words_state_runs_seeds_and_what_was_left_out(comparison: RunsComparison):
    text = "\n".join(runs_conclusions(comparison, {Path("a/b"): "it has not come to its end"}))
    assert "4 runs with 3 seeds (1, 2, 3) and 4 trained arms, on 60 test problems" in text
    assert "Left out, because incomplete: a/b: it has not come to its end." in text


def test_words_mark_arms_of_one_seed(comparison: RunsComparison):
    [marked] = [line for line in runs_conclusions(comparison, {}) if "one seed only" in line]
    assert marked.startswith("ED-GRPO α=0.1 has one seed only")


@pytest.mark.parametrize(("shift", "expected"), [(0.0, "alpha makes no measurable difference here"),
                                                 (0.2, "differences exceed their interval over seeds")])
def test_words_about_alpha_follow_the_data(tmp_path, write_run_folder, shift: float, expected: str):
    for seed in SEEDS:
        for alpha in (0.0, 0.01, 0.1):
            run = write_run_folder(tmp_path / f"{alpha},{seed}", seed=seed, arms=(), alphas={"policy": alpha},
                                   problems=30, iterations=3)
            if alpha == 0.1 and shift:
                path = run / "evaluations" / "policy.json"
                record = json.loads(path.read_text())
                record["metrics"]["distinct_4"]["sum"] = [
                    value + shift + seed / 100 for value in record["metrics"]["distinct_4"]["sum"]]
                path.write_text(json.dumps(record))
    conclusions = runs_conclusions(compare_runs(read_runs(find_runs([str(tmp_path)]))), {})
    [about_alpha] = [line for line in conclusions if line.startswith("Alpha 0.01, 0.1 against 0: ")]
    assert expected in about_alpha


# --- charts and files -------------------------------------------------------------------------------------------------


def test_curves_over_seeds_are_means_with_the_seeds_range_where_all_have_values():
    series = over_seeds([[(0, 1.0), (1, 2.0), (2, 9.0)], [(0, 3.0), (1, 6.0)], [(0, 2.0), (1, math.nan)]])
    assert (series.x, series.y, series.band) == ([0], [2.0], ([1.0], [3.0]))
    assert over_seeds([[(0, 1.0), (5, 2.0)]]).band is None


def test_front_holds_the_points_that_no_other_beats():
    points = {"low": (0.1, 0.9), "beaten": (0.1, 0.8), "high": (0.9, 0.2), "middle": (0.5, 0.5), "inside": (0.4, 0.4)}
    assert pareto_front(points) == ["low", "middle", "high"]
    assert sorted(pareto_front({"a": (1, 1), "twin": (1, 1)})) == ["a", "twin"]


def test_charts_hold_the_frontier_and_a_line_for_each_arm(comparison: RunsComparison):
    charts, undrawn = runs_charts(comparison)
    by_key = {chart.key: chart for chart in charts}
    assert {"frontier-greedy_accuracy", "frontier-vote-10", "pass", "test", "reward", "distinct"} <= set(by_key)
    assert [style.label for style in by_key["reward"].legend] == list(comparison.arms)
    assert [style.label for style in by_key["frontier-vote-10"].legend] == list(comparison.arms)
    assert undrawn == ["Distinct-4 on test problems over iterations"]


def test_report_is_one_file_that_names_everything_and_escapes_what_it_is_given(folder: Path, tmp_path: Path,
                                                                               write_run_folder):
    write_run_folder(tmp_path / "runs" / "a", seed=1, problems=20, iterations=3)
    write_run_folder(tmp_path / "runs" / "b", seed=2, problems=20, iterations=3)
    (tmp_path / "runs" / "b" / "summary.json").unlink()
    write_run_folder(tmp_path / "runs" / "c", seed=3, problems=20, iterations=3)
    lines = write_runs_report(find_runs([str(tmp_path / "runs")]))
    page = (tmp_path / "runs" / "report.html").read_text()
    assert lines[-1] == f"report: {tmp_path}/runs/report.html"
    assert "<script>document.title" not in page
    assert "http" not in page.replace("http://www.w3.org", "").split("</script>")[1].split("<style>")[0]
    assert f"{tmp_path}/runs/b" in page
    assert "it has not come to its end" in page
    assert "2, 1 left out" in page


def test_csv_and_json_hold_the_table(folder: Path, tmp_path: Path, comparison: RunsComparison):
    out = tmp_path / "new" / "study.html"
    write_runs_report(find_runs([str(folder)]), out)
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    [row] = [row for row in rows if (row["arm"], row["metric"]) == (FLOOR, "entropy")]
    difference = comparison.difference(FLOOR, "entropy")
    assert float(row["mean"]) == comparison.table[FLOOR]["entropy"].interval.mean
    assert float(row["difference_low"]) == difference.over_seeds.interval.low
    assert (row["seeds"], row["common_seeds"], row["baseline"]) == ("3", "3", "GRPO")
    [single] = [row for row in rows if (row["arm"], row["metric"]) == ("ED-GRPO α=0.1", "entropy")]
    assert (single["seeds"], single["low"], single["high"]) == ("1", "", "")
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["table"][0]["by_seed"].keys() == {"1", "2", "3"}
    assert record["arms"]["ED-GRPO α=0.1"] == [1]
    assert record["matched"]["accuracies"].keys() == {"1", "2", "3"}


def test_a_report_that_is_no_html_file_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="ends in .html"):
        write_runs_report(find_runs([str(folder)]), tmp_path / "report.csv")
