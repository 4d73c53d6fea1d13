from dataclasses import replace

import pytest
import torch
from helpers.responses import scored
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.config import MicroBatchConfig
from nemo_edo.data.batching import build_batch, epoch_order, minibatches, preference_pairs, sequence_lengths
from nemo_edo.data.shares import COPIES, InputShapes, Prompts, cut, plan_micro_batches
from nemo_edo.types import ScoredRollout

PAD = 0
TOKENS = st.integers(1, 50)
SEQUENCES = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=5)), min_size=1,
                     max_size=6)


@given(SEQUENCES, st.integers(0, 4))
def test_masked_positions_predict_exactly_the_response_tokens_and_their_values(sequences, spare):
    length = max(len(prompt) + len(response) for prompt, response in sequences) + spare
    # A value that tells its token, so that a shift by one is seen.
    values = [[-float(token) for token in response] for _, response in sequences]
    batch = build_batch(sequences, pad_id=PAD, length=length, old_logprobs=values, ref_logprobs=values)
    assert batch.tokens.shape == (len(sequences), length)
    assert batch.mask.shape == (len(sequences), length - 1)
    for row, (prompt, response) in enumerate(sequences):
        predicted = batch.tokens[row, 1:]
        assert predicted[batch.mask[row] == 1].tolist() == response
        assert batch.tokens[row].tolist() == [*prompt, *response] + [PAD] * (length - len(prompt) - len(response))
    assert torch.equal(batch.old_logprobs, -batch.tokens[:, 1:] * batch.mask)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    assert {name: value.dtype for name, value in batch.tensors().items()} == {"tokens": torch.int64} | dict.fromkeys(
        ("mask", "old_logprobs", "ref_logprobs"), torch.float32), "what is not given is None"


LENGTHS = st.lists(st.integers(2, 20), min_size=1, max_size=30)


def whole_units_once(plans, ranks: int, count: int, unit: int) -> list[list[int]]:
    """The micro-batches, after a check that ranks have as many of them and that they hold every row once, by units."""
    assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1
    micro_batches = [rows for plan in plans for rows in plan if rows]
    assert sorted(row for rows in micro_batches for row in rows) == list(range(count))
    for rows in micro_batches:
        starts = rows[::unit]
        assert rows == [start + k for start in starts for k in range(unit)] and not any(s % unit for s in starts)
    return micro_batches


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.sampled_from([None, 60, 77]))
def test_a_plan_holds_every_row_once_within_its_bounds_and_keeps_units_together(lengths, ranks, unit, units, tokens):
    lengths = [length for length in lengths for _ in range(unit)]
    plans = plan_micro_batches(lengths, MicroBatchConfig(units * unit, tokens), ranks, unit=unit)
    for rows in whole_units_once(plans, ranks, len(lengths), unit):
        assert len(rows) <= units * unit
        assert tokens is None or len(rows) * max(lengths[row] for row in rows) <= tokens


def test_a_token_bound_puts_rows_of_like_length_together_which_stay_in_their_order_without():
    assert plan_micro_batches([5] * 7, MicroBatchConfig(2), 2) == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    lengths = [2, 9, 3, 10]
    assert plan_micro_batches(lengths, MicroBatchConfig(4, 20), 1) == [[[3, 1], [2, 0]]]
    batch = build_batch([([1], [1] * (length - 1)) for length in lengths], pad_id=PAD)
    for how, shapes, padding in ((MicroBatchConfig(4, 20), [(2, 9), (2, 2)], 1 - 20 / 22),
                                 (MicroBatchConfig(4), [(4, 9)], 1 - 20 / 36),
                                 (MicroBatchConfig(1, 24, packing=True), [(1, 20)], 0)):  # fmt: skip
        [share] = cut(batch, how, 1, InputShapes())
        assert share.shapes == shapes and share.padding_share == pytest.approx(padding)


@given(LENGTHS, st.sampled_from([(1, 1), (2, 1), (4, 4), (16, 1), (32, 8)]))
def test_a_pack_of_as_many_tokens_as_the_longest_row_has_room_for_it_in_every_layout(lengths, multiples):
    multiple, sequence = multiples
    batch = build_batch([([1], [1] * (length - 1)) for length in lengths], pad_id=PAD)
    how, required = MicroBatchConfig(1, max(lengths), packing=True), InputShapes(multiple=multiple, sequence=sequence)
    [share] = cut(batch, how, 1, required)
    assert sorted(row for rows in share.micro_batches for row in rows) == list(range(len(lengths)))
    assert all(length < max(lengths) + multiple + sequence for _, length in share.shapes)
    with pytest.raises(ValueError, match="exceed"):
        cut(batch, MicroBatchConfig(1, max(lengths) - 1, packing=True), 1, required)


@given(LENGTHS, st.integers(1, 4), st.integers(20, 100))
def test_packs_hold_every_row_once_differ_by_no_more_than_a_row_and_are_at_most_twice_as_many_as_could_do(
        lengths, ranks, tokens):
    plans = plan_micro_batches(lengths, MicroBatchConfig(1, tokens, packing=True), ranks)
    assert plans == plan_micro_batches(lengths, MicroBatchConfig(9, tokens, packing=True), ranks)
    whole_units_once(plans, ranks, len(lengths), unit=1)
    loads = [[sum(lengths[row] for row in rows) for rows in plan] for plan in plans]
    packs = [load for rank in loads for load in rank]
    assert max(packs) <= tokens and max(packs) - min(packs) <= max(lengths)
    assert max(map(sum, loads)) - min(map(sum, loads)) <= max(lengths)
    # A count that did not do left every pack more than half full.
    assert len(packs) < 2 * sum(lengths) / tokens + 2 * ranks


@given(SEQUENCES.filter(lambda sequences: max(len(p) + len(r) for p, r in sequences) > 1))
def test_the_length_of_a_row_reaches_to_its_last_response_token(sequences):
    batch = build_batch(sequences, pad_id=PAD)
    responses = [(len(prompt) + len(response)) if response else 2 for prompt, response in sequences]
    assert sequence_lengths(batch) == responses


def test_epoch_order_is_a_permutation_that_seed_and_epoch_determine():
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(12) for epoch in range(12)]
    assert len(set(orders)) == 144 and all(sorted(order) == list(range(100)) for order in orders)
    assert orders[14] == tuple(epoch_order(100, 1, 2))
    assert [sorted(epoch_order(count, 0, 0)) for count in (0, 1, 2)] == [[], [0], [0, 1]]


@given(st.lists(st.integers()), st.integers(1, 10))
def test_minibatches_keep_the_order_and_only_the_last_is_smaller(order, size):
    pieces = minibatches(order, size)
    assert [item for piece in pieces for item in piece] == order
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


def test_rows_share_a_prompt_where_all_its_tokens_are_the_same_and_each_further_row_in_a_run_saves_it():
    """The prompt's last token is not shared: from it a response's own first token is predicted."""
    batch = build_batch([([5, 6, 7], [8]), ([5, 6, 9], [8]), ([5, 6, 7], [1, 2]), ([5, 6], [7, 8])], pad_id=0)
    padded = batch.with_fields(tokens=torch.cat([batch.tokens, torch.zeros(4, 3, dtype=torch.int64)], dim=1))
    assert Prompts.of(padded) == Prompts.of(batch) == Prompts([2, 2, 2, 1], [0, 1, 0, 2])
    prompts = Prompts([2, 2, 2, 4, 4, 2], [0, 0, 0, 1, 1, 0])
    assert [prompts.saved(rows) for rows in (range(6), [0, 5, 3], [])] == [2 + 2 + 4, 2, 0]
    assert Prompts.none(3).saved(range(3)) == 0


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
GROUPS = st.lists(st.tuples(st.integers(1, 9), SIZES), min_size=1, max_size=6)
"""For each prompt its length, and those of its responses."""


@given(GROUPS, st.integers(1, 3), st.integers(0, 80), st.sampled_from([1, 2]), st.randoms())
def test_packs_that_share_hold_every_row_once_within_their_tokens_and_their_copies(groups, ranks, spare, unit, random):
    sampled = [(prompt, [number] * size, size) for number, (prompt, sizes) in enumerate(groups) for size in sizes
             for _ in range(unit)]
    units = [sampled[start : start + unit] for start in range(0, len(sampled), unit)]
    random.shuffle(units)
    rows = [row for rows in units for row in rows]
    lengths = [prompt + size for prompt, _, size in rows]
    prompts = Prompts([prompt - 1 for prompt, *_ in rows], [number[0] for _, number, _ in rows])
    tokens = max(unit * length for length in lengths) + spare
    plans = plan_micro_batches(lengths, MicroBatchConfig(1, tokens, packing=True), ranks, unit=unit, prompts=prompts)
    for pack in whole_units_once(plans, ranks, len(rows), unit):
        assert sum(lengths[row] for row in pack) - prompts.saved(pack) <= tokens
        assert sum(lengths[row] for row in pack) <= COPIES * tokens


@pytest.mark.parametrize(("groups", "ranks", "expected"), [
    ([0, 1, 0, 1], 1, [[[0, 2, 1, 3]]]),
    ([0] * 4, 2, [[[0, 1]], [[2, 3]]]),  # otherwise a rank would have nothing to do
])
def test_rows_of_a_prompt_come_together_unless_ranks_need_them(groups, ranks: int, expected):
    plans = plan_micro_batches([5] * 4, MicroBatchConfig(1, 100, True), ranks, prompts=Prompts([3] * 4, groups))
    assert plans == expected


REWARDS = st.lists(st.sampled_from([0.0, 1.0]), max_size=12)


def group(rewards) -> list[ScoredRollout]:
    return [scored("p-1", sample, reward=reward) for sample, reward in enumerate(rewards)]


def keys(pairs) -> list[tuple[int, int]]:
    return [(pair.chosen.rollout.sample_index, pair.rejected.rollout.sample_index) for pair in pairs]


@given(REWARDS, st.integers(1, 50), st.integers(0, 5))
def test_pairs_are_distinct_of_a_right_and_a_wrong_response_and_use_each_before_the_larger_set_begins_anew(
        rewards, count, seed):
    right, wrong = rewards.count(1), rewards.count(0)
    pairs, each_once, everyone = (
        preference_pairs(group(rewards), number, seed) for number in (count, max(right, wrong), 10**6))
    assert (len(pairs), len(everyone)) == (min(count, right * wrong), right * wrong)
    assert len(set(keys(pairs))) == len(pairs)
    assert all((pair.chosen.reward, pair.rejected.reward) == (1, 0) for pair in pairs)
    if right and wrong:
        assert {sample for pair in keys(each_once) for sample in pair} == set(range(len(rewards)))


def test_the_seed_fixes_the_pairs_and_another_gives_others():
    responses = group([1, 0, 1, 0, 0, 1, 0, 1])
    found = [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert found == [keys(preference_pairs(responses, 4, seed)) for seed in range(8)]
    assert len({tuple(pairs) for pairs in found}) > 4


def test_graded_rewards_pair_successes_with_failures():
    graded = [replace(one, success_at=0.7) for one in group([0.7, 0.6, -3.0, 2.0])]
    found = {(pair.chosen.reward, pair.rejected.reward) for pair in preference_pairs(graded, 4, 0)}
    assert found == {(0.7, 0.6), (0.7, -3.0), (2.0, 0.6), (2.0, -3.0)}
