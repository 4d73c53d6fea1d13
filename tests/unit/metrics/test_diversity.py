import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from nemo_edo import metrics

few = settings(max_examples=40, deadline=None, derandomize=True)


def test_pooled_distinct_is_that_of_all_samples_and_a_groups_part_what_goes_with_it():
    rng = np.random.default_rng(0)
    groups = [[rng.integers(0, 4, size=rng.integers(0, 12)).tolist() for _ in range(3)] for _ in range(8)]
    sums, counts = metrics.pooled_distinct(groups, n=3)
    distinct, total = metrics.distinct_counts(sum(groups, []), 3)
    assert (sums.sum(), counts.sum()) == (pytest.approx(distinct), total)
    alone = [distinct - metrics.distinct_counts(sum((other for other in groups if other is not group), []), 3)[0]
             for group in groups]
    np.testing.assert_allclose(sums, np.array(alone) + (distinct - sum(alone)) / len(groups))
    assert [values.tolist() for values in metrics.pooled_distinct([[[1, 2]], []], n=3)] == [[0.0, 0.0], [0.0, 0.0]]


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
    assert metrics.distinct_counts(corpus, n) == metrics.distinct_counts(texts, n) == counts
    assert metrics.distinct_n(corpus, n) == (counts[0] / counts[1] if ngrams else 0.0)


@pytest.mark.parametrize(("samples", "message"), [
    (["a b", [1, 2]], r"samples mix texts and token ids: sample 1 is \[1, 2\]"),
    ("one text", "samples are one text, 'one text'"), ([1, 2, 3], "sample 0 is 1, expected a text or a one-dim"),
    ([torch.ones(3, dtype=torch.bfloat16)], "sample 0 is"), ([[2**63]], "sample 0 is"), ([None], "sample 0 is None"),
])
def test_samples_that_are_neither_all_texts_nor_all_token_ids_are_errors(samples, message):
    with pytest.raises(ValueError, match=message):
        metrics.distinct_counts(samples, 1)


@pytest.mark.parametrize(("texts", "n", "value"), [
    (["a b", "c d"], 2, 0.0), (["", ""], 4, 0.0),
    (["a b c d", "a b x y"], 2, math.sqrt(2 / 4 * 1 / 3)),
    (["a b c d", "a x b y"], 2, math.sqrt(2 / 4 * 0.1 / 3)),  # no pair matches: 0.1 of one
    (["a b", "a b c d"], 1, (math.exp(1 - 4 / 2) + 2 / 4) / 2),  # the first is shorter than its reference
    (["a", "a"], 4, 1.0),  # of the orders that it has
])
def test_self_bleu_in_closed_form(texts, n, value):
    assert metrics.self_bleu(texts, n) == pytest.approx(value, abs=1e-12)


@few
@given(answers=st.lists(st.sampled_from(["1", "2", "3", 4, None]), max_size=12))
def test_answer_entropy_agrees_with_scipy_and_is_in_zero_to_the_log_of_the_distinct_answers(answers):
    given_answers = [answer for answer in answers if answer is not None]
    shares = [given_answers.count(answer) for answer in set(given_answers)]
    value = metrics.answer_entropy(answers)
    assert value == pytest.approx(entropy(shares) if shares else 0.0, abs=1e-14)
    assert 0 <= value <= math.log(max(len(shares), 1)) + 1e-14
    assert metrics.distinct_answers(answers) == len(shares)


def test_the_entropy_and_its_gradient_are_those_of_the_dense_formula_where_outcomes_are_impossible_too():
    logits = 3 * torch.randn(4, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 1:] = -torch.inf
    logits[0, 1, 3] = -torch.inf
    weights = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) - 3
    own, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_p = (reference.clamp(min=-1e4) / 0.7).log_softmax(dim=-1)
    found, expected = metrics.entropy_from_logits(own, temperature=0.7), -(log_p.exp() * log_p).sum(dim=-1)
    for entropies in (found, expected):
        (weights * entropies).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own.grad, reference.grad, rtol=1e-12, atol=1e-12)
    assert found[0, 0] == 0


def test_bfloat16_logits_of_a_real_vocabulary_are_exact_to_a_millionth():
    scales = torch.tensor([[0.01], [1.0], [3.0], [10.0]])
    logits = (scales * torch.randn(4, 152_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    entropies, log_p = metrics.entropy_from_logits(logits).double(), logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(entropies, -(log_p.exp() * log_p).sum(dim=-1), rtol=0, atol=1e-6)
    assert (entropies >= 0).all() and (entropies <= math.log(152_000) + 1e-6).all()


@pytest.mark.parametrize(("logits", "message"), [
    (torch.full((2, 3), -torch.inf), "logits hold nothing but -inf; 2 of 2 positions"),
    (torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), "logits hold NaN; 1 of 2 positions"),
    (torch.tensor([0.0, torch.inf]), r"logits hold \+inf; 1 of 1 positions"),
    (torch.zeros(2, 0), r"logits are torch.float32 of shape \(2, 0\)"),
    (torch.zeros(2, 3, dtype=torch.long), "logits are torch.int64"),
])
def test_logits_without_a_distribution_are_errors(logits, message):
    with pytest.raises(ValueError, match=message):
        metrics.entropy_from_logits(logits)
