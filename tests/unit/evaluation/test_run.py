"""The evaluation on a scripted engine: each metric against a computation from its definition."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.config import EvaluationConfig
from nemo_edo.evaluation.run import Evaluator
from nemo_edo.generation.fake import ScriptedEngine
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem

SAMPLES, ROLLOUTS, MAX_NEW_TOKENS = 4, 3, 24
PAD, STOP, FIRST_CHARACTER = 0, 1, 2
PROBLEMS = [Problem(f"test-{i}", f"q{i}", "#### 1", str(i), f"test.jsonl:{i}") for i in range(1, 6)]
PROMPTS = {problem.id: (3,) * i for i, problem in enumerate(PROBLEMS, start=1)}


class CountingPolicy:
    """Its entropy at a position is the token id that is predicted there, which makes sums easy to follow."""

    def __init__(self) -> None:
        self.rows = 0

    def log_probs(self, batch):
        self.rows += batch.size
        return torch.zeros_like(batch.mask), batch.tokens[:, 1:].float()


class Engine(ScriptedEngine):
    """Keeps what it was asked."""

    def __init__(self, script) -> None:
        super().__init__(script, encode=lambda text: [ord(c) + FIRST_CHARACTER for c in text],
                         decode=lambda ids: "".join(chr(i - FIRST_CHARACTER) for i in ids), stop_id=STOP)
        self.calls: list[tuple] = []

    def generate(self, requests, sampling):
        self.calls.append((list(requests), sampling))
        return super().generate(requests, sampling)


def random_script(request, sampling) -> str:
    """Among its texts: right, wrong, tied, without an answer, cut at 24 tokens, badly formed."""
    rng = random.Random(f"{request.seed} {sampling.temperature}")
    right = request.problem_id.removeprefix("test-")
    answer = rng.choice([right, right, "77", "88"])
    return rng.choice([f"{rng.randint(1, 3)} + 1\n#### {answer}", f"#### {answer}", "no answer", "1" * 60,
                       f"#### {answer}\nand more"])


def evaluate(script=random_script, rollouts: int = ROLLOUTS, samples: int = SAMPLES, problems=PROBLEMS):
    """(evaluation, the first rollout's responses, engine, policy)"""
    engine, policy = Engine(script), CountingPolicy()
    evaluator = Evaluator(policy=policy, engine=engine, scorer=ExactAnswerScorer(), problems=problems, prompts=PROMPTS,
                          config=EvaluationConfig(samples=samples), max_new_tokens=MAX_NEW_TOKENS, pad_id=PAD)
    requests = sampling_requests(problems, PROMPTS, rollouts * samples, 42, "evaluate")
    return *evaluator.evaluate("arm", requests, rollouts), engine, policy


class Reference:
    """The sampled responses again, problem by problem and rollout by rollout."""

    def __init__(self, engine: Engine, rollouts: int = ROLLOUTS, samples: int = SAMPLES, problems=PROBLEMS) -> None:
        requests, sampling = engine.calls[1]
        scored = ExactAnswerScorer().score(ScriptedEngine.generate(engine, requests, sampling), problems)
        by_sample = {(s.rollout.problem_id, s.rollout.sample_index): s for s in scored}
        self.responses = [
            [[by_sample[problem.id, rollout * samples + index] for index in range(samples)]
             for rollout in range(rollouts)]
            for problem in problems
        ]

    def per_problem(self, value) -> list[float]:
        """The mean over rollouts of value(problem, the rollout's responses)."""
        return [float(np.mean([value(problem, rollout) for rollout in rollouts]))
                for problem, rollouts in zip(PROBLEMS, self.responses, strict=True)]


@pytest.fixture(scope="module")
def evaluated():
    evaluation, first, engine, policy = evaluate()
    return evaluation, first, Reference(engine), engine, policy


def means(evaluation, metric: str) -> np.ndarray:
    """[P] the metric on each problem."""
    sums, counts = evaluation.metrics[metric]
    return sums / counts


def test_the_sample_holds_every_kind_of_response(evaluated):
    responses = list(itertools.chain(*itertools.chain(*evaluated[2].responses)))
    assert {one.reason.split()[0] for one in responses} == {"correct", "final", "no", "did"}
    assert {one.well_formed for one in responses if one.reward} == {True, False}


def test_greedy_accuracy_is_that_of_one_greedy_response_each(evaluated):
    evaluation, _, _, engine, _ = evaluated
    requests, sampling = engine.calls[0]
    assert (sampling.temperature, sampling.max_new_tokens, len(requests)) == (0.0, MAX_NEW_TOKENS, len(PROBLEMS))
    greedy = ExactAnswerScorer().score(ScriptedEngine.generate(engine, requests, sampling), PROBLEMS)
    assert means(evaluation, "greedy_accuracy").tolist() == [one.reward for one in greedy]
    assert [request.problem_id for request in requests] == list(evaluation.problems)


def test_sampling_is_at_temperature_one_over_the_whole_vocabulary(evaluated):
    requests, sampling = evaluated[3].calls[1]
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (1.0, 1.0, MAX_NEW_TOKENS)
    assert len(requests) == len(PROBLEMS) * SAMPLES * ROLLOUTS


def test_accuracy_is_the_share_of_right_responses(evaluated):
    evaluation, _, reference, _, _ = evaluated
    expected = reference.per_problem(lambda problem, rollout: np.mean([s.answer == problem.answer for s in rollout]))
    np.testing.assert_allclose(means(evaluation, "accuracy"), expected)
    assert evaluation.metrics["accuracy"][1].tolist() == [SAMPLES * ROLLOUTS] * len(PROBLEMS)


def test_answers_are_counted_and_spread_among_the_responses_of_each_rollout(evaluated):
    evaluation, _, reference, _, _ = evaluated

    def shares(rollout) -> list[float]:
        given = [s.answer for s in rollout if s.answer is not None]
        return [given.count(answer) / len(given) for answer in set(given)]

    counted = reference.per_problem(lambda problem, rollout: len(shares(rollout)))
    spread = reference.per_problem(lambda problem, rollout: -sum(share * np.log(share) for share in shares(rollout)))
    np.testing.assert_allclose(means(evaluation, "distinct_answers"), counted)
    np.testing.assert_allclose(means(evaluation, "answer_entropy"), spread, atol=1e-12)
    assert 1 < max(counted)
    assert 0 < max(spread)


def vote_over_all_tie_breaks(answers: Sequence[str | None], reference: str) -> float:
    """The mean score of the vote over all orders in which the first seen of equals wins."""
    scores = []
    for order in itertools.permutations([answer for answer in answers if answer is not None]):
        counts = Counter(order)
        scores.append(bool(order) and max(order, key=lambda a: (counts[a], -order.index(a))) == reference)
    return float(np.mean(scores))


def test_vote_is_the_mean_over_all_orders_of_the_first_of_the_most_frequent(evaluated):
    evaluation, _, reference, _, _ = evaluated
    expected = reference.per_problem(
        lambda problem, rollout: vote_over_all_tie_breaks([s.answer for s in rollout], problem.answer))
    np.testing.assert_allclose(means(evaluation, f"vote@{SAMPLES}"), expected)


@pytest.mark.parametrize(("answers", "score"), [
    ("1 1 7 8", 1), ("1 7 7 8", 0), ("1 1 7 7", 1 / 2), ("1 7 8 9", 1 / 4), ("1 - - -", 1), ("- - - -", 0),
])
def test_votes_with_ties_and_abstentions_on_one_problem(answers: str, score: float):
    texts = [f"#### {answer}" if answer != "-" else "nothing" for answer in answers.split()]
    evaluation, *_ = evaluate(lambda request, _: texts[request.sample_index], rollouts=1, problems=PROBLEMS[:1])
    assert means(evaluation, "vote@4").tolist() == pytest.approx([score])


@pytest.mark.parametrize("k", range(1, SAMPLES + 1))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(evaluated, k: int):
    evaluation, _, reference, _, _ = evaluated
    expected = [
        np.mean([any(subset) for subset in itertools.combinations(
            [s.answer == problem.answer for rollout in rollouts for s in rollout], k)])
        for problem, rollouts in zip(PROBLEMS, reference.responses, strict=True)
    ]
    np.testing.assert_allclose(means(evaluation, f"pass@{k}"), expected)


def test_pass_at_k_goes_up_to_the_samples_of_one_rollout(evaluated):
    names = [name for name in evaluated[0].metrics if name.startswith("pass@")]
    assert names == [f"pass@{k}" for k in range(1, SAMPLES + 1)]


def test_distinct_4_is_among_the_responses_of_one_rollout_of_a_problem(evaluated):
    def distinct(_, rollout) -> float:
        grams = [ids[start : start + 4] for ids in (s.rollout.response_ids for s in rollout)
                 for start in range(len(ids) - 3)]
        return len(set(grams)) / len(grams) if grams else 0.0

    evaluation, _, reference, _, _ = evaluated
    np.testing.assert_allclose(means(evaluation, "distinct_4"), reference.per_problem(distinct))


def test_entropy_is_a_mean_over_the_tokens_of_the_first_rollout(evaluated):
    evaluation, _, reference, _, policy = evaluated
    first = [[s.rollout.response_ids for s in rollouts[0]] for rollouts in reference.responses]
    sums, counts = evaluation.metrics["entropy"]
    assert counts.tolist() == [sum(map(len, responses)) for responses in first]
    assert sums.tolist() == [sum(map(sum, responses)) for responses in first]
    assert policy.rows == len(PROBLEMS) * SAMPLES


def test_well_formed_and_length_are_means_over_all_sampled_responses(evaluated):
    evaluation, _, reference, _, _ = evaluated
    np.testing.assert_allclose(
        means(evaluation, "well_formed"), reference.per_problem(lambda _, rollout: np.mean(
            [s.well_formed for s in rollout])))
    np.testing.assert_allclose(
        means(evaluation, "response_length"), reference.per_problem(lambda _, rollout: np.mean(
            [len(s.rollout.response_ids) for s in rollout])))


def test_returned_examples_are_the_first_rollouts_responses_problem_by_problem(evaluated):
    _, first, reference, _, _ = evaluated
    expected = [s.rollout for rollouts in reference.responses for s in rollouts[0]]
    assert [s.rollout for s in first] == expected
    assert [s.rollout.sample_index for s in first] == list(range(SAMPLES)) * len(PROBLEMS)


def test_one_rollout_gives_the_metrics_of_the_first_of_several():
    one, first_of_one, *_ = evaluate(rollouts=1)
    _, first_of_three, *_ = evaluate(rollouts=3)
    assert first_of_one == first_of_three
    assert one.metrics["accuracy"][0].tolist() == [
        sum(s.reward for s in first_of_three[start : start + SAMPLES])
        for start in range(0, len(first_of_three), SAMPLES)
    ]


def test_a_response_cut_at_the_limit_is_wrong_and_abstains():
    evaluation, first, *_ = evaluate(lambda *_: "1" * 40 + "\n#### 1", rollouts=1, problems=PROBLEMS[:1])
    assert {(s.rollout.finished, s.answer, s.reward) for s in first} == {(False, None, 0.0)}
    assert means(evaluation, "vote@4").tolist() == [0.0]
    assert means(evaluation, "response_length").tolist() == [MAX_NEW_TOKENS]


def test_requests_that_do_not_fit_the_problems_are_an_error():
    engine = Engine(random_script)
    evaluator = Evaluator(policy=CountingPolicy(), engine=engine, scorer=ExactAnswerScorer(), problems=PROBLEMS,
                          prompts=PROMPTS, config=EvaluationConfig(samples=SAMPLES), max_new_tokens=8, pad_id=PAD)
    requests = sampling_requests(PROBLEMS[:-1], PROMPTS, SAMPLES, 42, "evaluate")
    with pytest.raises(ValueError, match="zip"):
        evaluator.evaluate("arm", requests, 1)
