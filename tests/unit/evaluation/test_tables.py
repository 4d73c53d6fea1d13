"""Tables: measured numbers stand beside the paper's where the run is the paper's, and nowhere else."""

from __future__ import annotations

import csv
import functools
import io
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_edo.cli import main
from nemo_edo.configuration import compose_incomplete
from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import START
from nemo_edo.evaluation.measured import mean_of_ratios
from nemo_edo.evaluation.paper_settings import departures
from nemo_edo.evaluation.paper_tables import (
    DISTINCT,
    GREEDY,
    OUT_OF_DISTRIBUTION,
    OVERALL,
    VOTE,
    evaluated_on,
    paper_values,
)
from nemo_edo.evaluation.run_record import read_run
from nemo_edo.evaluation.run_set import FoundRuns
from nemo_edo.evaluation.tables import NOT_MEASURED, NOT_RUN, build_table
from nemo_edo.evaluation.tables_report import csv_text, html, markdown, write_table
from nemo_edo.metrics import bootstrap_ratio, mean_interval

HELPER = runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "experiment_run.py"))
GSM8K = "Llama-3-8B-Instruct, trained on GSM8K, evaluated on GSM8K"
HALF = {"greedy_accuracy": [1, 0, 1, 0], "vote@10": [1, 1, 1, 0], "distinct_4": [0.25, 0.5, 0.25, 0.5]}
TENTHS = {"greedy_accuracy": [1] * 3 + [0] * 7, "vote@10": [1] * 6 + [0] * 4}


@functools.cache
def config(name: str):
    return compose_incomplete(f"experiment/{name}", [])[0]


@pytest.fixture
def run(tmp_path: Path):
    """Writes a run of an experiment and reads it back; ``changed`` sets whole sections of its config."""
    def write(name: str, shares: dict, seed: int = 42, lines: tuple = (), folder: str | None = None, **changed):
        cfg = replace(config(name), seed=seed, **changed)
        path = tmp_path / (folder or f"{name.replace('/', '_')}_{seed}")
        return read_run(HELPER["write_experiment_run"](path, cfg, shares, lines))
    return write


def lines_of(table, title: str) -> dict:
    [section] = [section for section in table.sections if section.title == title]
    return {line.label: dict(zip(table.columns, line.cells, strict=True)) for line in section.lines}


# --- beside the paper's numbers ---------------------------------------------------------------------------------------


def test_a_runs_numbers_stand_beside_the_papers_with_the_bootstrap_over_problems(run):
    table = build_table("main", [run("main/gsm8k_llama3_grpo", {"ed_grpo": HALF, START: TENTHS})])
    lines = lines_of(table, GSM8K)
    cell, measured = lines["ed-grpo"][VOTE], lines["ed-grpo"][VOTE].measured
    expected = bootstrap_ratio([1, 1, 1, 0], [1] * 4, resamples=2000, seed=42)
    assert [value.value for value in cell.paper] == [90.4]
    assert (measured.mean, measured.low, measured.high) == pytest.approx(
        (75.0, 100 * expected.low, 100 * expected.high))
    assert (measured.deviation, measured.seeds) == (None, (42,))
    assert lines["cot"][GREEDY].measured.mean == pytest.approx(30.0)
    assert lines["eto"][GREEDY].state == NOT_RUN and lines["eto"][GREEDY].measured is None


def test_rows_without_a_run_are_not_run_in_every_table():
    for name in ("main", "ood", "seeds", "alpha", "test_time", "iterations"):
        cells = [cell for section in build_table(name, []).sections for line in section.lines for cell in line.cells]
        assert {cell.state for cell in cells if name == "iterations" or cell.paper} == {NOT_RUN}
        assert not any(cell.measured for cell in cells)


def test_both_of_two_values_for_one_cell_are_shown_with_their_tables():
    table = build_table("main", [])
    cell = lines_of(table, GSM8K)["ed-grpo"][VOTE]
    assert {(v.table, v.value) for v in cell.elsewhere} == {("test_time", 90.2), ("seeds", 90.5)}
    assert "90.4 (seeds: 90.5 ± 0.1, test_time: 90.2)" in markdown(table)
    assert lines_of(table, GSM8K)["ed-grpo"][GREEDY].elsewhere == ()


def test_several_seeds_have_mean_deviation_and_t_interval(run):
    shares = {42: [1, 1, 1, 0], 84: [1, 1, 0, 0], 126: [1, 1, 1, 1]}
    records = [run("seeds/gsm8k_llama3_grpo", {"grpo": {**HALF, "vote@10": share}}, seed)
               for seed, share in shares.items()]
    measured = lines_of(build_table("seeds", records), GSM8K)["grpo"][VOTE].measured
    expected = mean_interval([75.0, 50.0, 100.0])
    assert (measured.mean, measured.low, measured.high) == pytest.approx((75.0, expected.low, expected.high))
    assert (measured.deviation, measured.seeds) == (pytest.approx(25.0), (42, 84, 126))
    assert f"75.0 ± 25.0 [{expected.low:.1f}, {expected.high:.1f}], 3 seeds" in markdown(build_table("seeds", records))


def test_a_seed_that_is_there_twice_is_an_error_but_the_start_that_runs_share_is_not(run):
    first = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, folder="a")
    second = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, folder="b")
    with pytest.raises(UserError, match="both measured .* with seed 42: a seed counts once"):
        build_table("main", [first, second])
    other = run("main/gsm8k_llama3_grpo", {"dapo": HALF}, folder="c", arms={"dapo": first.config["arms"]["dapo"]})
    only = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, folder="d", arms={"grpo": {"alpha": 0.0}})
    lines = lines_of(build_table("main", [only, other]), GSM8K)
    assert lines["grpo"][VOTE].measured and lines["dapo"][VOTE].measured and lines["cot"][VOTE].measured


def test_distinct_4_is_a_number_and_accuracies_are_percent(run):
    table = build_table("seeds", [run("seeds/gsm8k_llama3_grpo", {"ed_grpo": HALF})])
    cells = lines_of(table, GSM8K)["ed-grpo"]
    assert (cells[DISTINCT].measured.mean, cells[VOTE].measured.mean) == pytest.approx((0.375, 75.0))
    assert "0.5055 ± 0.0108" in markdown(table)


def test_the_papers_best_of_n_of_seeds_and_alphas_stands_beside_the_vote_and_says_so():
    for name in ("seeds", "alpha"):
        table = build_table(name, [])
        assert [column.title for column in table.columns] == ["vote@10", "Distinct-4"]
        assert 'calls the accuracy of this table "BoN@10"' in markdown(table)


def test_best_of_n_by_other_reward_models_has_columns_of_its_own_without_a_paper_number(run):
    record = run("main/gsm8k_llama3_grpo", {"ed_grpo": HALF})
    HELPER["write_evaluation"](record.folder / "test_time" / "ed_grpo.json", "ed_grpo", {
        "best_of@10/qwen": [1, 1, 1, 1], "best_of@10/mine": [1, 1, 0, 0], "majority@10": [0, 0, 0, 0]})
    table = build_table("test_time", [record])
    cells = {column.title: cell for column, cell in lines_of(table, GSM8K)["ed-grpo"].items()}
    assert (cells["best-of-10 by qwen"].measured.mean, [v.value for v in cells["best-of-10 by qwen"].paper]) == (
        100.0, [94.8])
    assert (cells["best-of-10 by mine"].measured.mean, cells["best-of-10 by mine"].paper) == (50.0, ())
    assert cells["best-of-10 by skywork"].state == NOT_MEASURED
    assert cells["vote@10"].measured.mean == 75.0  # the evaluation's own, before the estimate from subsets


def test_what_the_paper_does_not_put_together_is_empty():
    cells = {column.title: cell for column, cell in lines_of(build_table("test_time", []), GSM8K)["searchllm"].items()}
    assert (cells["SearchLLM"].state, cells["vote@10"].state) == (NOT_RUN, "")


def test_search_is_measured_on_the_start(run):
    record = run("main/gsm8k_llama3_grpo", {START: HALF})
    HELPER["write_evaluation"](record.folder / "test_time" / f"{START}.json", START, {"search_accuracy": [1, 1, 1, 0]})
    cells = {c.title: cell for c, cell in lines_of(build_table("test_time", [record]), GSM8K)["searchllm"].items()}
    assert cells["SearchLLM"].measured.mean == 75.0


# --- out of distribution ----------------------------------------------------------------------------------------------


def elsewhere(run, benchmarks: dict[str, list[float]]) -> list:
    data = config("ood/s1k_qwen_eto").data
    return [run("ood/s1k_qwen_eto", {START: {"greedy_accuracy": share, "vote@10": share}}, folder=name,
                data=replace(data, test_benchmark=name)) for name, share in benchmarks.items()]


def test_overall_is_the_plain_mean_of_all_five_benchmarks_and_of_no_fewer(run):
    records = elsewhere(run, {"aime24": [1, 0], "aime25": [1, 0, 0, 0], "math500": [1, 1, 1, 0], "minerva": [1, 1],
                              "olympiadbench": [0]})
    title = f"Qwen2.5-7B-Instruct-SFT, trained on s1K, evaluated on {OVERALL}"
    overall = lines_of(build_table("ood", records), title)["eto"][GREEDY].measured
    assert overall.mean == pytest.approx(100 * (0.5 + 0.25 + 0.75 + 1.0 + 0.0) / 5)
    assert overall.low < overall.mean < overall.high
    four = lines_of(build_table("ood", records[1:]), title)["eto"][GREEDY]
    assert (four.measured, four.state) == (None, "4 of 5 benchmarks")


def test_the_interval_of_a_mean_over_benchmarks_is_that_of_independent_ones():
    rng = np.random.default_rng(0)
    ratios = [((rng.random(400) < p).astype(float), np.ones(400)) for p in (0.3, 0.5, 0.8)]
    found = mean_of_ratios(ratios, 4000, 1)
    deviation = np.sqrt(sum(x.mean() * (1 - x.mean()) / 400 for x, _ in ratios)) / 3
    assert found.mean == pytest.approx(np.mean([x.mean() for x, _ in ratios]))
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * deviation, rel=0.06)


def test_math500_is_math_for_a_policy_trained_on_math_and_itself_for_one_trained_on_s1k():
    assert (evaluated_on("math500", "MATH"), evaluated_on("math500", "s1K")) == ("MATH", "MATH500")
    assert [evaluated_on(name, "s1K") for name in ("aime24", "olympiadbench")] == [
        OUT_OF_DISTRIBUTION[0], OUT_OF_DISTRIBUTION[-1]]
    assert evaluated_on(None, "s1K") is None


# --- iterations -------------------------------------------------------------------------------------------------------


def test_accuracy_over_iterations_is_the_logged_vote_and_the_last_of_two_counts(run):
    lines = [{"kind": "evaluation", "arm": "grpo", "iteration": t, "final": t == 3, "metrics": {
        "vote@10": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}} for t, mean in
        ((0, 0.1), (1, 0.2), (1, 0.25), (3, 0.5))]
    table = build_table("iterations", [run("main/gsm8k_llama3_grpo", {"grpo": HALF}, lines=tuple(lines))])
    cells = [cell for cell in lines_of(table, GSM8K)["grpo"].values()]
    assert [column.title for column in table.columns] == [f"vote@10 after {t}" for t in range(4)]
    assert [cell.measured and round(cell.measured.mean, 6) for cell in cells] == [10.0, 25.0, None, 50.0]
    assert (cells[1].measured.low, cells[2].state) == (pytest.approx(15.0), NOT_MEASURED)
    assert "paper" not in markdown(table).splitlines()[4]


# --- runs that are not the paper's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "change", "told"), [
    ("lora", {"rank": 4}, "lora.rank is 4, the paper's 0"),
    ("sft", {"steps": 5}, "sft.steps is 5, the paper's 0"),
    ("sampling", {"samples_per_prompt": 4}, "sampling.samples_per_prompt is 4, the paper's 10"),
    ("data", {"test_benchmark": "aime24"}, "it is evaluated on aime24, the paper's on GSM8K"),
    ("data", {"test_benchmark": None, "benchmark": None}, "data.benchmark is null, the paper's gsm8k"),
    ("data", {"check_rows": False}, "data.check_rows is False, the paper's True"),
    ("data", {"answer_format": "boxed"}, "data.answer_format is boxed, the paper's so_the_answer_is"),
    ("model", {"architecture": None}, "model.architecture is null, so the run does not say which model it is of"),
    ("grpo", {"iterations": 1}, "iterations is 1, the paper's 3"),
    ("grpo", {"minibatch_size": 64}, "minibatch_size is 64, the paper's 512"),
    ("grpo", {"alpha": 0.5}, "alpha is 0.5, the paper's 0.001"),
    ("grpo", {"log_ratio_floor": -0.1}, "log_ratio_floor is -0.1, the paper's null"),
    ("grpo", {"entropy_coefficient": 0.1}, "entropy_coefficient is 0.1, the paper's 0"),
    ("grpo", {"novelty_strength": 0.5}, "novelty_strength is 0.5, the paper's 0"),
])
def test_a_run_with_another_setting_than_the_papers_stands_apart_with_the_reason(run, section, change, told):
    cfg = config("main/gsm8k_llama3_grpo")
    record = run("main/gsm8k_llama3_grpo", {"ed_grpo": HALF}, **{section: replace(getattr(cfg, section), **change)})
    assert told in departures(record, "ed_grpo")
    table = build_table("main", [record])
    assert lines_of(table, GSM8K)["ed-grpo"][VOTE].measured is None
    [other] = [section for section in table.sections if not section.comparable]
    assert any(told in reason for reason in other.reasons)
    [line] = [line for line in other.lines if line.label.startswith("ED-GRPO")]
    assert line.cells[1].measured.mean == 75.0 and line.cells[1].paper == ()


def test_another_model_of_the_same_family_stands_apart(run):
    model = config("main/gsm8k_llama3_grpo").model
    for key, value in (("num_hidden_layers", 16), ("rope_scaling", {"factor": 8.0})):
        changed = replace(model, architecture={**model.architecture, key: value})
        record = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, folder=key, model=changed)
        assert [reason for reason in departures(record, "grpo") if f"model.architecture.{key}" in reason]


def test_a_size_that_the_run_does_not_record_is_none_of_the_papers(run):
    model = config("main/gsm8k_llama3_grpo").model
    sizes = {key: value for key, value in model.architecture.items() if key != "intermediate_size"}
    record = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, model=replace(model, architecture=sizes))
    assert departures(record, "grpo") == ["model.architecture.intermediate_size is null, the paper's 14336"]


def test_what_the_paper_leaves_open_keeps_no_run_from_standing_beside_it(run):
    grpo = config("main/gsm8k_llama3_grpo").grpo
    record = run("main/gsm8k_llama3_grpo", {"grpo": HALF}, grpo=replace(grpo, beta=0.01, epochs=2, clip_high=0.3))
    assert departures(record, "ed_grpo") == departures(record, START) == []


def test_runs_without_an_experiment_have_a_table_of_measured_numbers_with_the_paper_column_left_out(run):
    records = [run("builtin/quickstart", {"grpo": {**HALF, "vote@10": share}}, seed)
               for seed, share in ((1, [1, 0, 0, 0]), (2, [1, 1, 1, 0]))]
    for name in ("main", "ood", "seeds", "alpha", "test_time"):
        table = build_table(name, records)
        [other] = [section for section in table.sections if not section.comparable]
        assert other.reasons == ("its experiment is none of the paper's",)
        assert other.title.startswith("builtin/quickstart: llama of 2 layers, random weights, the built-in task")
        [line] = [line for line in other.lines if line.label == "GRPO"]
        voted = line.cells[table.columns.index(VOTE)].measured
        assert (voted.mean, voted.seeds) == (50.0, (1, 2))
        assert not any(cell.paper for line in other.lines for cell in line.cells)


def test_a_run_for_another_table_is_named_and_left_out(run):
    table = build_table("alpha", [record := run("main/gsm8k_llama3_grpo", {"grpo": HALF})])
    assert table.left_out == {record.folder: "main/gsm8k_llama3_grpo is for the tables main, test_time, iterations"}
    assert "Left out" in markdown(table)


# --- as text ----------------------------------------------------------------------------------------------------------


def test_every_measured_and_paper_column_of_every_table_names_its_aggregator():
    for name in ("main", "ood", "seeds", "alpha", "test_time", "iterations"):
        head = next(line for line in markdown(build_table(name, [])).splitlines() if line.startswith("| method"))
        assert all(any(word in part for word in ("greedy", "vote@10", "best-of-10 by", "SearchLLM", "Distinct-4"))
                   for part in head.split("|")[2:-1])


def test_csv_has_every_cell_of_the_paper_once():
    rows = list(csv.DictReader(io.StringIO(csv_text(build_table("main", [])))))
    expected = [value for value in paper_values() if value.table == "main"]
    assert sorted(float(row["paper"]) for row in rows) == sorted(value.value for value in expected)
    assert {row["state"] for row in rows} == {NOT_RUN}


def test_html_fetches_nothing_and_escapes_what_runs_say(run):
    record = run("builtin/quickstart", {"grpo": HALF})
    attack = "<script>window.attacked = true</script>"
    record.config["model"]["path"] = f"/models/{attack}"
    page = html(build_table("main", [record]))
    assert attack not in page and "window.attacked" in page
    assert "<script" not in page and "src=" not in page and "http" not in page.replace("http-equiv", "")
    assert attack not in markdown(build_table("main", [record]))


@pytest.mark.parametrize("suffix", [".html", ".md", ".csv"])
def test_a_table_is_written_as_its_files_name_says(tmp_path: Path, suffix: str):
    out = tmp_path / "deep" / f"table{suffix}"
    assert write_table(FoundRuns(None, (), {}, tmp_path), "main", out) == [f"table: {out}"]
    assert "90.4" in out.read_text()


@pytest.mark.parametrize(("arguments", "told"), [
    (["--table", "maim"], "--table is 'maim', expected one of main, ood, seeds, alpha, test_time, iterations"),
    (["--table", "main", "--baseline", "GRPO"], "--baseline is for a report"),
    (["--table", "main", "-o", "table.pdf"], "table.pdf: a table's file ends in .html, .md, .csv"),
])
def test_mistakes_of_the_command_are_told(run, capsys, arguments: list[str], told: str):
    record = run("builtin/quickstart", {"grpo": HALF})
    assert main(["report", str(record.folder), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_the_command_prints_the_table(run, capsys):
    record = run("builtin/quickstart", {"grpo": HALF})
    assert main(["report", str(record.folder), "--table", "main"]) == 0
    shown = capsys.readouterr().out
    assert "# Main results, in distribution" in shown and "| GRPO | 50.0 [" in shown
