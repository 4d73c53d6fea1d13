"""The paper's tables: a run's numbers are joined to the paper's where its settings are the paper's, and only there."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers.experiment_run import write_evaluation, write_experiment_run

from nemo_edo.config.compose import compose_incomplete
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, seeds_interval
from nemo_edo.metrics import share_interval
from nemo_edo.report.run_folders import FoundRuns
from nemo_edo.report.run_set import read_run
from tools.paper_tables.published import OUT_OF_DISTRIBUTION, OVERALL, ROW, TABLES, published
from tools.paper_tables.settings import departures
from tools.paper_tables.tables import (
    NOT_MEASURED,
    NOT_RUN,
    build_table,
    html,
    main,
    markdown,
    mean_of_shares,
    write_table,
)

MAIN = "main/gsm8k_llama3_grpo"
GSM8K = ("Llama-3-8B-Instruct", "GSM8K", "GSM8K")
HALF = {"greedy_accuracy": [1, 0, 1, 0], "vote@10": [1, 1, 1, 0], "distinct_4_pooled": [0.25, 0.5, 0.25, 0.5]}
TENTHS = {"greedy_accuracy": [1] * 3 + [0] * 7, "vote@10": [1] * 6 + [0] * 4}


@functools.cache
def config(name: str):
    return compose_incomplete(f"experiment/{name}", [])[0]


@pytest.fixture
def run(tmp_path: Path):
    """Writes a run of an experiment and reads it back; ``changed`` sets whole sections of its config."""
    def write(name: str, shares: dict, seed: int = 42, folder: str | None = None, **changed):
        path = tmp_path / (folder or f"{name.replace('/', '_')}_{seed}")
        return read_run(write_experiment_run(path, replace(config(name), seed=seed, **changed), shares))
    return write


def cells_of(table, method: str, place: tuple = GSM8K) -> dict:
    """The lines of a row by their columns' titles."""
    rows = table.lines[(table.lines[ROW] == [*place, method]).all(axis=1)]
    return {line.column: line for line in rows.itertuples()}


def test_a_runs_number_has_the_papers_and_the_bootstrap_interval_over_problems(run):
    table = build_table("main", [run(MAIN, {"ed_grpo": HALF, START: TENTHS})])
    cell = cells_of(table, "ed-grpo")["vote@10"]
    expected = share_interval([1, 1, 1, 0], [1] * 4, resamples=2000, seed=42)
    assert (cell.mean, cell.low, cell.high) == pytest.approx((75.0, 100 * expected.low, 100 * expected.high))
    assert (cell.paper, cell.seeds, cell.state) == (90.4, "42", "") and math.isnan(cell.deviation)
    assert cells_of(table, "cot")["greedy"].mean == pytest.approx(30.0)
    eto = cells_of(table, "eto")["greedy"]
    assert eto.state == NOT_RUN and math.isnan(eto.mean)


def test_every_number_of_the_paper_is_in_its_table_and_without_runs_none_is_measured():
    lines = pd.concat([build_table(name, []).lines for name in TABLES])
    assert lines["paper"].notna().sum() == 300
    assert lines["mean"].isna().all() and set(lines["state"]) == {NOT_RUN}
    for name in ("seeds", "alpha"):  # the paper's best-of-n there is the vote
        assert set(published(name)["column"]) == {"vote@10", "Distinct-4"}


def test_several_seeds_have_mean_deviation_and_t_interval(run):
    shares = {42: [1, 1, 1, 0], 84: [1, 1, 0, 0], 126: [1, 1, 1, 1]}
    records = [run("seeds/gsm8k_llama3_grpo", {"grpo": {**HALF, "vote@10": share}}, seed)
               for seed, share in shares.items()]
    table = build_table("seeds", records)
    found = seeds_interval("vote@10", [0.75, 0.5, 1.0], rounding=0.25**2 / 12)  # of four problems, and at most 1
    cells, expected = cells_of(table, "grpo"), SimpleNamespace(low=100 * found.low, high=100 * found.high)
    voted = cells["vote@10"]
    assert (voted.mean, voted.low, voted.high) == pytest.approx((75.0, expected.low, expected.high))
    assert (voted.deviation, voted.seeds) == (pytest.approx(25.0), "42 84 126")
    assert cells["Distinct-4"].mean == pytest.approx(0.375)  # a number, not percent
    assert f"75.0 ± 25.0 [{expected.low:.1f}, {expected.high:.1f}], 3 seeds" in markdown(table)


def test_a_seed_counts_once_but_runs_may_share_their_start(run):
    first, second = (run(MAIN, {"grpo": HALF}, folder=name) for name in "ab")
    with pytest.raises(UserError, match="with seed 42"):
        build_table("main", [first, second])
    other = run(MAIN, {"dapo": HALF}, folder="c", arms={"dapo": first.config["arms"]["dapo"]})
    only = run(MAIN, {"grpo": HALF}, folder="d", arms={"grpo": {"alpha": 0.0}})
    table = build_table("main", [only, other])
    assert all(cells_of(table, row)["vote@10"].seeds == "42" for row in ("grpo", "dapo", "cot"))


def test_at_test_time_reward_models_rank_the_stored_responses_and_the_search_is_the_starts(run):
    record = run(MAIN, {"ed_grpo": HALF, START: HALF})
    folder = record.folder / "test_time"
    write_evaluation(folder / "ed_grpo.json", "ed_grpo", {"best_of@10/qwen": [1, 1, 1, 1], "majority@10": [0, 0, 0, 0]})
    write_evaluation(folder / f"{START}.json", START, {"search_accuracy": [1, 1, 1, 0]})
    table = build_table("test_time", [read_run(record.folder)])
    cells = cells_of(table, "ed-grpo")
    assert (cells["best-of-10 by qwen"].mean, cells["best-of-10 by qwen"].paper) == (100.0, 94.8)
    assert cells["vote@10"].mean == 75.0  # the evaluation's own, before the estimate from subsets
    assert cells["best-of-10 by skywork"].state == NOT_MEASURED
    searched = cells_of(table, "searchllm")
    assert list(searched) == ["SearchLLM"] and searched["SearchLLM"].mean == 75.0


def test_overall_is_the_plain_mean_of_all_five_benchmarks_and_of_no_fewer_as_in_the_paper(run):
    name, data = "ood/s1k_qwen_eto", config("ood/s1k_qwen_eto").data
    shares = {"aime24": [1, 0], "aime25": [1, 0, 0, 0], "math500": [1, 1, 1, 0], "minerva": [1, 1],
              "olympiadbench": [0]}
    records = [run(name, {START: {"greedy_accuracy": share, "vote@10": share}}, folder=benchmark,
                   data=replace(data, test_benchmark=benchmark)) for benchmark, share in shares.items()]
    place = ("Qwen2.5-7B-Instruct-SFT", "s1K", OVERALL)
    overall = cells_of(build_table("ood", records), "eto", place)["greedy"]
    assert overall.mean == pytest.approx(100 * (0.5 + 0.25 + 0.75 + 1.0 + 0.0) / 5)
    assert overall.low < overall.mean < overall.high
    four = cells_of(build_table("ood", records[1:]), "eto", place)["greedy"]
    assert math.isnan(four.mean) and four.state == "4 of 5 benchmarks"
    of = published("ood").pivot_table("value", ["backbone", "method", "column"], "evaluated_on")
    off = sorted(abs(of[OVERALL] - of[list(OUT_OF_DISTRIBUTION)].mean(axis=1)))
    assert len(of) == 24 and off[-2] < 0.06 and off[-1] < 0.5  # rounding, and one cell that does not add up


@pytest.mark.parametrize(("section", "change", "told"), [
    ("lora", {"rank": 4}, "lora.rank is 4, the paper's 0"),
    ("data", {"test_benchmark": "aime24"}, "it is evaluated on aime24, the paper's on GSM8K"),
    ("model", {"architecture": None}, "model.architecture is null, so the run does not say which model it trained"),
    ("model", {"architecture": {**config(MAIN).model.architecture, "rope_scaling": {"factor": 8.0}}},
     "model.architecture.rope_scaling"),
    ("grpo", {"alpha": 0.5}, "alpha is 0.5, the paper's 0.001"),
    ("grpo", {"beta": 0.01, "epochs": 2, "clip_high": 0.3}, None)])  # the paper leaves them open
def test_a_run_with_another_setting_than_the_papers_is_not_in_the_table_which_says_why(run, section, change, told):
    record = run(MAIN, {"ed_grpo": HALF}, **{section: replace(getattr(config(MAIN), section), **change)})
    if told is None:
        assert departures(record, "ed_grpo") == departures(record, START) == []
        return
    assert any(reason.startswith(told) for reason in departures(record, "ed_grpo"))
    table = build_table("main", [record])
    assert math.isnan(cells_of(table, "ed-grpo")["vote@10"].mean)
    assert any("ED-GRPO" in line and told in line for line in table.left_out) and told in markdown(table)


def test_the_command_prints_the_table_or_writes_it_as_its_files_name_says(run, tmp_path: Path, capsys):
    command = ["main", str(run("builtin/quickstart", {"grpo": HALF}).folder)]
    assert main([*command, "-o", "table.pdf"]) == 2
    assert "table.pdf: a table's file ends in .html, .md, .csv" in capsys.readouterr().err
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "# Main results, in distribution" in shown and "Not in the table: " in shown
    for suffix in (".html", ".md", ".csv"):
        out = tmp_path / "deep" / f"table{suffix}"
        assert write_table(FoundRuns((), {}, tmp_path), "main", out) == [f"table: {out}"]
        assert "90.4" in out.read_text()


def test_pages_escape_what_runs_say_and_fetch_nothing(run):
    record = run(MAIN, {"grpo": HALF})
    attack = "<script>window.attacked = true</script>"
    record.config["model"]["path"] = f"/models/{attack}"
    table = build_table("main", [record])
    page = html(table)
    assert "window.attacked" in page and attack not in page + markdown(table)
    assert "<script" not in page and "src=" not in page and "http" not in page.replace("http-equiv", "")


def test_the_mean_over_benchmarks_weighs_them_equally():
    rng = np.random.default_rng(3)
    pairs = [(rng.random(30), np.ones(30)), (rng.random(500) / 2, np.ones(500))]
    found = mean_of_shares(pairs, resamples=500, seed=1)
    assert found.mean == pytest.approx(np.mean([sums.mean() for sums, _ in pairs]))
    widths = [one.high - one.low for one in (share_interval(*pair, resamples=500, seed=1) for pair in pairs)]
    assert widths[0] / 2 < found.high - found.low < sum(widths) / 2 * 1.05
