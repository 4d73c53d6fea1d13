"""The words and the terminal table: no claim beyond an interval."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.one_run import evaluation, one_run, settings

from nemo_edo.report.comparison import compare
from nemo_edo.report.conclusions import conclusions, terminal_table
from nemo_edo.report.run_set import find_runs, read_runs

HALF = np.tile([0.0, 1.0], 40)
STRAIGHT = ((0.3, 0.3), (0.45, 0.25), (0.6, 0.2))
PAPER, FLOOR, ALONE = "ED-GRPO, the paper's alpha", "ED-GRPO 0.3, floor -0.1", "ED-GRPO α=0.1"


def run(explorer=HALF, bonus=HALF, entropy=0.2, well_formed=1.0, curve=STRAIGHT, again=None):
    """GRPO at one half everywhere, an exploring arm and an entropy bonus whose votes are given, and those of a
    replicate."""
    arms = {"grpo": settings("GRPO"), "explorer": settings("Explorer", weight=0.3),
            "bonus": settings("Bonus", bonus=0.03)}
    ones = np.ones(80)
    evaluations = [
        evaluation("grpo", 80, vote_at_7=HALF, entropy=ones * 0.2, well_formed=ones),
        evaluation("explorer", 80, vote_at_7=explorer, entropy=ones * entropy, well_formed=ones * well_formed),
        evaluation("bonus", 80, vote_at_7=bonus, entropy=ones * 0.2, well_formed=ones),
    ]
    curves = {"grpo": STRAIGHT, "explorer": curve, "bonus": STRAIGHT}
    replicate = None if again is None else evaluation("replicate", 80, vote_at_7=again)
    return compare(one_run(evaluations, arms, baseline="grpo", curves=curves, replicate=replicate))


VERDICTS = ("better", "worse", "higher", "lower", "exceed")


@pytest.mark.parametrize(("changes", "said"), [
    ({"explorer": HALF * 0}, ["2 arms differ from GRPO in vote@7 by -0.500 to +0.000", "One seed gives no verdict"]),
    ({"explorer": HALF * 0 + 1, "again": HALF * 0.5},
     ["GRPO, trained again with other samples, differs from itself by 0.250. One seed gives no verdict"]),
    ({"entropy": 1.0, "well_formed": 0.1}, ["broke down: only 10% of its answers are well-formed"]),
    ({"curve": ((0.3, 0.3), (0.4, 0.29), (0.5, 0.28))},
     ["0.410", "GRPO 0.263; Explorer 0.295 (+0.031); Bonus 0.263 (+0.000)", "carry no interval"]),
    ({"curve": ((0.3, 0.3), (0.3, 0.28))}, ["Explorer is left out of the matched", "never left the start"]),
])
def test_words_of_one_seed_have_values_and_the_noise_and_no_verdict(changes: dict, said: list):
    comparison = run(**changes)
    text = " ".join(conclusions(comparison))
    assert all(part in text for part in said)
    assert not [word for word in VERDICTS if word in text] and "*" not in terminal_table(comparison)


def test_words_of_several_runs_claim_what_the_seeds_show_and_state_runs_and_seeds(study: Path, monkeypatch):
    several = conclusions(compare(read_runs(find_runs([str(study)]))))
    assert "4 runs with 3 seeds (1, 2, 3) and 4 trained arms, on 60 test problems" in several[-1]
    assert re.search("Left out.*unfinished: it has not finished", several[1])
    text = "\n".join(several)
    assert several[0].startswith("Over 3 seeds, 1 of 12 differences from GRPO is shown (")
    assert f"): {FLOOR}: higher entropy (" in several[0]
    monkeypatch.setattr("nemo_edo.report.conclusions.MOST_NAMED", 0)
    assert conclusions(compare(read_runs(find_runs([str(study)]))))[0].endswith("): and 1 more.")
    assert f"{PAPER} against GRPO, 3 seeds: no difference shown in greedy" in text
    assert re.search(f"{FLOOR} against GRPO, 3 seeds: higher entropy .*; no difference shown in", text)
    assert f"{PAPER} shows no gain over GRPO" in text
    [marked] = [line for line in several if "one seed only" in line]
    assert marked.startswith(f"{ALONE} has one seed only")
    assert not [line for line in several if line.startswith((f"{ALONE} against", f"{ALONE} exceeds"))]
