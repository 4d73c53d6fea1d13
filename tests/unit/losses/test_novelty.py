from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import NgramPaths, novelty_advantages, redundancy_shares

few = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def labelled_groups(draw):
    """Paths, correctness and ids of up to 3 groups of 1 to 7 responses, shuffled."""
    ids = draw(st.lists(st.integers(-100, 100), min_size=1, max_size=3, unique=True))
    rows = draw(st.permutations([group for group in ids for _ in range(draw(st.integers(1, 7)))]))
    size = len(rows)
    paths = draw(st.lists(st.sampled_from(["p", "q", None, (1, 2)]), min_size=size, max_size=size))
    correct = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return paths, torch.tensor(correct), torch.tensor(rows)


@few
@given(data=labelled_groups())
def test_the_share_is_that_of_the_other_correct_responses_on_the_same_path(data):
    paths, correct, ids = data
    found = redundancy_shares(paths, correct.double(), ids)
    for i, share in enumerate(found.tolist()):
        others = [j for j in range(len(ids)) if j != i and ids[j] == ids[i] and correct[j]]
        same = [j for j in others if paths[j] == paths[i]]
        assert share == (len(same) / len(others) if correct[i] and others else 0.0)


@few
@given(data=labelled_groups(), strength=st.floats(0, 3), seed=st.integers(0, 99))
def test_novelty_moves_advantage_between_correct_responses_and_keeps_each_groups_total(data, strength, seed):
    paths, correct, ids = data
    before = torch.randn(len(ids), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before *= seed % 2  # of zeros any rounding shows
    shares = redundancy_shares(paths, correct.double(), ids)
    after = novelty_advantages(before, shares, correct, ids, strength=strength)
    assert torch.equal(after[~correct], before[~correct])
    for group in ids.unique():
        right = (ids == group) & correct
        assert (after - before)[right].sum().item() == pytest.approx(0, abs=1e-12)
        if strength == 0 or len(shares[right].unique()) < 2:  # equally redundant
            assert torch.equal(after[ids == group], before[ids == group])
        else:
            expected = before[right] - strength * (shares[right] - shares[right].mean())
            torch.testing.assert_close(after[right], expected, rtol=1e-12, atol=1e-12)
    assert novelty_advantages(before.bfloat16(), shares, correct, ids, strength=strength).dtype == torch.bfloat16


@few
@given(texts=st.lists(st.lists(st.sampled_from("abc"), max_size=7).map(" ".join), max_size=8), n=st.integers(1, 4),
       threshold=st.sampled_from([0.2, 0.5, 1.0]))
def test_paths_are_the_connected_components_of_the_links(texts, n, threshold):
    def grams(text):
        found = text.split()
        return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)} or {tuple(found)}

    linked = defaultdict(set)
    for i, first in enumerate(texts):
        for j, second in enumerate(texts):
            a, b = grams(first), grams(second)
            if len(a & b) >= threshold * len(a | b):
                linked[i].add(j)
    paths = NgramPaths(n=n, threshold=threshold)("", texts)
    for i in range(len(texts)):
        reached, todo = {i}, [i]
        while todo:
            new = linked[todo.pop()] - reached
            reached |= new
            todo += new
        assert {j for j in range(len(texts)) if paths[j] == paths[i]} == reached
