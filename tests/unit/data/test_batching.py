import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.batching import build_batch, epoch_order, minibatches, pad_rows

PAD = 0
TOKENS = st.integers(1, 50)
SEQUENCES = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=5)), min_size=1,
                     max_size=6)


def test_batch_of_known_sequences():
    batch = build_batch(
        [([5, 6], [7, 8, 9]), ([5], [4])], pad_id=PAD, advantages=[1.0, -0.5],
        old_logprobs=[[-0.1, -0.2, -0.3], [-0.4]], ref_logprobs=[[-1.0, -2.0, -3.0], [-4.0]],
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [5, 4, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.advantages.tolist() == [1.0, -0.5]
    torch.testing.assert_close(batch.old_logprobs, torch.tensor([[0, -0.1, -0.2, -0.3], [-0.4, 0, 0, 0]]))
    assert batch.ref_logprobs.tolist() == [[0, -1, -2, -3], [-4, 0, 0, 0]]
    assert {name: value.dtype for name, value in batch.tensors().items()} == {
        "tokens": torch.int64, "mask": torch.float32, "advantages": torch.float32,
        "old_logprobs": torch.float32, "ref_logprobs": torch.float32,
    }


@given(SEQUENCES, st.integers(0, 4))
def test_masked_positions_predict_exactly_the_response_tokens_and_their_values(sequences, spare):
    length = max(len(prompt) + len(response) for prompt, response in sequences) + spare
    # A value that tells its token, so that a shift by one is seen.
    values = [[-float(token) for token in response] for _, response in sequences]
    batch = build_batch(sequences, pad_id=PAD, length=length, old_logprobs=values)
    assert batch.tokens.shape == (len(sequences), length)
    assert batch.mask.shape == (len(sequences), length - 1)
    for row, (prompt, response) in enumerate(sequences):
        predicted = batch.tokens[row, 1:]
        assert predicted[batch.mask[row] == 1].tolist() == response
        assert batch.tokens[row].tolist() == [*prompt, *response] + [PAD] * (length - len(prompt) - len(response))
    assert torch.equal(batch.old_logprobs, -batch.tokens[:, 1:] * batch.mask)


def test_fields_that_are_not_given_are_none():
    batch = build_batch([([1], [2])], pad_id=PAD)
    assert set(batch.tensors()) == {"tokens", "mask"}


@pytest.mark.parametrize(("arguments", "message"), [
    ({"sequences": []}, "no sequences"),
    ({"sequences": [([], [1])]}, "sequence 0 has an empty prompt"),
    ({"length": 2}, "longest sequence has 3 tokens, expected at most length = 2"),
    ({"advantages": [1.0]}, "1 advantages for 2 responses"),
    ({"old_logprobs": [[-1.0], [-1.0]]}, "sequence 0 has 1 values for 2 response tokens"),
    ({"ref_logprobs": [[-1.0, -1.0]]}, "zip"),
])
def test_sequences_and_values_that_do_not_match_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_batch(**{"sequences": [([1], [2, 3]), ([1], [2])], "pad_id": PAD} | arguments)


@given(SEQUENCES, st.integers(1, 5))
def test_padded_rows_reach_the_multiple_and_count_nowhere(sequences, multiple):
    values = [[-1.0] * len(response) for _, response in sequences]
    batch = build_batch(sequences, pad_id=7, advantages=[2.0] * len(sequences), old_logprobs=values)
    padded = pad_rows(batch, multiple, pad_id=7)
    assert padded.size % multiple == 0
    assert 0 <= padded.size - batch.size < multiple
    for name, value in batch.tensors().items():
        assert torch.equal(padded.tensors()[name][: batch.size], value)
        added = padded.tensors()[name][batch.size :]
        assert added.dtype == value.dtype
        assert (added == (7 if name == "tokens" else 0)).all()


@given(st.integers(0, 200), st.integers(0, 5), st.integers(0, 5))
def test_epoch_order_is_a_permutation_that_seed_and_epoch_fix(num_items, seed, epoch):
    order = epoch_order(num_items, seed, epoch)
    assert sorted(order) == list(range(num_items))
    assert order == epoch_order(num_items, seed, epoch)


def test_other_seeds_and_epochs_give_other_orders():
    orders = {tuple(epoch_order(100, seed, epoch)) for seed in range(12) for epoch in range(12)}
    assert len(orders) == 144


@given(st.lists(st.integers()), st.integers(1, 10))
def test_minibatches_keep_the_order_and_only_the_last_is_smaller(order, size):
    pieces = minibatches(order, size)
    assert [item for piece in pieces for item in piece] == order
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


def test_minibatch_size_below_one_is_an_error():
    with pytest.raises(ValueError, match="minibatch size is 0"):
        minibatches([1], 0)
