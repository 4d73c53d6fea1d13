"""What the model sees of rows that share prompts, and what attention does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.batching import build_batch, sequence_lengths
from nemo_edo.data.packs import Prompts
from nemo_edo.megatron.shared_prompts import shared_inputs


@pytest.fixture
def micro():
    """Three rows with one prompt, and one with another."""
    return build_batch([([5, 6, 7], [1, 2]), ([5, 6, 7], [3]), ([5, 6, 7], [4, 4, 4]), ([8, 9], [2, 2])], pad_id=0)


def inputs_of(micro, length: int):
    return shared_inputs(micro, sequence_lengths(micro), Prompts.of(micro), (1, length))


def test_a_prompt_stands_once_in_front_of_what_its_rows_do_not_share(micro):
    inputs = inputs_of(micro, 11)
    assert inputs.tokens.tolist() == [[5, 6, 7, 1, 7, 7, 4, 4, 8, 9, 2]]
    assert inputs.targets.tolist() == [[6, 7, 1, 2, 3, 4, 4, 4, 9, 2, 2]]
    assert inputs.positions.tolist() == [[0, 1, 2, 3, 2, 2, 3, 4, 0, 1, 2]]
    assert inputs.packed.max_seqlen_q == 5


@pytest.mark.parametrize("length", [11, 16])
def test_values_go_back_to_the_rows_and_gradients_of_shared_ones_add_up(micro, length):
    inputs = inputs_of(micro, length)
    assert torch.equal(inputs.to_rows(inputs.targets), micro.tokens[:, 1:] * inputs.kept)
    values = torch.zeros(1, length, requires_grad=True)
    (inputs.to_rows(values) * torch.tensor([[1.0, 2, 3, 4, 0], [10, 20, 30, 0, 0], [5, 6, 7, 8, 9], [1, 1, 1, 0, 0]])
     ).sum().backward()
    assert values.grad.tolist() == [[16, 28, 3, 4, 30, 7, 8, 9, 1, 1, 1] + [0] * (length - 11)]


def test_attention_has_blocks_of_sequences_of_like_length():
    lengths = [20, 4, 19, 5, 20]
    micro = build_batch([([1, 2], [3] * (length - 2)) for length in lengths], pad_id=0)
    assert inputs_of(micro, 68 - 5 - 4).packed.blocks == ((3, 19), (2, 4))


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=8)
"""For each row its prompt, and the length of its response."""


@given(ROWS, st.integers(0, 5))
def test_what_attention_sees_are_the_rows_and_what_it_gives_comes_back_with_its_gradient(rows, spare):
    """Against indexing by autograd; tokens of no row give zeros and have no gradient."""
    rows = sorted(rows)
    micro = build_batch([(range(9, 10 + 2 * prompt), [20 + k for k in range(size)]) for prompt, size in rows], pad_id=0)
    lengths, prompts = sequence_lengths(micro), Prompts.of(micro)
    used = sum(lengths) - len(rows) - prompts.saved(range(len(rows)))
    inputs = shared_inputs(micro, lengths, prompts, (1, used + spare))
    pack = inputs.packed
    values = torch.randn(used + spare, 2, requires_grad=True)
    blocks = pack.spread(values)
    order = sorted(range(len(rows)), key=lambda row: -lengths[row])
    found = [block[row] for block in blocks for row in range(len(block))]
    total = 0
    for place, row in enumerate(order):
        count = lengths[row] - 1
        assert torch.equal(found[place][:count], values[inputs.places[row, :count]])
        weights = torch.arange(1.0, 2 * count + 1).view(count, 2)
        total = total + (found[place][:count] * weights).sum()
    (gradient,) = torch.autograd.grad(total, values, retain_graph=True)
    expected = torch.zeros_like(values)
    for row in order:
        count = lengths[row] - 1
        expected.index_add_(0, inputs.places[row, :count], torch.arange(1.0, 2 * count + 1).view(count, 2))
    torch.testing.assert_close(gradient, expected)
    back = pack.gather([block * 3 for block in blocks])
    torch.testing.assert_close(back[:used], 3 * values[:used])
    assert not back[used:].any()
    (gradient,) = torch.autograd.grad(back.sum(), values)
    torch.testing.assert_close(gradient[:used], torch.full((used, 2), 3.0))
    assert not gradient[used:].any()
