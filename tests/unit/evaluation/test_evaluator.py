"""The evaluation on a scripted engine: each metric against a computation from its definition."""

import itertools
import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.one_run import evaluation
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_evaluation import MAX_NEW_TOKENS, PROBLEMS, ROLLOUTS, SAMPLES, Engine, evaluate

from nemo_edo.algorithms.plan import sampling_requests
from nemo_edo.errors import UserError
from nemo_edo.evaluation.evaluator import Tuning
from nemo_edo.evaluation.results import Evaluation, load_evaluation, metric_name, newly_solved_and_lost
from nemo_edo.metrics import distinct_n
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem


class CountingPolicy:
    """Its entropy at a position is the token id that is predicted there, which makes sums easy to check."""

    def __init__(self) -> None:
        self.rows, self.temperatures = 0, []

    def logprobs(self, batch, *, temperature):
        self.rows += batch.size
        self.temperatures.append(temperature)
        return torch.zeros_like(batch.mask), batch.tokens[:, 1:].float()


def sampled_again(engine: Engine) -> list[list[list]]:
    """[problem][rollout][sample], the scored responses."""
    requests, sampling = engine.calls[1]
    scored = ExactAnswerScorer().score(ScriptedEngine.generate(engine, requests, sampling), PROBLEMS)
    by_sample = {(s.rollout.problem_id, s.rollout.sample_index): s for s in scored}
    starts = range(0, ROLLOUTS * SAMPLES, SAMPLES)
    return [[[by_sample[problem.id, start + place] for place in range(SAMPLES)] for start in starts]
            for problem in PROBLEMS]


@pytest.fixture(scope="module")
def evaluated():
    """(evaluation, the first rollout's responses, all responses, engine, policy); responses are of every kind."""
    policy = CountingPolicy()
    evaluation, first, engine = evaluate(policy=policy)
    responses = sampled_again(engine)
    flat = list(itertools.chain(*itertools.chain(*responses)))
    assert {one.reason.split()[0] for one in flat} == {"correct", "final", "no", "did"}
    assert {one.well_formed for one in flat if one.reward} == {True, False}
    return evaluation, first, responses, engine, policy


def means(evaluation, metric: str) -> np.ndarray:
    """[P] the metric on each problem."""
    sums, counts = evaluation.metrics[metric]
    return sums / counts


def test_greedy_accuracy_is_of_one_greedy_response_each_and_samples_are_of_the_unchanged_distribution(evaluated):
    evaluation, _, _, engine, _ = evaluated
    (requests, sampling), (of_samples, at) = engine.calls
    assert (sampling.temperature, sampling.max_new_tokens, len(requests)) == (0.0, MAX_NEW_TOKENS, len(PROBLEMS))
    greedy = ExactAnswerScorer().score(ScriptedEngine.generate(engine, requests, sampling), PROBLEMS)
    assert means(evaluation, "greedy_accuracy").tolist() == [one.reward for one in greedy]
    assert [request.problem_id for request in requests] == list(evaluation.problems)
    assert (at.temperature, at.top_p, at.max_new_tokens) == (1.0, 1.0, MAX_NEW_TOKENS)
    assert len(of_samples) == len(PROBLEMS) * SAMPLES * ROLLOUTS
    assert evaluation.metrics["accuracy"][1].tolist() == [SAMPLES * ROLLOUTS] * len(PROBLEMS)


def shares(rollout) -> list[float]:
    given = [s.answer for s in rollout if s.answer is not None]
    return [given.count(answer) / len(given) for answer in set(given)]


def vote_over_all_tie_breaks(problem, rollout) -> float:
    """The mean score of the vote over all orders in which the first seen of equals wins."""
    scores = []
    for order in itertools.permutations([s.answer for s in rollout if s.answer is not None]):
        counts = Counter(order)
        scores.append(bool(order) and max(order, key=lambda a: (counts[a], -order.index(a))) == problem.answer)
    return float(np.mean(scores))


def distinct(_, rollout) -> float:
    ids = [tuple(s.rollout.response_ids) for s in rollout]
    grams = [one[start : start + 4] for one in ids for start in range(len(one) - 3)]
    return len(set(grams)) / len(grams) if grams else 0.0


DEFINITIONS = {
    "accuracy": lambda problem, rollout: np.mean([s.answer == problem.answer for s in rollout]),
    f"vote@{SAMPLES}": vote_over_all_tie_breaks,
    "distinct_4": distinct,
    "distinct_answers": lambda _, rollout: len(shares(rollout)),
    "answer_entropy": lambda _, rollout: -sum(share * np.log(share) for share in shares(rollout)),
    "well_formed": lambda _, rollout: np.mean([s.well_formed for s in rollout]),
    "response_length": lambda _, rollout: np.mean([len(s.rollout.response_ids) for s in rollout]),
}


@pytest.mark.parametrize("metric", DEFINITIONS)
def test_a_metric_is_the_mean_of_its_definition_over_the_rollouts_of_each_problem(evaluated, metric):
    evaluation, _, responses, _, _ = evaluated
    expected = [np.mean([DEFINITIONS[metric](problem, rollout) for rollout in rollouts])
                for problem, rollouts in zip(PROBLEMS, responses, strict=True)]
    np.testing.assert_allclose(means(evaluation, metric), expected, atol=1e-12)
    assert len(set(expected)) > 1


def test_entropy_is_of_the_first_rollouts_tokens_and_pooled_distinct_4_of_all_responses_together(evaluated):
    evaluation, examples, responses, _, policy = evaluated
    first = [[tuple(s.rollout.response_ids) for s in rollouts[0]] for rollouts in responses]
    sums, counts = evaluation.metrics["entropy"]
    assert counts.tolist() == [sum(map(len, ids)) for ids in first]
    assert sums.tolist() == [sum(map(sum, ids)) for ids in first]
    assert policy.rows == len(PROBLEMS) * SAMPLES
    assert [s.rollout for s in examples] == [s.rollout for rollouts in responses for s in rollouts[0]]
    flat = [tuple(s.rollout.response_ids) for rollouts in responses for rollout in rollouts for s in rollout]
    assert evaluation.mean("distinct_4_pooled") == pytest.approx(distinct_n(flat, n=4))
    assert evaluation.mean("distinct_4_pooled") < 0.8 * evaluation.mean("distinct_4")


def test_every_temperature_has_its_own_metrics_and_the_best_is_chosen_on_training_problems_alone():
    def script(request, sampling) -> str:
        """On training problems 0.5 is best, on test problems 1."""
        right = request.problem_id.split("-")[1]
        tuned = sampling.temperature == (0.5 if request.problem_id.startswith("train") else 1.0)
        return f"#### {right if tuned else 77}"

    train = [Problem(f"train-{i}", f"q{i}", "#### 1", str(i), f"train.jsonl:{i}") for i in (1, 2)]
    tuning = Tuning(train, sampling_requests(train, {"train-1": (3,), "train-2": (3,)}, SAMPLES, 42, "tune"))
    policy, settings = CountingPolicy(), {"temperature": [1.0, 0.5], "tuning_problems": 2}
    evaluation, _, engine = evaluate(script, rollouts=2, policy=policy, tuning=tuning, **settings)
    found = {name: evaluation.mean(name) for name in evaluation.metrics}
    assert (found["vote@4"], found["vote@4/t0.5"], found["vote@4/best"]) == (1.0, 0.0, 0.0)
    assert found["best_temperature"] == 0.5 and evaluation.temperature == 1.0
    assert policy.temperatures == [1.0, 0.5] and "entropy/t0.5" in found
    assert {"greedy_accuracy", "pass@1", "pass@4/t0.5"} <= set(found)
    assert not {"greedy_accuracy/t0.5", "pass@1/t0.5"} & set(found)
    sampled = [(sampling.temperature, len(requests)) for requests, sampling in engine.calls]
    assert sampled == [(0.0, 7), (1.0, 7 * 2 * SAMPLES), (0.5, 7 * 2 * SAMPLES), (1.0, 8), (0.5, 8)]
    assert [metric_name(name) for name in ("vote@4/t0.5", "vote@4/best")] == [
        "vote@4, temperature 0.5", "vote@4, best temperature"]


def test_without_an_answer_in_any_response_there_are_no_votes_and_no_best_temperature():
    tuning = Tuning(PROBLEMS[:1], sampling_requests(PROBLEMS[:1], {PROBLEMS[0].id: (3,)}, SAMPLES, 42, "tune"))
    evaluation, _, _ = evaluate(lambda *_: "no answer", tuning=tuning, temperature=[1.0, 0.5], tuning_problems=1)
    names = {name.partition("/")[0] for name in evaluation.metrics}
    assert not names & {f"vote@{SAMPLES}", "distinct_answers", "answer_entropy", "best_temperature"}
    assert {"accuracy", "pass@4", "distinct_4"} <= names


@pytest.mark.parametrize(("formed", "told"), [(0, True), (4, True), (5, False)])
def test_an_evaluation_warns_where_fewer_than_a_twentieth_of_its_responses_is_well_formed(formed: int, told: bool):
    places = itertools.count()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        evaluate(lambda *_: "#### 1" if next(places) < formed else "no answer")  # 7 greedy ones and 7 x 3 x 4 of 91
    said = [str(one.message) for one in found if "state an answer" in str(one.message)]
    assert [one.startswith("arm: ") for one in said] == [True] * told
    assert not told or f"{formed / 91:.1%} of the responses" in said[0]


def test_means_are_of_what_was_measured_with_their_intervals():
    found = Evaluation("a", ("x", "y"), {"response_length": (np.array([1.0, 5.0]), np.array([2.0, 2.0])),
                                         "entropy": (np.zeros(2), np.zeros(2))})  # fmt: skip
    assert found.means(resamples=400, seed=0) == {"response_length": {"mean": 1.5, "low": 0.5, "high": 2.5}}
    assert (found.has("entropy"), found.mean("response_length")) == (False, 1.5)
    assert np.isnan(found.mean("entropy")) and np.isnan(found.mean("kl"))


@pytest.mark.parametrize("change", [
    {"sum": [1.0]}, {"sum": [None] * 2}, {"sum": ["x"] * 2}, {"count": [-1] * 2}, {"sum": [float("nan"), 1.0]}])
def test_an_evaluation_is_read_back_as_written_and_malformed_numbers_of_problems_are_named(tmp_path, change):
    path, record = tmp_path / "a.json", evaluation("a", 2, accuracy=[0, 1]).record()
    path.write_text(json.dumps(record))
    assert load_evaluation(path).record() == record
    record["metrics"]["accuracy"] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="a.json: "):
        load_evaluation(path)


def test_newly_solved_and_lost_count_full_rewards_that_came_and_went_problem_by_problem():
    before = evaluation("start", "abcd", greedy_accuracy=[1.0, 1.0, 0.0, 0.5])
    after = evaluation("grpo", "dcba", greedy_accuracy=[1.0, 1.0, 0.9, 1.0])
    assert newly_solved_and_lost(before, after) == {"newly_solved": 2.0, "lost": 1.0}
    assert newly_solved_and_lost(after, before) == {"newly_solved": 1.0, "lost": 2.0}
    with pytest.raises(ValueError, match="2 problems .*'d', 'e'"):
        newly_solved_and_lost(before, evaluation("other", "abce", greedy_accuracy=[1.0] * 4))
