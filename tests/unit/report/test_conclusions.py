"""The words and the terminal table: no claim beyond an interval."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.one_run import evaluation, one_run, settings
from helpers.run_folder import write_run_folder

from nemo_edo.evaluation.results import START
from nemo_edo.report.comparison import compare
from nemo_edo.report.conclusions import conclusions, terminal_table
from nemo_edo.report.run_set import find_runs, read_runs

HALF = np.tile([0.0, 1.0], 40)
STRAIGHT = ((0.3, 0.3), (0.6, 0.2))
SEEDS = (1, 2, 3)
PAPER, FLOOR, ALONE = "ED-GRPO, the paper's alpha", "ED-GRPO 0.3, floor -0.1", "ED-GRPO α=0.1"


def run(explorer=HALF, bonus=HALF, entropy=0.2, well_formed=1.0, curve=STRAIGHT):
    """GRPO at one half everywhere, an exploring arm and an entropy bonus whose votes are given."""
    arms = {"grpo": settings("GRPO"), "explorer": settings("Explorer", weight=0.3),
            "bonus": settings("Bonus", bonus=0.03)}
    ones = np.ones(80)
    evaluations = [
        evaluation("grpo", 80, vote_at_7=HALF, entropy=ones * 0.2, well_formed=ones),
        evaluation("explorer", 80, vote_at_7=explorer, entropy=ones * entropy, well_formed=ones * well_formed),
        evaluation("bonus", 80, vote_at_7=bonus, entropy=ones * 0.2, well_formed=ones),
    ]
    curves = {"grpo": STRAIGHT, "explorer": curve, "bonus": STRAIGHT}
    return compare(one_run(evaluations, arms, baseline="grpo", curves=curves))


NOISY = np.concatenate([1 - HALF[:3], HALF[3:]])
"""Two problems gained, one lost."""


@pytest.mark.parametrize(("changes", "said", "unsaid"), [
    ({"explorer": NOISY}, ["Explorer shows no gain over GRPO: in vote@7"], "better"),
    ({"explorer": HALF * 0}, ["worse vote@7 (-0.500", "Explorer shows no gain over GRPO"], "better"),
    ({"explorer": HALF * 0 + 1, "bonus": HALF * 0 + 1},
     ["Explorer exceeds GRPO in vote@7 on this seed.", "without exploration, for comparison: Bonus +0.500"], "worse"),
    ({"entropy": 0.4}, ["higher entropy (+0.200"], "better"),
    ({"entropy": 1.0, "well_formed": 0.1}, ["broke down: only 10% of its answers are well-formed"], "better"),
    ({"curve": ((0.3, 0.3), (0.5, 0.28))},
     ["0.500", "GRPO 0.233; Explorer 0.280 (+0.047); Bonus 0.233 (+0.000)", "carry no interval"], "better"),
    ({"curve": ((0.3, 0.3), (0.3, 0.28))}, ["Explorer is left out of the matched", "never left the start"], "better"),
])
def test_words_claim_a_gain_only_beyond_its_interval_and_state_what_limits_it(changes: dict, said: list, unsaid: str):
    text = " ".join(conclusions(run(**changes)))
    assert all(part in text for part in said) and unsaid not in text


def test_the_scope_comes_first_and_the_number_of_comparisons_with_what_chance_would_give_last():
    first, *_, last = conclusions(run())
    assert all(part in first for part in ("one seed (42)", "80 test problems", "not the luck of training"))
    assert "4 differences were tested against GRPO, and 0 exceed their interval" in last
    assert "about 0.2 of 4 would be expected" in last


@pytest.mark.parametrize(("start", "broke"), [(0.9, True), (0.1, False)])
def test_an_arm_whose_start_was_as_bad_has_not_broken_down(start: float, broke: bool):
    evaluations = [evaluation(arm, 80, vote_at_7=HALF, well_formed=np.full(80, share))
                   for arm, share in ((START, start), ("grpo", 0.1))]
    found = conclusions(compare(one_run(evaluations, {"grpo": settings("GRPO")})))
    assert ("broke down" in " ".join(found)) is broke


@pytest.mark.parametrize("label", ["GRPO", "A label that is much longer than any column of the table can ever be"])
def test_the_terminal_table_fits_a_hundred_columns(label):
    names = ("greedy_accuracy", "accuracy", "vote@128", "pass@128", "distinct_4", "entropy", "well_formed", "pass@1")
    full = evaluation("policy", 80, **{name: HALF * 3 for name in names})
    table = terminal_table(compare(one_run([full], {"policy": settings(label)})))
    assert max(len(line) for line in table.splitlines()) <= 100
    assert label[:20] in table


def test_a_star_marks_exactly_the_differences_that_exceed_their_interval():
    lines = terminal_table(run(explorer=HALF * 0 + 1)).splitlines()
    rows = [line for line in lines if re.match("GRPO|Explorer|Bonus", line)]
    assert [row.count("*") for row in rows] == [0, 1, 0]


def test_words_of_several_runs_claim_what_exceeds_its_interval_over_seeds_and_state_runs_and_seeds(study: Path):
    several = conclusions(compare(read_runs(find_runs([str(study)]))))
    assert "4 runs with 3 seeds (1, 2, 3) and 4 trained arms, on 60 test problems" in several[0]
    assert re.search("Left out.*unfinished: it has not finished", several[1])
    text = "\n".join(several)
    assert f"{PAPER} against GRPO, 3 seeds: nothing differs by more than its interval over seeds" in text
    assert re.search(f"{FLOOR} against GRPO, 3 seeds: .*higher entropy", text)
    assert f"{PAPER} shows no gain over GRPO" in text
    [marked] = [line for line in several if "one seed only" in line]
    assert marked.startswith(f"{ALONE} has one seed only")
    assert not [line for line in several if line.startswith((f"{ALONE} against", f"{ALONE} exceeds"))]


@pytest.mark.parametrize(("shift", "expected"), [
    (0.0, "alpha makes no measurable difference"), (0.2, "differences exceed their interval over seeds")])
def test_words_about_alpha_follow_the_data(tmp_path: Path, shift: float, expected: str):
    for seed in SEEDS:
        for alpha in (0.0, 0.01, 0.1):
            run = tmp_path / f"{alpha},{seed}"
            write_run_folder(run, seed=seed, arms=(), alphas={"policy": alpha}, problems=30, iterations=3)
            if alpha == 0.1 and shift:
                path = run / "evaluations" / "policy.json"
                record = json.loads(path.read_text())
                distinct = record["metrics"]["distinct_4"]
                distinct["sum"] = [value + shift + seed / 100 for value in distinct["sum"]]
                path.write_text(json.dumps(record))
    said = conclusions(compare(read_runs(find_runs([str(tmp_path)]))))
    [about_alpha] = [line for line in said if line.startswith("Alpha 0.01, 0.1 against 0: ")]
    assert expected in about_alpha
