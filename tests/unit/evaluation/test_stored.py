"""Metrics computed from stored responses equal those of the evaluation that generated them; curves match theirs."""

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers import scripted_evaluation
from helpers.scripted_evaluation import PROBLEMS, ROLLOUTS, SAMPLES

from nemo_edo.errors import UserError
from nemo_edo.evaluation.samples import read_samples
from nemo_edo.evaluation.stored import aggregated, analyse, differences, families, kappa, table
from nemo_edo.metrics import majority_at_k, pass_at_k
from nemo_edo.metrics.paired import cohen_kappa, holm, mcnemar, paired_permutation_test
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.test_time.curves import best_of_curve
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE

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


def stored(greedy, sampled, scores=None, each: int = SAMPLES, seed: int = 0):
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
    with pytest.raises(UserError, match="two and one were evaluated on different problems"):
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
