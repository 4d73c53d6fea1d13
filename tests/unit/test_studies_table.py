"""docs/study_tables.md has the tables of the committed CSV files."""

from dataclasses import replace

import pytest
import studies_table
import study_charts
from studies_table import PAGE, by_seed, difference, mean, page, studies

from nemo_edo.experiments import gains
from nemo_edo.experiments import study as study_module
from nemo_edo.experiments.study import ArmEntry
from nemo_edo.experiments.study_table import COLUMNS


def row(arm: str, seed: int, vote: float, **values: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "task": "t", "arm": arm, "seed": str(seed), "iteration": "15",
            "temperature": "1", "vote": str(vote), **values}  # fmt: skip


def test_every_table_of_the_page_is_computed_from_the_files():
    assert page(studies()) == PAGE.read_text(encoding="utf-8"), "run: python tools/docs/studies_table.py"


def test_means_are_over_seeds_and_differences_are_paired_by_seed_at_the_last_evaluation():
    rows = [row("grpo", 1, 0.5), row("grpo", 2, 0.7), row("grpo", 3, 0.9), row("other", 1, 0.6), row("other", 2, 0.9),
            row("grpo", 1, 0.0, iteration="3"), row("other", 1, 0.0, temperature="0.6"),
            row("other", 3, 0.0, note="stopped")]
    found = by_seed(rows)
    assert (mean(found["grpo", ""], "vote"), mean(found["other", ""], "vote")) == ("0.700", "0.750")
    # +0.1 and +0.2: 0.15 with Student's t at one degree of freedom, 12.706 x 0.05
    assert difference(found, ("other", ""), "vote") == "+0.150 [-0.485, +0.785]"
    assert difference(found, ("grpo", ""), "vote") == difference(found, ("warmup", ""), "vote") == ""


def test_differences_of_shares_lie_between_minus_one_and_one():
    assert studies_table.in_words("vote", [0.9, -0.9]) == "+0.000 [-1.000, +1.000]"
    assert studies_table.in_words("entropy", [0.9, -0.9]) == "+0.000 [-11.436, +11.436]"


def test_the_best_temperature_s_gain_in_votes_is_paired_by_seed_and_the_baseline_s():
    [study] = [one for one in studies() if one.name == "doses"]
    rows = [row("grpo", seed, vote, task="sums", best_temperature=best, temperature=temperature)
            for seed, best, at_1, at_best in ((1, "0.4", 0.5, 0.6), (2, "0.7", 0.7, 0.9), (3, "0.40", 0.6, 0.9))
            for temperature, vote in (("1", at_1), ("best", at_best))]  # fmt: skip
    rows.append(row("ed_grpo", 1, 0.0, task="sums", dose="0.01", best_temperature="1"))
    # 0.1, 0.2, 0.3 with Student's t at two degrees of freedom: 4.303 x 0.1 / sqrt(3)
    expected = "| sums | 3 | 0.4 (2), 0.7 (1) | 0.600 | 0.800 | +0.200 [-0.048, +0.448] |"
    assert studies_table.temperature_table(rows, study).splitlines()[2:] == [expected]


def test_differences_over_tasks_are_each_seeds_mean_over_the_tasks_that_all_have_the_seed():
    [study] = [one for one in studies() if one.name == "doses"]
    votes = {("sums", 1): (0.5, 0.6), ("chain", 1): (0.1, 0.4), ("sums", 2): (0.5, 0.5), ("chain", 2): (0.3, 0.3),
             ("sums", 3): (0.0, 1.0)}  # fmt: skip
    rows = [row(arm, seed, vote, task=task, dose=dose, temperature="best")
            for (task, seed), both in votes.items()
            for (arm, dose), vote in zip((("grpo", ""), ("ed_grpo", "0.01")), both, strict=True)]  # fmt: skip
    [found] = studies_table.over_tasks(rows, study, {"vote": "best"})
    assert found.arm == ("ed_grpo", "0.01") and found.values == pytest.approx([0.2, 0.0])
    assert studies_table.over_tasks(rows, study) == []  # at temperature 1
    # Student's t at one degree of freedom: 12.706 x 0.1
    assert "| ed_grpo 0.01 | 2 | +0.100 [-1.000, +1.000] |" in studies_table.over_tasks_table(rows, study)
    assert study_charts.as_row(found)["difference"] == str(found.values[0] / 2)


def test_over_tasks_ed_idpo_is_compared_with_eto_and_the_heading_says_so():
    [study] = [one for one in studies() if one.name == "doses"]
    rows = [row(arm, seed, vote, task=task, dose=dose)
            for task in study.tasks for seed in (1, 2)
            for arm, dose, vote in (("grpo", "", 0.5), ("eto", "", 0.2), ("ed_idpo", "0.1", 0.3))]  # fmt: skip
    found = {one.arm: one.values for one in studies_table.over_tasks(rows, study, {"vote": "1"})}
    assert found == {("eto", ""): pytest.approx([-0.3] * 2), ("ed_idpo", "0.1"): pytest.approx([0.1] * 2)}
    rows = [{**one, **dict.fromkeys(studies_table.SHOWN, "0.5")} for one in rows]
    assert "minus GRPO (ED-iDPO: ETO)" in studies_table.over_tasks_table(rows, study)
    only_grpo = [one | ({"arm": "ed_grpo", "dose": "0.01"} if one["dose"] else {}) for one in rows]
    assert "minus GRPO |" in studies_table.over_tasks_table(only_grpo, study)


def test_the_state_counts_cells_and_hours(monkeypatch, tmp_path):
    [study] = [one for one in studies() if one.name == "doses"]
    monkeypatch.setattr(studies_table, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    text = studies_table.state(study, [row("grpo", 1, 0.5, task="sums", cpu_seconds="36")])
    each = len(study.cells) // len(study.tasks)
    assert f"| sums | 0 of {each} | 0.01 | 36 |" in text and "unknown before the first cell" in text


def test_the_complete_dose_with_the_best_votes_at_the_best_temperature_is_chosen():
    [study] = [one for one in studies() if one.name == "doses"]
    study = replace(study, seeds=[1, 2])
    rows = [row("entropy_bonus", seed, vote, task=task, dose=dose, temperature=temperature)
            for task in study.tasks for seed in (1, 2)
            for dose, temperature, vote in (("0.01", "1", 0.9), ("0.01", "best", 0.5), ("0.03", "1", 0.1),
                                            ("0.03", "best", 0.5 + 0.1 * seed))]  # fmt: skip
    rows.append(row("entropy_bonus", 1, 0.9, task="sums", dose="0.1", temperature="best"))
    assert studies_table.choice_table(rows, study).splitlines()[2:] == ["| entropy_bonus | 0.03 | 0.650 | 2 of 3 |"]
    assert studies_table.choice_table(rows[-1:], study) is None


def test_the_claims_on_tasks_together_have_each_seeds_mean_where_every_task_has_it():
    values = {"entropy": "0.3", "distinct_4_pooled": "0.1"}
    votes = {("a", 1): 0.2, ("b", 1): 0.6, ("a", 2): 0.5, ("b", 2): 0.6, ("a", 3): 0.9}
    rows = [row("ed_grpo", seed, vote, task=task, dose="0.01", **values) for (task, seed), vote in votes.items()]
    found = studies_table.meaned([*rows, row("ed_grpo", 2, 0.0, task="b", dose="0.01", iteration="3", **values)])
    assert [(one["task"], one["seed"], float(one["vote"])) for one in found] == [
        ("a, b", "1", pytest.approx(0.4)), ("a, b", "2", pytest.approx(0.55))]  # fmt: skip
    assert studies_table.meaned(rows[:1]) == []


def test_the_papers_claims_are_one_table_of_every_row_of_the_files(monkeypatch):
    [study] = [one for one in studies() if one.name == "doses"]
    other = replace(study, name="other_file", results="other.csv", arms={"grpo": ArmEntry()}, seeds=[3])
    rows = [row(arm, seed, vote, task="sums", dose=dose, entropy="0.3", distinct_4_pooled="0.1", cpu_seconds="1")
            for seed in (1, 2, 3) for arm, dose, vote in (("grpo", "", 0.5), ("ed_grpo", "0.01", 0.6))]  # fmt: skip
    tables = {study.table.name: rows, "other.csv": [{**one, "task": "legs"} for one in rows[:2]]}
    monkeypatch.setattr(studies_table, "read_rows", lambda path: tables[path.name])
    assert "| sums: arm, dose | seeds |" in page([study]) and "+0.100 [+0.100, +0.100] |" in page([study])
    claims = page([study, other, study]).split("## The paper's three claims")[1]
    assert "| sums | ED-GRPO | votes gain at moderate alpha | shown | 3 |" in claims
    assert "| legs | ED-GRPO | votes gain at moderate alpha | not shown | 1 |" in claims
    assert claims.count("| sums |") == claims.count("| legs |") == 3
    assert "## Other file" in page([study, other])


def test_a_held_out_study_is_judged_once_every_cell_is_done(monkeypatch):
    [study] = [one for one in studies() if one.name == "doses"]
    study = replace(study, held_out=True, seeds=[1, 2], baselines=["grpo"],
                    arms={"grpo": ArmEntry(), "ed_grpo": ArmEntry(dose="alpha", doses=[0.1])})  # fmt: skip
    rows = [row(arm, seed, vote + seed / 100, task=task, dose=dose, temperature="best", cpu_seconds="1")
            for task in study.tasks for seed in (1, 2)
            for arm, dose, vote in (("grpo", "", 0.5), ("ed_grpo", "0.1", 0.6))]  # fmt: skip
    for module in (studies_table, study_module):
        monkeypatch.setattr(module, "read_rows", lambda path: rows)
    assert studies_table.tables(study)[-2:] == [
        "The claim is won by ed_grpo (at least 2 of 2 tasks): ed_grpo wins 2 of 2 (sums, chain).",
        gains.markdown(gains.gains(rows, ["grpo"])),
    ]
    del rows[-1]
    assert studies_table.tables(study)[-1] == "The candidates are judged when every cell is done."
