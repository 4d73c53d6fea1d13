"""Curves of more compute at test time, and their place in the reports."""

import json

import numpy as np
import pytest

from nemo_edo.evaluation.charts import all_charts
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.drawing import arm_styles
from nemo_edo.evaluation.run_record import compare_run, read_run
from nemo_edo.evaluation.run_set import find_runs, read_runs
from nemo_edo.evaluation.runs_charts import runs_charts
from nemo_edo.evaluation.runs_comparison import compare_runs
from nemo_edo.evaluation.scaling_charts import MOST_POINTS, numbers_of_responses, scaling_charts, thinned
from nemo_edo.metrics import bootstrap_ratio, bootstrap_ratios

STYLES = arm_styles({"a": "A", "b": "B"})


def evaluation(arm: str, largest: int, *, names=("mine",), problems: int = 12) -> Evaluation:
    rng, ones = np.random.default_rng(len(arm)), np.ones(problems)
    metrics = {}
    for k in range(1, largest + 1):
        metrics[f"majority@{k}"] = (rng.random(problems), ones)
        metrics[f"pass@{k}"] = (rng.random(problems), ones)
        metrics[f"tokens@{k}"] = (np.full(problems, 7.0 * k), ones)
        for name in (*names, "oracle"):
            metrics[f"best_of@{k}/{name}"] = (rng.random(problems), ones)
    return Evaluation(arm, tuple(map(str, range(problems))), metrics)


def traces(chart):
    start = chart.html.index("[{", chart.html.index("Plotly.newPlot"))
    return json.JSONDecoder().raw_decode(chart.html[start:])[0]


def test_each_family_is_drawn_against_samples_and_tokens_and_the_oracle_is_pass_at_k():
    charts = scaling_charts({"a": evaluation("a", 4)}, STYLES, resamples=50, seed=0)
    assert [chart.key for chart in charts] == ["samples-majority-", "tokens-majority-", "samples-pass-", "tokens-pass-",
                                               "samples-best_of--mine", "tokens-best_of--mine"]


def test_a_curve_has_the_means_with_the_bootstrap_of_each_k_and_tokens_on_x():
    found = evaluation("a", 4)
    samples, tokens = scaling_charts({"a": found}, STYLES, resamples=80, seed=5)[:2]
    low, high, line = traces(samples)
    expected = [bootstrap_ratio(*found.metrics[f"majority@{k}"], resamples=80, seed=5) for k in (1, 2, 3, 4)]
    assert (line["x"], traces(tokens)[2]["x"]) == ([1, 2, 3, 4], [7, 14, 21, 28])
    assert line["y"] == traces(tokens)[2]["y"] == pytest.approx([cell.mean for cell in expected])
    assert (low["y"], high["y"]) == ([cell.low for cell in expected], [cell.high for cell in expected])


def test_arms_with_other_scores_each_have_their_own_curve_and_nothing_stored_draws_nothing():
    charts = scaling_charts({"a": evaluation("a", 3, names=("x",)), "b": evaluation("bb", 5, names=("y",))}, STYLES,
                            resamples=20, seed=0)
    legends = {chart.key: [style.label for style in chart.legend] for chart in charts}
    assert legends["samples-majority-"] == ["A", "B"]
    assert (legends["samples-best_of--x"], legends["samples-best_of--y"]) == (["A"], ["B"])
    assert scaling_charts({}, STYLES, resamples=20, seed=0) == []


def test_long_curves_are_thinned_to_their_ends_and_points_between():
    ks = list(range(1, 257))
    kept = thinned(ks)
    assert (kept[0], kept[-1]) == (1, 256)
    assert 12 <= len(kept) <= MOST_POINTS and set(kept) <= set(ks)
    assert max(b / a for a, b in zip(kept, kept[1:], strict=False)) <= 2
    assert thinned([1, 2, 5]) == [1, 2, 5]


def test_a_score_whose_name_looks_like_another_family_is_its_own():
    found = evaluation("a", 2, names=("x", "x/y"))
    assert numbers_of_responses(found, "best_of@/x") == numbers_of_responses(found, "best_of@/x/y") == [1, 2]
    assert numbers_of_responses(found, "best_of@") == []


def test_ratios_of_one_bootstrap_are_those_of_each_alone():
    rng = np.random.default_rng(3)
    pairs = [(rng.random(9), np.ones(9)), (rng.integers(0, 5, 9), np.full(9, 5))]
    assert bootstrap_ratios(pairs, resamples=60, seed=2) == [bootstrap_ratio(*p, resamples=60, seed=2) for p in pairs]
    assert bootstrap_ratios([], resamples=60, seed=2) == []
    with pytest.raises(ValueError, match=r"of \[2, 9\] problems, expected the same problems in all"):
        bootstrap_ratios([pairs[0], ([1, 0], [1, 1])], resamples=60, seed=2)


# --- in the reports ---------------------------------------------------------------------------------------------------


def store(folder, arm: str, found: Evaluation) -> None:
    path = folder / "test_time" / f"{arm}.json"
    path.parent.mkdir(exist_ok=True)
    metrics = {name: {"sum": s.tolist(), "count": c.tolist()} for name, (s, c) in found.metrics.items()}
    path.write_text(json.dumps({"arm": arm, "problems": found.problems, "metrics": metrics}))


def test_a_runs_report_has_them_where_its_arms_are_stored(tmp_path, write_run_folder):
    folder = write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), iterations=2, problems=12)
    store(folder, "grpo", evaluation("grpo", 6))
    record = read_run(folder)
    charts, undrawn = all_charts(record, compare_run(record))
    found = {chart.key: chart for chart in charts}
    assert [style.label for style in found["tokens-best_of--mine"].legend] == ["GRPO"]
    assert undrawn == []


def test_a_report_of_several_runs_has_means_over_seeds(tmp_path, write_run_folder):
    values = []
    for seed, largest in ((1, 4), (2, 6)):
        folder = write_run_folder(tmp_path / f"seed_{seed}", arms=("grpo",), iterations=2, problems=12, seed=seed)
        found = evaluation("g" * seed, largest)
        store(folder, "grpo", found)
        values.append([found.metrics[f"majority@{k}"][0].mean() for k in (1, 2, 3, 4)])
    comparison = compare_runs(read_runs(find_runs([str(tmp_path)])))
    charts = {chart.key: chart for chart in runs_charts(comparison)[0]}
    low, high, line = traces(charts["samples-majority-"])
    assert line["x"] == [1, 2, 3, 4]  # what both seeds have
    assert line["y"] == pytest.approx(np.mean(values, axis=0))
    assert (low["y"], high["y"]) == (pytest.approx(np.min(values, axis=0)), pytest.approx(np.max(values, axis=0)))
    assert traces(charts["tokens-majority-"])[2]["x"] == [7, 14, 21, 28]
    assert "distinct-bars" in charts
