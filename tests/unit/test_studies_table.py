"""docs/study_tables.md has the tables of the committed CSV files."""

from dataclasses import replace

import numpy as np
import primary_question
import pytest
import studies_table
import theory_charts
from studies_table import PAGE, by_seed, difference, mean, page, studies

from nemo_edo.experiments import study_table
from nemo_edo.experiments.study import ArmEntry
from nemo_edo.experiments.study_table import COLUMNS
from nemo_edo.experiments.verdict import gains, markdown


def row(arm: str, seed: int, vote: float, **values: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "task": "t", "arm": arm, "seed": str(seed), "iteration": "15",
            "temperature": "1", "vote": str(vote), "problems": "300", **values}


def test_every_table_of_the_page_is_computed_from_the_files():
    assert page(studies()) == PAGE.read_text(encoding="utf-8"), "run: python tools/docs/studies_table.py"


def test_means_are_over_seeds_and_differences_are_paired_by_seed_at_the_last_evaluation():
    votes = {"grpo": [0.5, 0.7, 0.9], "other": [0.6, 0.9]}
    rows = [row(arm, seed, vote) for arm, by_seed in votes.items() for seed, vote in enumerate(by_seed, start=1)]
    rows += [row("grpo", 1, 0.0, iteration="3"), row("other", 1, 0.0, temperature="0.6"),
             row("other", 3, 0.0, note="stopped")]
    found = by_seed(rows)
    assert (mean(found["grpo", ""], "vote"), mean(found["other", ""], "vote")) == ("0.700", "0.750")
    # +0.1 and +0.2: 0.15 with Student's t at one degree of freedom, 12.706 x 0.05
    assert difference(found, ("other", ""), "vote") == "+0.150 [-0.485, +0.785]"
    assert difference(found, ("grpo", ""), "vote") == difference(found, ("warmup", ""), "vote") == ""


def test_a_held_out_study_is_judged_once_every_cell_is_done(monkeypatch):
    [study] = [one for one in studies() if one.name == "doses"]
    study = replace(study, held_out=True, seeds=[1, 2], baselines=["grpo"],
                    arms={"grpo": ArmEntry(), "ed_grpo": ArmEntry(dose="alpha", doses=[0.1])})
    rows = [row(arm, seed, vote + seed / 100, task=task, dose=dose, temperature="best", cpu_seconds="1")
            for task in study.tasks for seed in (1, 2)
            for arm, dose, vote in (("grpo", "", 0.5), ("ed_grpo", "0.1", 0.6))]
    for module in (studies_table, study_table):
        monkeypatch.setattr(module, "read_rows", lambda path: rows)
    assert studies_table.tables(study)[-2:] == [
        "The claim is won by ed_grpo (at least 2 of 2 tasks): ed_grpo wins 2 of 2 (sums, chain).",
        markdown(gains(rows, ["grpo"])),
    ]
    del rows[-1]
    assert studies_table.tables(study)[-1] == "The candidates are judged when every cell is done."


def test_the_registered_study_shows_nothing_before_its_last_cell_and_then_compares_with_both_trainings(monkeypatch):
    [study] = [one for one in studies() if one.name == studies_table.REGISTERED]
    study = replace(study, seeds=[1, 2, 3], arms={arm: study.arms[arm] for arm in ("grpo", "replicate", "ed_grpo")})
    votes = {("grpo", ""): 0.5, ("replicate", ""): 0.6, ("ed_grpo", "0.01"): 0.6, ("ed_grpo", "0.03"): 0.6,
             ("ed_grpo", "0.06"): 0.6}
    rows = [row(arm, seed, vote + seed * len(task) / 100, task=task, dose=dose, cpu_seconds="1")
            for task in study.tasks for seed in (1, 2, 3) for (arm, dose), vote in votes.items()]
    for module in (studies_table, study_table, primary_question):
        monkeypatch.setattr(module, "read_rows", lambda path: rows)
    monkeypatch.setattr(primary_question, "pilot_spreads", lambda rows: dict.fromkeys(study.tasks, 0.02))
    *tables, _ = studies_table.tables(study)
    assert "Stopped: none." in tables[1] and "| grpo | 3 |  |  | 0.650 |" in tables[2] and "replicate" not in tables[2]
    assert "| ed_grpo 0.03 | 3 |  |  | 0.700 |" in tables[2]
    told = primary_question.answer(study)
    assert "change by +0.0500" in told and "No guard stopped" in told

    rows[4]["note"] = "stopped"  # of chain, seed 1, dose 0.06: 0 instead of 0.65
    assert "Stopped: chain ed_grpo 0.06." in studies_table.tables(study)[1]
    told = primary_question.answer(study)
    assert f"change by {0.05 - 0.65 / 3 / 3 / 4:+.4f}" in told and "stopped 1 of ed_grpo 0.06; without" in told

    # The small study: form at 1 (0.6, one dose of the first block 0) minus GRPO at its best temperature, 0.7.
    tuned = [row("grpo", seed, 0.7 + seed * len(task) / 100, task=task, temperature="best")
             for task in study.tasks for seed in (1, 2)]
    table = studies_table.at_its_best_table(tuned, rows)
    assert "| lcm | 2 | -0.100 [-0.100, -0.100] |" in table
    assert f"| all tasks | 2 | {-0.1 - 0.65 / 3 / 4 / 2:+.3f} [" in table

    del rows[-1]
    assert "59 of 60" in primary_question.answer(study) and "change by" not in primary_question.answer(study)
    assert studies_table.tables(study)[1:] == ["Its results come with the last cell of collapse."]
    assert studies_table.files([study]) == []


def test_the_theorys_page_compares_the_terms_gradient_with_its_closed_form():
    old, moved = theory_charts.policies()
    p = old.softmax(0)
    for logits in (old, moved):
        expected = ((p - logits.softmax(0)).square().sum() + (1 - p.square().sum()) / 64) ** 0.5
        assert theory_charts.mean_gradient_norm(logits, old, 64) == pytest.approx(float(expected), rel=0.05)


def test_the_primary_question_is_answered_by_blocks_and_has_the_power_of_the_closed_form():
    rows = [row(arm, seed, vote, task=task, dose=dose) for task in ("t", "u") for seed in range(9)
            for arm, dose, vote in [("grpo", "", 0.5), ("replicate", "", 0.5 + seed / 100), ("ed_grpo", "0.01", 0.6),
                                    ("ed_grpo", "0.03", 0.6)]]
    del rows[-1]  # an incomplete block
    found = primary_question.blocks(rows, 2)
    assert {task: len(of_task) for task, of_task in found.items()} == {"t": 9, "u": 8}
    values = [[primary_question.difference(block) for block in of_task] for of_task in found.values()]
    # seed / 200 below 0.1: means of 0.08 and 0.0825, of 9 and 8 seeds
    result = primary_question.estimate(values, [0.5, 0.5])
    assert result.mean == pytest.approx(0.08125)
    assert result.error == pytest.approx(0.0031458, rel=1e-3)  # variances of 7.5 and 6 / 200 / 200, of 9 and 8 seeds
    assert result.verdict == (True, False, False)
    assert primary_question.permutation_p(found, {"t": 0.5, "u": 0.5}, np.random.default_rng(1)) < 0.001
    assert primary_question.estimate(values, [1, 0]).mean == pytest.approx(0.08)
    # error = 0.02 sqrt((1 / 3 + 1 / 2) / 40): 0.00289, so that 0.009 is 3.1 errors from 0
    spreads = dict.fromkeys("abcd", 0.02)
    gains, losses, _ = primary_question.power(spreads, 10, 0.009, varies=0.0, shared=0.0, doses=3, studies=500)
    assert gains == pytest.approx(0.86, abs=0.05) and losses == 0
