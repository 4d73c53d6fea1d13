from __future__ import annotations

import random

import numpy as np
import pytest

from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.data.score_store import StepScores, rollouts_checksum
from nemo_edo.data.stored_samples import read_samples
from nemo_edo.errors import UserError
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, Rollout, ScoredRollout

PROBLEMS, SAMPLES = ("test-10", "test-2", "test-3"), 4


def responses() -> list[ScoredRollout]:
    rng, found = random.Random(0), []
    for problem in PROBLEMS:
        for sample in range(SAMPLES):
            ids = tuple(rng.choices(range(50), k=rng.randint(1, 6)))
            logprobs = tuple(-rng.randint(0, 64) / 16 for _ in ids)  # whole in float32
            rollout = Rollout(problem, sample, (1, 2), ids, logprobs, "text", True, 0, 7)
            right = rng.random() < 0.5
            found.append(ScoredRollout(rollout, float(right), "2" if right else None, sample % 2 == 0, "correct"))
    return found


def read(tmp_path, scored, ranks: int = 1):
    store = RolloutStore(tmp_path)
    for rank in range(ranks):
        store.write(3, scored[rank::ranks], rank=rank, world_size=ranks)
    return read_samples(store, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrays_hold_what_the_records_hold_in_the_order_of_samples(tmp_path, ranks: int):
    scored = responses()
    samples = read(tmp_path, scored, ranks)
    assert samples.problems == PROBLEMS  # as drawn, not sorted
    flat = [[getattr(samples, name).ravel()[i] for name in ("rewards", "answers", "well_formed", "lengths", "logprobs")]
            for i in range(len(scored))]  # fmt: skip
    assert flat == [
        [s.reward, s.answer, s.well_formed, len(s.rollout.response_ids), sum(s.rollout.response_logprobs)]
        for s in scored
    ]
    for place in range(len(PROBLEMS)):
        of_problem = scored[place * SAMPLES : (place + 1) * SAMPLES]
        tokens = [tuple(ids.tolist()) for ids in samples.responses(place)]
        assert tokens == [s.rollout.response_ids for s in of_problem]
    assert samples.judged.all() and (samples.rules == -1).all()
    assert samples.checksum == rollouts_checksum(scored)


def test_a_judges_verdict_the_rules_beside_it_and_an_abstention_are_told_by_the_reason(tmp_path):
    rollout = [Rollout("test-1", sample, (1,), (2,), (-1.0,), "text", True, 0, 7) for sample in range(5)]
    marks = [(1.0, f"correct{RULES_AGREE}"), (1.0, f"correct{RULES_DISAGREE}"), (0.0, f"final answer 3{RULES_AGREE}"),
             (0.0, f"final answer 3{RULES_DISAGREE}"), (0.0, f"{ABSTAINED}its reply has no verdict")]  # fmt: skip
    scored = [ScoredRollout(r, reward, "2", True, why) for r, (reward, why) in zip(rollout, marks, strict=True)]
    samples = read(tmp_path, scored)
    assert samples.rules.tolist() == [[1, 0, 0, 1, -1]]
    assert samples.judged.tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("spoilt", [
    lambda scored: scored[:-1], lambda scored: [*scored[:-1], scored[0]], lambda scored: scored[SAMPLES + 1 :],
])  # fmt: skip
def test_problems_with_other_samples_than_the_rest_are_an_error(tmp_path, spoilt):
    with pytest.raises(UserError, match="expected samples 0 to N - 1 of each; evaluate the run again"):
        read(tmp_path, spoilt(responses()))


def test_a_response_without_every_log_probability_is_an_error(tmp_path):
    scored = [ScoredRollout(Rollout("t", 0, (1,), (2, 3), (-1.0,), "x", True, 0, 7), 1.0, "2", True, "correct")]
    with pytest.raises(UserError, match="without a log-probability of each token"):
        read(tmp_path, scored)


def test_missing_and_damaged_shards_are_errors(tmp_path):
    with pytest.raises(UserError, match="iter_00003: has no rollouts"):
        read_samples(RolloutStore(tmp_path), 3)
    path = RolloutStore(tmp_path).write(3, responses(), rank=0, world_size=1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_samples(RolloutStore(tmp_path), 3)
    with pytest.raises(UserError, match="has no responses"):
        read(tmp_path, [])


def test_scores_come_in_the_order_of_the_responses_and_all_have_one(tmp_path):
    scored = responses()
    samples = read(tmp_path, scored)
    scores = {(s.rollout.problem_id, s.rollout.sample_index): StepScores((float(i), 0.5)) for i, s in enumerate(scored)}
    steps = samples.steps(dict(reversed(scores.items())))
    assert np.array(steps)[:, :, 0].ravel().tolist() == list(range(len(scored)))
    del scores["test-2", 3]
    with pytest.raises(UserError, match="response 3 to test-2 has no score"):
        samples.steps(scores)
