from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from nemo_edo.metrics.agreement import cohen_kappa

COUNTS = st.tuples(*[st.integers(0, 30)] * 4)


@given(COUNTS.filter(lambda counts: len([count for count in counts if count]) > 1))
def test_kappa_is_scikit_learns(counts):
    pairs = [(True, True), (True, False), (False, True), (False, False)]
    first, second = zip(*[pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)], strict=True)
    assert cohen_kappa(*counts) == pytest.approx(cohen_kappa_score(first, second), abs=1e-12)


@given(COUNTS.filter(any))
def test_kappa_is_symmetric_and_blind_to_what_is_called_yes(counts):
    both, only_first, only_second, neither = counts
    assert cohen_kappa(both, only_second, only_first, neither) == pytest.approx(cohen_kappa(*counts))
    assert cohen_kappa(neither, only_first, only_second, both) == pytest.approx(cohen_kappa(*counts))


def test_agreement_on_one_and_the_same_verdict_is_full():
    assert cohen_kappa(7, 0, 0, 0) == cohen_kappa(0, 0, 0, 3) == 1.0


def test_agreement_by_chance_alone_is_none():
    assert cohen_kappa(25, 25, 25, 25) == 0.0
    assert cohen_kappa(0, 5, 5, 0) == -1.0


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (-1, 2, 3, 4), (1.5, 2, 3, 4)])
def test_counts_of_nothing_are_refused(counts):
    with pytest.raises(ValueError, match="count"):
        cohen_kappa(*counts)
