"""What charts draw: gaps for missing values, intervals and bands of the comparison, and nothing without values."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from helpers.one_run import evaluation
from helpers.run_folder import write_run_folder

from nemo_edo.evaluation.results import Evaluation
from nemo_edo.metrics import share_interval
from nemo_edo.report.charts import all_charts, pareto_front
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.plotting import arm_styles, line_chart
from nemo_edo.report.run_folders import find_runs
from nemo_edo.report.run_set import one_run, read_runs


def drawing(chart) -> tuple[list[dict], dict]:
    """The traces that plotly wrote into the fragment, and the layout that follows them."""
    text = chart.html[chart.html.index("[{", chart.html.index("Plotly.newPlot")):]
    found, end = json.JSONDecoder().raw_decode(text)
    return found, json.JSONDecoder().raw_decode(text[end:].lstrip(", \n"))[0]


def traces(chart) -> list[dict]:
    return drawing(chart)[0]


def labels(chart) -> list[str]:
    return [style.label for style in chart.legend]


def draw(**lines):
    """A chart of each arm's values by x."""
    frames = {arm: pd.DataFrame({"y": [*values.values()]}, [*values], dtype=float) for arm, values in lines.items()}
    styles = arm_styles({"warmup": "Start", "a": "Arm A", "b": "<b>&</b>"})
    return line_chart("key", "Title", "Caption", frames, styles, x_title="x", y_title="y")


def test_missing_and_non_finite_values_are_gaps_and_what_has_no_value_is_not_drawn():
    (trace,) = traces(draw(b={1: 0.5, 2: math.nan, 3: math.inf, 4: 0.7}))
    assert trace["y"] == [0.5, None, None, 0.7]
    assert trace["name"] == "&lt;b&gt;&amp;&lt;/b&gt;"  # plotly reads a label as markup
    assert draw(a={}, b={1: math.nan}) is None
    assert labels(draw(a={1: 1}, b={})) == ["Arm A"]


def test_front_has_the_points_that_no_other_beats():
    points = {"low": (0.1, 0.9), "beaten": (0.1, 0.8), "high": (0.9, 0.2), "middle": (0.5, 0.5), "inside": (0.4, 0.4)}
    assert pareto_front(points) == ["low", "middle", "high"]
    assert sorted(pareto_front({"a": (1, 1), "twin": (1, 1)})) == ["a", "twin"]


KEYS = ["differences", "test-greedy_accuracy", "matched", "frontier-vote-10", "reward", "entropy", "distinct",
        "kl", "well-formed", "exploration", "floor", "warm-up"]
METRICS = ["greedy_accuracy", "vote@10", "distinct_4"]


def by_key(comparison: Comparison) -> dict:
    found = all_charts(comparison, METRICS)
    charts = [chart for section in ("first", "diversity", "test_time", "diagnostics") for chart in found[section]]
    assert len({chart.key for chart in charts}) == len(charts)
    return {chart.key: chart for chart in charts}


def test_a_run_has_every_chart_once_and_what_it_did_not_record_is_named(tmp_path):
    whole, less = (compare(one_run(write_run_folder(tmp_path / name, iterations=4, problems=20, **options)))
                   for name, options in (("whole", {}), ("less", {"interim": False, "start": False})))
    assert (list(by_key(whole)), all_charts(whole, METRICS)["undrawn"]) == (KEYS, [])
    assert labels(by_key(whole)["frontier-vote-10"]) == [whole.labels[arm] for arm in whole.arms]
    assert set(KEYS) - set(by_key(less)) == {"test-greedy_accuracy", "warm-up"}
    assert all_charts(less, METRICS)["undrawn"] == ["Warm-up loss"]


def test_the_forest_has_each_difference_with_its_interval_and_the_noise_of_one_seed_behind(tmp_path):
    comparison = compare(one_run(write_run_folder(tmp_path / "run", iterations=4, problems=20, replicate=True)))
    chart = by_key(comparison)["differences"]
    drawn = traces(chart)
    assert len(drawn) == len(comparison.arms) - 1
    for trace, arm in zip(drawn, [arm for arm in comparison.arms if arm != "grpo"], strict=True):
        found = [comparison.difference(arm, metric) for metric in METRICS]
        assert trace["x"] == [one.interval.mean for one in found]
        assert trace["error_x"]["array"] == pytest.approx([one.interval.high - one.interval.mean for one in found])
        assert [round(y) for y in trace["y"]] == [0, 1, 2] and "one seed" in trace["text"][0]
    bands = {round(shape["y0"] + 0.45): shape["x1"] for shape in drawing(chart)[1]["shapes"] if shape["type"] == "rect"}
    assert bands == {place: comparison.noise[metric] for place, metric in enumerate(METRICS)}


def store_curves(folder, arm: str, largest: int, name: str = "mine") -> Evaluation:
    rng, metrics = np.random.default_rng(largest), {}
    for k in range(1, largest + 1):
        names = (f"majority@{k}", f"pass@{k}", f"best_of@{k}/{name}", f"best_of@{k}/oracle")
        metrics |= {metric: rng.random(12) for metric in names} | {f"tokens@{k}": [7.0 * k] * 12}
    found = evaluation(arm, 12, **metrics)
    (folder / "test_time").mkdir(exist_ok=True)
    (folder / "test_time" / f"{arm}.json").write_text(json.dumps(found.record()))
    return found


def test_each_family_has_the_means_with_the_interval_of_each_k_and_says_its_tokens(tmp_path):
    folder = write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), start=False, problems=12, seed=5)
    found = store_curves(folder, "grpo", 4)
    store_curves(folder, "edo_floor", 5, "other")
    charts = by_key(compare(one_run(folder)))
    low, high, line = traces(charts["samples-majority-"])[:3]
    expected = [share_interval(*found.metrics[f"majority@{k}"], resamples=200, seed=5) for k in (1, 2, 3, 4)]
    assert (line["x"], line["text"]) == ([1, 2, 3, 4], [f"{tokens} tokens" for tokens in (7, 14, 21, 28)])
    for trace, end in ((line, "mean"), (low, "low"), (high, "high")):
        assert trace["y"] == pytest.approx([getattr(cell, end) for cell in expected])
    assert [labels(charts[f"samples-{key}"]) for key in ("best_of--mine", "best_of--other")] == [
        ["GRPO"], ["ED-GRPO 0.3, floor -0.1"]]
    assert len(labels(charts["samples-pass-"])) == 2 and "samples-best_of--oracle" not in charts


def test_several_runs_have_the_charts_of_one_with_means_and_the_range_of_their_seeds(tmp_path):
    majority = []
    for seed, largest in ((1, 4), (2, 6)):
        folder = write_run_folder(tmp_path / f"seed_{seed}", arms=("grpo",), iterations=2, problems=12, seed=seed)
        found = store_curves(folder, "grpo", largest)
        majority.append([found.mean(f"majority@{k}") for k in (1, 2, 3, 4)])
    comparison = compare(read_runs(find_runs([str(tmp_path)])))
    drawn = by_key(comparison)
    assert {*KEYS, "samples-pass-"} - {"differences"} <= set(drawn)
    low, high, line = traces(drawn["samples-majority-"])[-3:]
    assert line["y"] == pytest.approx(np.mean(majority, axis=0))
    assert low["y"] == pytest.approx(np.min(majority, axis=0)) and high["y"] == pytest.approx(np.max(majority, axis=0))
    assert traces(drawn["samples-majority-"])[2]["x"] == [1, 2, 3, 4]  # what both seeds have
