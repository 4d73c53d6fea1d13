import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test
from sklearn.metrics import cohen_kappa_score

from nemo_edo import metrics
from nemo_edo.metrics.paired import cohen_kappa

few = settings(max_examples=20, deadline=None, derandomize=True)


def test_each_problem_is_newly_solved_lost_kept_or_unsolved_matched_by_place_or_by_id():
    changed = metrics.solved_and_lost([False, True, True, False, False], [True, False, True, False, True])
    assert changed == metrics.SolvedAndLost(newly_solved=(0, 4), lost=(1,), kept=(2,), unsolved=(3,))
    changed = metrics.solved_and_lost({"p": 0, "q": 1, "r": 1, "s": 0}, {"s": False, "q": False, "p": True, "r": True})
    assert changed == metrics.SolvedAndLost(newly_solved=("p",), lost=("q",), kept=("r",), unsolved=("s",))


@few
@given(results=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_agrees_with_scipys_binomial_test_and_does_not_know_which_run_came_first(results):
    a, b = zip(*results, strict=True)
    only_a, only_b = (sum(x > y for x, y in results), sum(y > x for x, y in results))
    expected = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert metrics.mcnemar(a, b) == pytest.approx(expected, rel=1e-12)
    assert metrics.mcnemar(a, b) == metrics.mcnemar(b, a)


@pytest.mark.parametrize("problems", [10, 60])
def test_the_permutation_test_agrees_with_scipys(problems):
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.25, size=problems), rng.normal(size=problems)
    options = {"permutation_type": "samples", "n_resamples": 20_000, "rng": np.random.default_rng(1)}
    reference = permutation_test((a, b), lambda x, y, axis: (x - y).mean(axis=axis), vectorized=True, **options).pvalue
    value = metrics.paired_permutation_test(a, b, resamples=20_000, seed=2)
    assert 0.02 < reference < 0.9
    assert value == pytest.approx(reference, abs=1e-12 if problems == 10 else 0.012)


def test_estimated_p_values_count_the_observed_pattern_and_are_fixed_by_the_seed():
    a, b = np.ones(40), np.zeros(40)
    assert metrics.paired_permutation_test(a, b, resamples=999, seed=0) == 1 / 1000
    a = np.random.default_rng(0).normal(size=40)
    first, again, other = (metrics.paired_permutation_test(a, b, resamples=99, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("test", [metrics.solved_and_lost, metrics.mcnemar, metrics.paired_permutation_test])
@pytest.mark.parametrize(("a", "b", "message"), [
    ([1, 0], [1], r"\(2,\) and \(1,\)"), ([], [], r"\(0,\) and \(0,\)"), ([[1, 0]], [[1, 0]], r"\(1, 2\)"),
    ([1, math.nan], [1, 0], "nan at problem 1"), ({"p": 1}, {"p": math.inf}, "inf at problem 'p'"),
    ({"p": 1}, [1], "mapping"), ({"p": 1, "q": 0, "r": 1}, {"p": 1}, "2 problems .*'q', 'r'"),
])
def test_results_that_do_not_pair_are_errors(test, a, b, message):
    with pytest.raises(ValueError, match=message):
        test(a, b)


def test_holm_in_closed_form():
    assert metrics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert metrics.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert metrics.holm([0.2]) == pytest.approx([0.2])
    assert metrics.holm([]).shape == (0,)


@given(st.tuples(*[st.integers(0, 30)] * 4).filter(any))
def test_kappa_is_scikit_learns_and_1_where_all_verdicts_are_the_same(counts):
    pairs = [(True, True), (True, False), (False, True), (False, False)]
    first, second = zip(*[pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)], strict=True)
    expected = 1.0 if first == second else cohen_kappa_score(first, second)
    assert cohen_kappa(*counts) == pytest.approx(expected, abs=1e-12)


def test_a_paired_interval_leaves_out_0_exactly_where_its_p_value_is_below_005():
    rng, ones, sides = np.random.default_rng(0), np.ones(30), set()
    for shift in np.linspace(0, 0.3, 60):
        a, b = np.clip(rng.normal([[0.5 + shift], [0.5]], 0.25, (2, 30)), 0, 1)
        interval, p = metrics.paired_difference(a, ones, b, ones, resamples=999, seed=1)
        assert (p < 0.05) == (not interval.low <= 0 <= interval.high) and interval.low <= interval.mean <= interval.high
        assert p == pytest.approx(metrics.paired_permutation_test(a, b), abs=0.07)
        sides.add(p < 0.05)
    assert sides == {True, False}


@pytest.mark.parametrize(("shift", "shape", "samples"), [(0, 1, 10), (0.1, 1, 10), (0.1, 0.3, 10), (0.15, 1, 1)])
def test_paired_intervals_of_thirty_problems_cover_the_difference_95_times_in_100(shift, shape, samples):
    """500 sets: of .93 and .97 a share is beyond .91 and .99 with probability .05 and .001."""
    rng, ones = np.random.default_rng(2), np.ones(30)
    chances = rng.beta(shape, shape, 10**6)
    truth, held = (np.minimum(chances + shift, 1) - chances).mean(), 0
    for place in range(500):
        chances = rng.beta(shape, shape, 30)
        a, b = (rng.binomial(samples, one) / samples for one in (np.minimum(chances + shift, 1), chances))
        interval, _ = metrics.paired_difference(a, ones, b, ones, resamples=999, seed=place)
        held += interval.low <= truth <= interval.high
    assert 0.91 <= held / 500 <= 0.985


def test_one_problem_more_or_less_is_no_difference_and_ratios_weigh_problems_by_their_counts():
    ones, one = np.ones(30), np.eye(30)[0]
    interval, p = metrics.paired_difference(one, ones, 0 * one, ones, resamples=999, seed=0)
    assert interval.low <= 0 < interval.mean < interval.high and p > 0.05
    counts = 10 * ones + 2 * one  # the changed problem has more verdicts: the others' shares are equal all the same
    right = 5 * ones + 7 * one, 5 * ones - 5 * one
    interval, p = metrics.paired_difference(right[0], counts, right[1], counts, resamples=999, seed=0)
    assert interval.low <= 0 < interval.mean < interval.high and p > 0.05
    counts = np.arange(1.0, 31.0)
    interval, _ = metrics.paired_difference(counts * 0.5, counts, ones * 0.25, ones, resamples=99, seed=0)
    assert (interval.low, interval.mean, interval.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.parametrize("different", [1, 2, 5, 6, 9])
def test_no_p_value_is_below_that_of_the_rarest_sign_pattern(different: int):
    a, b = (np.arange(40) < different) * 0.9, np.zeros(40)
    for problems in (different, 40):
        ones = np.ones(problems)
        _, p = metrics.paired_difference(a[:problems], ones, b[:problems], ones, resamples=9999, seed=0)
        assert 2 ** (1 - different) <= p <= 1.3 * max(2 ** (1 - different), 0.05 if different < 6 else 0)


def test_the_detectable_difference_is_found_with_probability_08():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5)
    least = metrics.detectable(values, level=0.01)
    samples = least + values.std(ddof=1) * rng.standard_normal((4000, 5))
    found = np.mean([metrics.mean_p_value(sample) < 0.01 for sample in samples])
    assert found == pytest.approx(0.8, abs=0.03) and math.isnan(metrics.detectable([1.0]))
