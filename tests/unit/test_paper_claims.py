"""The paper's claims on made-up studies, where the truth is known."""

import numpy as np
import pytest
from paper_claims import METRIC, Family, findings, markdown

from nemo_edo.experiments.study_table import COLUMNS

ED = Family("ED-GRPO", "ed_grpo", "grpo")
DOSES = ("0.01", "0.1", "1")


def study(task: str = "sums", seeds: int = 6, *, entropy=(), diversity=(), votes=(), well_formed=1.0) -> list[dict]:
    """Rows of the baseline and three doses; each metric's rise over the baseline by dose, with noise of .01."""
    rng, rows = np.random.default_rng(len(task)), []
    for seed in range(seeds):
        for place, (arm, dose) in enumerate([("grpo", ""), *(("ed_grpo", dose) for dose in DOSES)]):
            means = {"entropy": (0.3, entropy), "distinct_4_pooled": (0.2, diversity), "vote": (0.8, votes)}
            values = {metric: start + (0, *(rises or (0, 0, 0)))[place] + 0.01 * rng.standard_normal()
                      for metric, (start, rises) in means.items()}
            rows.append({
                "task": task, "arm": arm, "dose": dose, "seed": str(seed), "iteration": "30", "temperature": "1",
                "note": "", "well_formed": str(1.0 if place < 3 else well_formed),
                **{metric: f"{value:.5f}" for metric, value in values.items()}})
    return rows


def verdicts(rows: list[dict], **options) -> dict[str, str]:
    return {one.claim: one.verdict for one in findings(rows, [ED], **options)}


def test_each_claim_is_shown_where_it_holds_and_refuted_where_the_opposite_does():
    assert {*METRIC.values(), *study()[0]} <= set(COLUMNS)  # a study's file has what the claims are about
    rise, fall = (0.05, 0.1, 0.15), (-0.05, -0.1, -0.15)
    assert set(verdicts(study(entropy=rise, diversity=rise, votes=rise)).values()) == {"shown"}
    assert set(verdicts(study(entropy=fall, diversity=fall, votes=fall)).values()) == {"refuted"}
    assert set(verdicts(study()).values()) == {"not shown"}


def test_votes_have_to_gain_below_the_largest_dose_and_a_dose_that_broke_down_proves_nothing():
    assert verdicts(study(votes=(0, 0, 0.2)))["votes"] == "not shown"
    assert verdicts(study(votes=(0, 0.1, -0.5)))["votes"] == "shown"
    broken = study(entropy=(0, 0, 3.0), diversity=(0, 0, 0.7), well_formed=0.2)
    assert verdicts(broken)["entropy"] == verdicts(broken)["diversity"] == "not shown"
    assert "1: left out" in markdown(findings(broken, [ED]))


def test_the_numbers_are_paired_by_seed_and_corrected_for_the_whole_table():
    rows = study(votes=(0.05, 0.05, 0.05))
    found = {one.claim: one for one in findings(rows, [ED])}
    by_seed = {(row["dose"], row["seed"]): float(row["vote"]) for row in rows}
    first = found["votes"].tests[0]
    assert (first.dose, len(found["votes"].tests)) == ("0.01", 2)
    assert first.values == pytest.approx([by_seed["0.01", str(s)] - by_seed["", str(s)] for s in range(6)])
    several = findings(rows + study("other task"), [ED])
    assert next(one for one in several if one.claim == "votes").tests[0].p >= first.p
