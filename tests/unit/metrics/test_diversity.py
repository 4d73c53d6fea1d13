import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_counts, distinct_n, pooled_distinct, self_bleu

few = settings(max_examples=40, deadline=None, derandomize=True)


def test_pooled_distinct_is_that_of_all_samples_and_a_groups_part_what_goes_with_it():
    rng = np.random.default_rng(0)
    groups = [[rng.integers(0, 4, size=rng.integers(0, 12)).tolist() for _ in range(3)] for _ in range(8)]
    sums, counts = pooled_distinct(groups, n=3)
    distinct, total = distinct_counts(sum(groups, []), 3)
    assert (sums.sum(), counts.sum()) == (pytest.approx(distinct), total)
    alone = [distinct - distinct_counts(sum((g for g in groups if g is not group), []), 3)[0] for group in groups]
    np.testing.assert_allclose(sums, np.array(alone) + (distinct - sum(alone)) / len(groups))
    assert [values.tolist() for values in pooled_distinct([[[1, 2]], []], n=3)] == [[0.0, 0.0], [0.0, 0.0]]


@few
@given(data=st.data(), n=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 20]))
def test_counts_of_texts_and_of_ids_of_any_width_agree_with_sets_of_tuples(data, n):
    low, high = data.draw(
        st.sampled_from([(0, 1), (-3, 3), (0, 151_999), (0, 2**31), (-(2**40), 2**40), (-(2**63), 2**63 - 1)])
    )
    pool = [*data.draw(st.lists(st.integers(low, high), min_size=1, max_size=20)), low, high]
    corpus = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=30), max_size=6))
    ngrams = [tuple(y[i : i + n]) for y in corpus for i in range(len(y) - n + 1)]
    texts, counts = ("  ".join(map(str, y)) + "\n" for y in corpus), (len(set(ngrams)), len(ngrams))
    assert distinct_counts(corpus, n) == distinct_counts(texts, n) == counts
    assert distinct_n(corpus, n) == (counts[0] / counts[1] if ngrams else 0.0)


@pytest.mark.parametrize(("samples", "message"), [
    (["a b", [1, 2]], r"samples mix texts and token ids: sample 1 is \[1, 2\]"),
    ("one text", "samples are one text, 'one text'"), ([1, 2, 3], "sample 0 is 1, expected a text or a one-dim"),
    ([torch.ones(3, dtype=torch.bfloat16)], "sample 0 is"), ([torch.ones(2, 2, dtype=torch.long)], "sample 0 is"),
    ([[2**63]], "sample 0 is"), ([[2**64]], "sample 0 is"), ([None], "sample 0 is None"), ([b"bytes"], "sample 0 is"),
])
def test_samples_that_are_neither_all_texts_nor_all_token_ids_are_errors(samples, message):
    with pytest.raises(ValueError, match=message):
        distinct_counts(samples, 1)


@pytest.mark.parametrize(("texts", "n", "value"), [
    (["a b c", "a b c"], 2, 1.0), (["a b", "c d"], 2, 0.0), (["", ""], 4, 0.0),
    (["a b c d", "a b x y"], 2, math.sqrt(2 / 4 * 1 / 3)),
    (["a b c d", "a x b y"], 2, math.sqrt(2 / 4 * 0.1 / 3)),  # no pair matches: 0.1 of one
    (["a b", "a b c d"], 1, (math.exp(1 - 4 / 2) + 2 / 4) / 2),  # the first is shorter than its reference
    (["a", "a"], 4, 1.0),  # of the orders that it has
])
def test_self_bleu_in_closed_form(texts, n, value):
    assert self_bleu(texts, n) == pytest.approx(value, abs=1e-12)


votes = st.lists(st.sampled_from(["1", "2", "3", 4, None]), max_size=12)


@few
@given(answers=votes)
def test_answer_entropy_agrees_with_scipy_and_is_in_zero_to_the_log_of_the_distinct_answers(answers):
    given_answers = [answer for answer in answers if answer is not None]
    shares = [given_answers.count(answer) for answer in set(given_answers)]
    value = answer_entropy(answers)
    assert value == pytest.approx(entropy(shares) if shares else 0.0, abs=1e-14)
    assert 0 <= value <= math.log(max(len(shares), 1)) + 1e-14
    assert distinct_answers(answers) == len(shares)
