import dataclasses
import random

import numpy as np
import pytest
from helpers.responses import scored

from nemo_edo.errors import UserError
from nemo_edo.evaluation.samples import Samples, read_samples
from nemo_edo.rollouts.score_store import StepScores, rollouts_checksum
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, ScoredRollout

PROBLEMS, SAMPLES = ("test-10", "test-2", "test-3"), 4


def responses() -> list[ScoredRollout]:
    rng, found = random.Random(0), []
    for problem in PROBLEMS:
        for sample in range(SAMPLES):
            ids = tuple(rng.choices(range(50), k=rng.randint(1, 6)))
            logprobs = tuple(-rng.randint(0, 64) / 16 for _ in ids)  # whole in float32
            right = rng.random() < 0.5
            found.append(scored(problem, sample, ids, float(right), answer="2" if right else None,
                                well_formed=sample % 2 == 0, response_logprobs=logprobs))
    return found


def read(tmp_path, written):
    RolloutStore(tmp_path).write(3, written)
    return read_samples(RolloutStore(tmp_path), 3)


def test_arrays_hold_what_the_records_hold_in_the_order_of_samples(tmp_path):
    written = responses()
    samples = read(tmp_path, [*written[::2], *written[1::2]])
    direct = Samples.of_scored(written, SAMPLES)
    for name in (field.name for field in dataclasses.fields(Samples) if field.name not in ("problems", "tokens")):
        np.testing.assert_array_equal(getattr(samples, name), getattr(direct, name))
    assert samples.problems == direct.problems == PROBLEMS  # as generated, not sorted
    names = ("rewards", "answers", "well_formed", "lengths", "logprobs")
    assert [[getattr(samples, name).ravel()[i] for name in names] for i in range(len(written))] == [
        [s.reward, s.answer, s.well_formed, len(s.rollout.response_ids), sum(s.rollout.response_logprobs)]
        for s in written]
    tokens = [tuple(ids.tolist()) for ids in samples.tokens.flat]
    assert tokens == [tuple(one.rollout.response_ids) for one in written]
    assert samples.has_verdict.all() and (samples.rules == -1).all()
    assert samples.checksum == rollouts_checksum(written)


def test_a_judges_verdict_the_rules_verdict_and_an_abstention_are_recognised_by_the_reason(tmp_path):
    marks = [(1.0, f"correct{RULES_AGREE}"), (1.0, f"correct{RULES_DISAGREE}"), (0.0, f"final answer 3{RULES_AGREE}"),
             (0.0, f"final answer 3{RULES_DISAGREE}"), (0.0, f"{ABSTAINED}its reply has no verdict")]
    samples = read(tmp_path, [scored("test-1", sample, reward=reward, reason=reason)
                              for sample, (reward, reason) in enumerate(marks)])
    assert samples.rules.tolist() == [[1, 0, 0, 1, -1]]
    assert samples.has_verdict.tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize(("spoilt", "told"), [
    (lambda whole: whole[:-1], "samples 0 to N - 1"),
    (lambda whole: whole[SAMPLES + 1 :], "samples 0 to N - 1"),
    (lambda whole: [scored(response_logprobs=(-1.0,))], "without a log-probability of each token"),
    (lambda whole: [], "has no responses"),
])
def test_problems_with_unequal_samples_and_missing_log_probabilities_are_errors(tmp_path, spoilt, told: str):
    with pytest.raises(UserError, match=told):
        read(tmp_path, spoilt(responses()))


def test_scores_come_in_the_order_of_the_responses_and_all_have_one(tmp_path):
    samples = read(tmp_path, responses())
    keys = [(problem, sample) for problem in PROBLEMS for sample in range(SAMPLES)]
    scores = {key: StepScores((float(place), 0.5)) for place, key in enumerate(keys)}
    steps = samples.steps(dict(reversed(scores.items())))
    assert np.array(steps)[:, :, 0].ravel().tolist() == list(range(len(keys)))
    del scores["test-2", 3]
    with pytest.raises(UserError, match="response 3 to test-2 has no score"):
        samples.steps(scores)
