import re

import numpy as np
import pytest

from nemo_edo.evaluation.comparison import ArmSettings, CurvePoint, Evaluation, compare
from nemo_edo.evaluation.conclusions import conclusions, terminal_table

PROBLEMS = tuple(f"test-{index}" for index in range(80))
HALF = np.tile([0.0, 1.0], 40)


def run(explorer=HALF, rival=HALF, entropy=0.2, well_formed=1.0, curve=((0.3, 0.3), (0.6, 0.2))):
    """GRPO at one half everywhere, an exploring arm and an entropy bonus whose votes are given."""
    arms = {"grpo": ArmSettings("GRPO", 0.0, 0.04, 0.0, None, 0.0, 3),
            "explorer": ArmSettings("Explorer", None, 0.04, 0.3, -0.1, 0.0, 3),
            "rival": ArmSettings("Bonus", 0.0, 0.04, 0.0, None, 0.03, 3)}
    votes = {"grpo": HALF, "explorer": explorer, "rival": rival}
    ones = np.ones(80)
    evaluations = {name: Evaluation(name, PROBLEMS, {
        "vote@7": (vote, ones), "entropy": (ones * (entropy if name == "explorer" else 0.2), ones),
        "well_formed": (ones * (well_formed if name == "explorer" else 1.0), ones)}) for name, vote in votes.items()}
    straight = ((0.3, 0.3), (0.6, 0.2))
    curves = {name: [CurvePoint(a, {"entropy": e}) for a, e in (curve if name == "explorer" else straight)]
              for name in arms}
    return compare(evaluations, curves, arms=arms, baseline="grpo", seed=42, resamples=200)


def test_an_interval_that_includes_zero_is_never_called_an_advantage():
    noisy = HALF.copy()
    noisy[:3] = 1 - noisy[:3]  # two problems gained, one lost
    text = " ".join(conclusions(run(explorer=noisy)))
    assert "No advantage of exploration is shown by Explorer: in vote@7 it does not exceed GRPO" in text
    assert "better" not in text


def test_a_worse_vote_is_called_worse():
    text = " ".join(conclusions(run(explorer=HALF * 0)))
    assert "Explorer against GRPO: worse vote@7 (-0.500)" in text
    assert "No advantage of exploration is shown by Explorer" in text


def test_a_gain_is_limited_to_the_seed_and_set_beside_the_rival():
    text = " ".join(conclusions(run(explorer=HALF * 0 + 1, rival=HALF * 0 + 1)))
    assert "Explorer exceeds GRPO in vote@7 on this seed." in text
    assert "The rivals without exploration, for comparison: Bonus +0.500" in text


def test_higher_entropy_is_higher_and_neither_better_nor_worse():
    text = " ".join(conclusions(run(entropy=0.4)))
    assert "higher entropy (+0.200)" in text
    assert "better" not in text


def test_an_arm_whose_answers_broke_down_is_not_praised_for_its_entropy():
    text = " ".join(conclusions(run(entropy=1.0, well_formed=0.1)))
    assert "Explorer broke down: only 10% of its answers are well-formed" in text


def test_the_scope_comes_first_and_names_seed_problems_and_the_luck_of_training():
    first = conclusions(run())[0]
    assert "one seed (42)" in first
    assert "80 test problems" in first
    assert "not the luck of training" in first


def test_the_number_of_comparisons_is_stated_with_what_chance_alone_would_give():
    last = conclusions(run())[-1]
    assert "4 differences were tested against GRPO, and 0 exceed their interval" in last
    assert "about 0.2 of 4 would be expected" in last


def test_matched_values_are_given_with_their_distance_and_without_a_claim():
    text = " ".join(conclusions(run(curve=((0.3, 0.3), (0.5, 0.28)))))
    assert "0.500 on the training problems" in text
    assert "GRPO 0.233; Explorer 0.280 (+0.047); Bonus 0.233 (+0.000)" in text
    assert "carry no interval" in text


def test_an_arm_left_out_of_the_matching_is_named_with_its_reason():
    text = " ".join(conclusions(run(curve=((0.3, 0.3), (0.3, 0.28)))))
    assert "Explorer is left out of the matched comparison: it never left the start" in text


def test_a_single_arm_without_start_says_that_nothing_is_compared():
    lone = Evaluation("policy", PROBLEMS, {"vote@7": (HALF, np.ones(80))})
    comparison = compare({"policy": lone}, {}, arms={"policy": ArmSettings("policy", None, 0.04, 4e-5, None, 0.0, 3)},
                         baseline=None, seed=1, resamples=20)
    assert "There is no second arm to compare with" in conclusions(comparison)[-1]


@pytest.mark.parametrize("label", ["GRPO", "A label that goes on for much longer than any column of the table"])
def test_the_terminal_table_fits_a_hundred_columns(label):
    names = ("greedy_accuracy", "accuracy", "vote@128", "pass@128", "distinct_4", "entropy", "well_formed", "pass@1")
    full = Evaluation("policy", PROBLEMS, {name: (HALF * 3, np.ones(80)) for name in names})
    comparison = compare({"policy": full}, {}, arms={"policy": ArmSettings(label, None, 0.04, 0.0, None, 0.0, 3)},
                         baseline=None, seed=1, resamples=20)
    table = terminal_table(comparison)
    assert max(len(line) for line in table.splitlines()) <= 100
    assert label[:20] in table


def test_a_star_marks_exactly_the_differences_that_exceed_their_interval():
    lines = terminal_table(run(explorer=HALF * 0 + 1)).splitlines()
    rows = [line for line in lines if re.match("GRPO|Explorer|Bonus", line)]
    assert [row.count("*") for row in rows] == [0, 1, 0]
