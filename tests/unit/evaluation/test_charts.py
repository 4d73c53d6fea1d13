import json
import math
import re

import pytest

from nemo_edo.evaluation.charts import all_charts
from nemo_edo.evaluation.drawing import DASHES, Series, arm_styles, line_chart
from nemo_edo.evaluation.run_record import compare_run, read_run

STYLES = arm_styles({"warmup": "Start", "a": "Arm A", "b": "<b>&</b>"})


def traces(chart):
    """The traces that plotly wrote into the fragment."""
    start = chart.html.index("[{", chart.html.index("Plotly.newPlot"))
    return json.JSONDecoder().raw_decode(chart.html[start:])[0]


def draw(**series):
    return line_chart("key", "Title", "Caption", series, STYLES, x_title="x", y_title="y")


def test_missing_and_non_finite_values_are_gaps_and_never_zero():
    (trace,) = traces(draw(a=Series([1, 2, 3, 4], [0.5, math.nan, math.inf, 0.7])))
    assert trace["y"] == [0.5, None, None, 0.7]


def test_a_chart_without_any_value_is_not_drawn():
    assert draw(a=Series([], []), b=Series([1.0], [math.nan])) is None


def test_an_arm_without_values_is_left_out_of_the_legend():
    assert [style.label for style in draw(a=Series([1], [1]), b=Series([], [])).legend] == ["Arm A"]


def test_labels_are_escaped_for_plotlys_own_markup():
    (trace,) = traces(draw(b=Series([1], [1])))
    assert trace["name"] == "&lt;b&gt;&amp;&lt;/b&gt;"


def test_no_two_of_thirty_arms_share_colour_and_dash():
    styles = arm_styles({f"arm-{index}": "x" for index in range(30)})
    assert len({(style.color, style.dash) for style in styles.values()}) == 30
    assert {style.dash for style in styles.values()} == set(DASHES)


def test_an_arm_has_one_style_whether_or_not_the_start_was_evaluated():
    assert arm_styles({"a": "A"})["a"] == arm_styles({"warmup": "Start", "a": "A"})["a"]


@pytest.fixture
def charts(tmp_path, write_run_folder):
    def build(**options):
        record = read_run(write_run_folder(tmp_path / "run", iterations=4, problems=20, **options))
        return all_charts(record, compare_run(record))
    return build


def test_a_full_run_draws_every_chart_once(charts):
    drawn, undrawn = charts()
    assert [chart.key for chart in drawn] == ["matched", "entropy", "accuracy", "pass", "distinct-bars", "reward",
                                              "distinct", "kl", "well-formed", "interim", "exploration", "floor",
                                              "warm-up"]
    assert undrawn == []


def test_what_a_run_did_not_record_is_named_instead_of_drawn(charts):
    drawn, undrawn = charts(interim=False, start=False)
    assert undrawn == ["Test accuracy during training", "Warm-up loss"]
    assert "interim" not in {chart.key for chart in drawn}


def test_bars_carry_the_interval_of_the_table(tmp_path, write_run_folder):
    record = read_run(write_run_folder(tmp_path / "run", arms=("grpo",), iterations=2, problems=20, start=False))
    comparison = compare_run(record)
    cell = comparison.table["grpo"]["vote@10"]
    (bars,) = traces(next(chart for chart in all_charts(record, comparison)[0] if chart.key == "accuracy"))
    assert bars["y"][1] == cell.mean
    assert bars["y"][1] + bars["error_y"]["array"][1] == pytest.approx(cell.high)
    assert bars["y"][1] - bars["error_y"]["arrayminus"][1] == pytest.approx(cell.low)


def test_the_pass_curve_has_its_band_around_the_mean(charts):
    chart = next(chart for chart in charts(arms=("grpo",), start=False)[0] if chart.key == "pass")
    low, high, mean = (trace["y"] for trace in traces(chart))
    assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
    assert traces(chart)[2]["x"] == list(range(1, 11))


def test_the_matched_chart_marks_the_interpolated_values(charts):
    chart = next(chart for chart in charts()[0] if chart.key == "matched")
    level = float(re.search(r"matched accuracy (\d\.\d+)", chart.caption)[1])
    marks = [trace for trace in traces(chart) if trace["mode"] == "markers"]
    assert len(marks) == 4
    assert all(mark["x"][0] == pytest.approx(level, abs=5e-4) for mark in marks)


def test_distinct_4_bars_carry_the_interval_of_the_table(tmp_path, write_run_folder):
    record = read_run(write_run_folder(tmp_path / "run", iterations=2, problems=20))
    comparison = compare_run(record)
    bars = traces(next(chart for chart in all_charts(record, comparison)[0] if chart.key == "distinct-bars"))
    assert [bar["y"][0] for bar in bars] == [comparison.table[arm]["distinct_4"].mean for arm in comparison.table]
    assert bars[0]["error_y"]["array"][0] == pytest.approx(
        comparison.table["warmup"]["distinct_4"].high - comparison.table["warmup"]["distinct_4"].mean)


# --- alpha ------------------------------------------------------------------------------------------------------------


def test_arms_that_differ_in_alpha_alone_make_a_curve_in_the_order_of_alpha(tmp_path, write_run_folder):
    alphas = {"high": 0.1, "low": 1e-4, "plain": 0.0}
    record = read_run(write_run_folder(tmp_path / "run", arms=(), iterations=2, problems=20, alphas=alphas))
    comparison = compare_run(record)
    drawn = {chart.key: chart for chart in all_charts(record, comparison)[0]}
    low, high, line = traces(drawn["alpha-vote-10"])
    assert line["y"] == [comparison.table[arm]["vote@10"].mean for arm in ("plain", "low", "high")]
    assert (line["x"], line["name"]) == ([0, 1, 2], "ED-GRPO")
    assert '"ticktext":["0","0.0001","0.1"]' in drawn["alpha-vote-10"].html
    assert "alpha-distinct_4" in drawn


def test_two_alphas_or_arms_that_differ_in_more_make_no_curve(charts):
    drawn, _ = charts(arms=("edo_paper", "edo_floor", "entropy_bonus"), alphas={"a": 0.1, "b": 0.01})
    assert not [chart.key for chart in drawn if chart.key.startswith("alpha")]
