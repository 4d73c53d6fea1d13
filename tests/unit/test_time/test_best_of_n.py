import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import best_of_n

few = settings(max_examples=20, deadline=None, derandomize=True)
score_lists = st.lists(st.integers(-5, 5), min_size=1, max_size=9)


@few
@given(scores=score_lists)
def test_the_best_is_the_first_of_the_highest_scores_whatever_increasing_transform_they_have(scores):
    for transform in (float, math.exp, math.atan, lambda score: 3 * score - 7, lambda score: score**3):
        assert best_of_n(range(len(scores)), [transform(score) for score in scores]) == np.argmax(scores)


def test_each_aggregation_chooses_by_its_own_statistic():
    steps = {"last": [0.3, 0.3, 0.95], "min": [0.6, 0.6, 0.6], "product": [0.5], "mean": [0.9, 0.5, 0.9]}
    chosen = {how: best_of_n(list(steps), list(steps.values()), aggregation=how) for how in steps}
    assert chosen == {"last": "last", "min": "min", "product": "product", "mean": "mean"}


@pytest.mark.parametrize(("candidates", "scores", "aggregation", "message"), [
    ("", [], None, "candidates is empty"), ("ab", [1.0], None, "1 scores for 2 candidates"),
    ("ab", torch.ones(2, 2), None, r"scores\[0\].*a number"), ("ab", [[1.0], 2.0], "min", r"scores\[1\].*steps"),
    ("a", [[1.5]], "product", r"\[0, 1\]"), ("a", [[-0.5, -0.5]], "product", r"\[0, 1\]"),
])
def test_scores_that_do_not_fit_are_errors(candidates, scores, aggregation, message):
    with pytest.raises(ValueError, match=message):
        best_of_n(candidates, scores, aggregation=aggregation)
