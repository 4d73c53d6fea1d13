"""Metrics computed from stored responses equal those of the evaluation that generated them; curves match theirs."""

import dataclasses
import random
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from helpers import scripted_evaluation
from helpers.responses import scored
from helpers.scripted_evaluation import PROBLEMS, ROLLOUTS, SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.errors import UserError
from nemo_edo.evaluation.evaluator import Samples, read_samples
from nemo_edo.evaluation.stored import (
    aggregated,
    analyse,
    best_of_curve,
    differences,
    families,
    kappa,
    sample_circles,
    table,
    vote_curve,
)
from nemo_edo.metrics import majority_at_k, pass_at_k
from nemo_edo.metrics.paired import cohen_kappa, holm, mcnemar, paired_permutation_test
from nemo_edo.rollouts.store import RolloutStore, StepScores, rollouts_checksum
from nemo_edo.test_time import expected_vote_score
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, ScoredRollout

N = SAMPLES * ROLLOUTS
BOOTSTRAP = {"resamples": 200, "seed": 0}


def unchanged(place, one):
    """But for log-probabilities, which the scripted engine has none of."""
    rng = random.Random(place)
    logprobs = tuple(-rng.randint(0, 64) / 16 for _ in one.rollout.response_ids)  # whole in float32
    return replace(one, rollout=replace(one.rollout, response_logprobs=logprobs))


def evaluate(folder, change=unchanged, **settings):
    """The evaluation of a run, and the responses that it stored, greedy and sampled."""
    evaluation, *_ = scripted_evaluation.evaluate(change=change, folder=folder, **settings)
    return evaluation, *(read_samples(RolloutStore(folder / kind), 0) for kind in ("greedy", "sampled"))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return evaluate(tmp_path_factory.mktemp("run"))


def stored(greedy, sampled, scores=None, *, each=SAMPLES, seed=0):
    return analyse("arm", greedy, sampled, scores or {}, each=each, subsets=300, seed=seed)


def means(evaluation, metric: str) -> np.ndarray:
    """[P], NaN where there is nothing."""
    sums, counts = evaluation.metrics[metric]
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def test_every_metric_of_the_evaluation_comes_out_of_its_stored_responses(evaluated, tmp_path):
    evaluation, greedy, sampled = evaluated
    found = stored(greedy, sampled)
    shared = evaluation.metrics.keys() - {f"vote@{SAMPLES}"}
    assert len(shared) == 12 + SAMPLES and shared <= found.metrics.keys()
    for name in shared:
        np.testing.assert_allclose(means(found, name), means(evaluation, name), rtol=1e-6, err_msg=name)
    assert found.problems == evaluation.problems
    for one in (found, evaluation):
        assert not {"abstained", "judge_agreement"} & one.metrics.keys()
    logprobs = [sum(row) for row in sampled.logprobs.tolist()]
    np.testing.assert_allclose(found.metrics["entropy_sampled"][0], [-value for value in logprobs])
    evaluation, greedy, sampled = evaluate(tmp_path, rollouts=1, samples=6)
    first, again, other = (stored(greedy, sampled, each=6, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_allclose(means(first, "majority@6"), means(evaluation, "vote@6"))
    votes, same, different = (means(one, "majority@4").tolist() for one in (first, again, other))
    assert votes == same != different  # the seed fixes the subsets


def test_curves_are_measured_at_every_k_and_are_the_librarys(evaluated):
    _, greedy, sampled = evaluated
    scores = np.random.default_rng(0).normal(size=sampled.rewards.shape)
    found = stored(greedy, sampled, {"prm": scores})
    measured = {"tokens@{}", "pass@{}", "majority@{}", "best_of@{}/oracle", "best_of@{}/prm"}
    assert families(found) == {family: list(range(1, N + 1)) for family in measured}
    for place, problem in enumerate(PROBLEMS):
        rewards, answers = sampled.rewards[place], sampled.answers[place].tolist()
        best = best_of_curve(scores[place], rewards)
        for k in range(1, N + 1):
            at_k = {family: means(found, family.format(k))[place] for family in measured}
            assert at_k["pass@{}"] == pass_at_k(N, int(rewards.sum()), k) == pytest.approx(at_k["best_of@{}/oracle"])
            assert at_k["best_of@{}/prm"] == best[k - 1]
            assert at_k["majority@{}"] == pytest.approx(majority_at_k(answers, problem.answer, k), abs=0.06)
            assert at_k["tokens@{}"] == pytest.approx(k * sampled.lengths[place].mean())


def test_scores_below_zero_weigh_no_votes_and_others_do(evaluated):
    _, greedy, sampled = evaluated
    one = np.full(sampled.rewards.shape, 0.5)
    found = stored(greedy, sampled, {"equal": one, "logits": one - 1, "knows": sampled.rewards})
    weighted = {name for name in families(found) if name.startswith("weighted")}
    assert weighted == {"weighted@{}/equal", "weighted@{}/knows"}
    for k in range(1, N + 1):
        np.testing.assert_allclose(means(found, f"weighted@{k}/equal"), means(found, f"majority@{k}"), atol=1e-12)
    assert (means(found, f"weighted@{N}/knows") >= means(found, f"majority@{N}")).all()
    np.testing.assert_allclose(means(found, f"weighted@{N}/knows"), means(found, f"pass@{N}"))


def abstains(place: int, one):
    """On every third response, right or wrong, and on all of the first problem."""
    abstained = place % 3 == 0 or one.rollout.problem_id == "test-1"
    return replace(one, reward=0.0, reason=f"{ABSTAINED}its reply has no verdict") if abstained else one


def test_responses_without_a_verdict_are_left_out_of_what_verdicts_are_counted_in(tmp_path):
    evaluation, greedy, sampled = evaluate(tmp_path, change=abstains)
    found = stored(greedy, sampled, {"prm": sampled.lengths.astype(float)})
    judged = sampled.has_verdict.sum(axis=1)
    assert judged.tolist() == [0, *[8] * 6]
    for one in (found, evaluation):
        sums, counts = one.metrics["accuracy"]
        assert counts.tolist() == judged.tolist() and sums.tolist() == sampled.rewards.sum(axis=1).tolist()
        assert one.metrics["greedy_accuracy"][1].tolist() == greedy.has_verdict[:, 0].tolist()
        assert one.metrics["pass@3"][1].tolist() == [0, *[1] * 6]
        assert one.metrics["abstained"][0].sum() == (~sampled.has_verdict).sum() + (~greedy.has_verdict).sum()
        assert one.metrics["abstained"][1].sum() == (N + 1) * len(PROBLEMS)
    for family in ("pass@{}", "majority@{}", "best_of@{}/oracle", "best_of@{}/prm"):
        assert found.metrics[family.format(8)][1].tolist() == [0, *[1] * 6]
        assert not found.has(family.format(9))
    answers = sampled.answers[1, sampled.has_verdict[1]].tolist()
    assert means(found, "majority@8")[1] == pytest.approx(majority_at_k(answers, "2", 8))
    np.testing.assert_allclose(means(found, "response_length"), sampled.lengths.mean(axis=1))  # they cost tokens
    assert "without a verdict" in table({"arm": found}, **BOOTSTRAP)


def test_a_judges_agreement_with_the_rules_is_counted_and_its_kappa_is_shown(tmp_path):
    def compared(place, one):
        end = RULES_DISAGREE if place % 5 == 0 else RULES_AGREE if place % 2 else ""
        return replace(one, reason=one.reason + end)

    _, greedy, sampled = evaluate(tmp_path, change=compared)
    found = stored(greedy, sampled)
    judge, rules = (sampled.rewards == 1)[sampled.rules >= 0], (sampled.rules == 1)[sampled.rules >= 0]
    sums, counts = found.metrics["judge_agreement"]
    assert (sums.sum(), counts.sum()) == ((judge == rules).sum(), len(judge)) and 0 < sums.sum() < counts.sum()
    pairs = [(judge & rules).sum(), (judge & ~rules).sum(), (~judge & rules).sum(), (~judge & ~rules).sum()]
    assert kappa(found) == cohen_kappa(*map(int, pairs)) < 1
    assert f"{kappa(found):.3f}" in table({"arm": found}, **BOOTSTRAP)


def test_what_does_not_fit_the_stored_responses_is_an_error(evaluated):
    _, greedy, sampled = evaluated
    base = stored(greedy, sampled)
    reverse = tuple(reversed(greedy.problems))
    with pytest.raises(UserError, match="12 responses to each problem are stored, which evaluation.samples=5 does not"):
        stored(greedy, sampled, each=5)
    with pytest.raises(UserError, match="answer different problems"):
        stored(replace(greedy, problems=reverse), sampled)
    with pytest.raises(UserError, match="one and two were evaluated on different problems"):
        differences({"one": base, "two": replace(base, problems=reverse)}, "one", **BOOTSTRAP)
    steps = [[(0.5, 2.0), (1.0,)], [(0.1, 0.2, 0.3), (0.9, 0.0)]]
    assert aggregated("prm", steps, "last").tolist() == [[2.0, 1.0], [0.3, 0.0]]
    assert aggregated("prm", steps, "min").tolist() == [[0.5, 1.0], [0.1, 0.0]]
    with pytest.raises(UserError, match="evaluation.aggregation is product.* prm "):
        aggregated("prm", steps, "product")


def test_differences_are_paired_and_adjusted_together(evaluated, tmp_path):
    _, greedy, sampled = evaluated

    def worse(place, one):
        return replace(one, reward=0.0, answer="77") if place % 4 == 0 and one.reward else one

    base, other = stored(greedy, sampled), stored(*evaluate(tmp_path, change=worse)[1:])
    found = differences({"base": base, "other": other}, "base", **BOOTSTRAP)
    compared = {"greedy_accuracy", "accuracy", "distinct_4", "entropy_sampled", f"pass@{N}", f"majority@{N}"}
    assert {one.metric for one in found} == compared and {one.arm for one in found} == {"other"}
    by_metric = {one.metric: one for one in found}
    change = means(other, "accuracy").mean() - means(base, "accuracy").mean()
    assert by_metric["accuracy"].interval.mean == pytest.approx(change) and change < 0
    assert by_metric["distinct_4"].p == 1.0
    raw = [
        mcnemar(means(other, m), means(base, m)) if m == "greedy_accuracy"
        else paired_permutation_test(means(other, m), means(base, m), seed=0)
        for m in by_metric
    ]  # fmt: skip
    np.testing.assert_allclose([one.p for one in found], holm(raw), atol=0.1)
    assert all((one.p < 0.05) <= (one.interval.high < 0) and one.detectable >= 0 for one in found)


def test_evaluations_with_other_settings_are_not_compared(evaluated):
    ours = stored(*evaluated[1:])
    for setting in ("samples", "temperature"):
        theirs = replace(ours, **{setting: 7})
        with pytest.raises(UserError, match=f"evaluation.{setting} is {getattr(ours, setting):g} in the one and 7 in"):
            differences({"ours": ours, "theirs": theirs}, "ours", **BOOTSTRAP)
    differences({"ours": ours, "older": replace(ours, samples=None)}, "ours", **BOOTSTRAP)


WEIGHTED = st.lists(
    st.tuples(st.sampled_from(["right", "a", "b", "c", None]), st.sampled_from([0.0, 0.1, 0.2, 0.7])),
    min_size=1, max_size=5,
)


def vote_of(answers, weights, places) -> float:
    """The expected score of a weighted vote, ties broken at random, from the definition."""
    totals: dict[str, float] = {}
    for place in places:
        if answers[place] is not None:
            totals[answers[place]] = totals.get(answers[place], 0.0) + weights[place]
    leaders = [answer for answer, total in totals.items() if total >= max(totals.values()) - 1e-12]
    return float("right" in leaders) / max(len(leaders), 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=7))
def test_best_of_k_is_the_mean_over_all_subsets_with_ties_averaged(pairs):
    scores, rewards = [float(s) for s, _ in pairs], [float(r) for _, r in pairs]

    def best(places) -> float:
        highest = max(scores[p] for p in places)
        tied = [rewards[p] for p in places if scores[p] == highest]
        return sum(tied) / len(tied)

    n = len(pairs)
    expected = [np.mean([best(places) for places in combinations(range(n), k)]) for k in range(1, n + 1)]
    np.testing.assert_allclose(best_of_curve(scores, rewards), expected, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(WEIGHTED)
def test_votes_over_all_circles_are_the_mean_over_all_subsets(pairs):
    answers, weights = [a for a, _ in pairs], [w for _, w in pairs]
    n, right = len(pairs), [answer == "right" for answer in answers]
    plain, weighted = (
        [np.mean([score(places) for places in combinations(range(n), k)]) for k in range(1, n + 1)]
        for score in (lambda places: expected_vote_score([answers[p] for p in places], "right"),
                      lambda places: vote_of(answers, weights, places))
    )
    circles = np.array([*permutations(range(n))])  # every order, so that the estimate is the expectation itself
    np.testing.assert_allclose(vote_curve(answers, right, circles), plain, atol=1e-12)
    np.testing.assert_allclose(vote_curve(answers, right, circles, weights), weighted, atol=1e-9)


def test_the_estimate_of_64_responses_is_within_its_error_of_the_exact_vote():
    rng = random.Random(3)
    answers = rng.choices(["right", "a", "b", "c", None, *map(str, range(20))], [9, 8, 4, 2, 3, *[1] * 20], k=64)
    circles = sample_circles(64, 4000, np.random.default_rng(0))
    curve = vote_curve(answers, [answer == "right" for answer in answers], circles)
    exact = [majority_at_k(answers, "right", k) for k in range(1, 65)]
    np.testing.assert_allclose(curve, exact, atol=0.02)
    for k in (1, 63, 64):  # every response, and every one left out, is in as many windows
        assert curve[k - 1] == pytest.approx(exact[k - 1], abs=1e-12)


NAMES = ("test-10", "test-2", "test-3")


def responses() -> list[ScoredRollout]:
    rng, found = random.Random(0), []
    for problem, sample in product(NAMES, range(SAMPLES)):
        ids = tuple(rng.choices(range(50), k=rng.randint(1, 6)))
        logprobs = tuple(-rng.randint(0, 64) / 16 for _ in ids)  # whole in float32
        right = rng.random() < 0.5
        found.append(scored(problem, sample, ids, float(right), answer="2" if right else None,
                            well_formed=sample % 2 == 0, response_logprobs=logprobs))
    return found


def read(tmp_path, written) -> Samples:
    RolloutStore(tmp_path).write(3, written)
    return read_samples(RolloutStore(tmp_path), 3)


def test_arrays_hold_what_the_records_hold_in_the_order_of_samples_and_so_do_scores_of_all_of_them(tmp_path):
    written = responses()
    samples = read(tmp_path, [*written[::2], *written[1::2]])
    direct = Samples.of_scored(written, SAMPLES)
    for name in (field.name for field in dataclasses.fields(Samples) if field.name not in ("problems", "tokens")):
        np.testing.assert_array_equal(getattr(samples, name), getattr(direct, name))
    assert samples.problems == direct.problems == NAMES  # as generated, not sorted
    names = ("rewards", "answers", "well_formed", "lengths", "logprobs")
    assert [*zip(*(getattr(samples, name).flat for name in names), strict=True)] == [
        (s.reward, s.answer, s.well_formed, len(s.rollout.response_ids), sum(s.rollout.response_logprobs))
        for s in written]
    tokens = [tuple(ids.tolist()) for ids in samples.tokens.flat]
    assert tokens == [tuple(one.rollout.response_ids) for one in written]
    assert samples.has_verdict.all() and (samples.rules == -1).all()
    assert samples.checksum == rollouts_checksum(written)
    scores = {(problem, sample): StepScores((float(place), 0.5))
              for place, (problem, sample) in enumerate(product(NAMES, range(SAMPLES)))}
    steps = samples.steps(dict(reversed(scores.items())))
    assert np.array(steps)[:, :, 0].ravel().tolist() == list(range(len(written)))
    del scores["test-2", 3]
    with pytest.raises(UserError, match="response 3 to test-2 has no score"):
        samples.steps(scores)


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
