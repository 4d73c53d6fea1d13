"""Which rows are packed together, and which prompts they share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.batching import build_batch
from nemo_edo.data.shares import COPIES, Prompts, plan_micro_batches


def test_rows_share_a_prompt_where_all_its_tokens_are_the_same():
    """The prompt's last token is not shared: from it a response's own first token is predicted."""
    batch = build_batch([([5, 6, 7], [8]), ([5, 6, 9], [8]), ([5, 6, 7], [1, 2]), ([5, 6], [7, 8])], pad_id=0)
    padded = batch.with_fields(tokens=torch.cat([batch.tokens, torch.zeros(4, 3, dtype=torch.int64)], dim=1))
    assert Prompts.of(padded) == Prompts.of(batch) == Prompts([2, 2, 2, 1], [0, 1, 0, 2])


def test_what_is_saved_is_each_further_rows_prompt_within_a_run():
    prompts = Prompts([2, 2, 2, 4, 4, 2], [0, 0, 0, 1, 1, 0])
    assert prompts.saved(range(6)) == 2 + 2 + 4
    assert prompts.saved([0, 5, 3]) == 2
    assert prompts.saved([]) == Prompts.none(3).saved(range(3)) == 0


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
    plans = plan_micro_batches(
        lengths, ranks=ranks, rows=1, tokens=tokens, unit=unit, packing=True, prompts=prompts
    )
    assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1
    packs = [pack for plan in plans for pack in plan]
    assert sorted(row for pack in packs for row in pack) == list(range(len(rows)))
    for pack in packs:
        assert sum(lengths[row] for row in pack) - prompts.saved(pack) <= tokens
        assert sum(lengths[row] for row in pack) <= COPIES * tokens
        assert pack == [start + k for start in pack[::unit] for k in range(unit)]


@pytest.mark.parametrize(("groups", "ranks", "expected"), [
    ([0, 1, 0, 1], 1, [[[0, 2, 1, 3]]]),
    ([0] * 4, 2, [[[0, 1]], [[2, 3]]]),  # otherwise a rank would have nothing to do
])
def test_rows_of_a_prompt_come_together_unless_ranks_need_them(groups, ranks: int, expected):
    plans = plan_micro_batches([5] * 4, ranks=ranks, rows=1, tokens=100, packing=True, prompts=Prompts([3] * 4, groups))
    assert plans == expected


def test_a_long_prompt_is_stored_again_before_its_copies_take_too_much_room():
    """Twelve rows of 11 tokens, of which 10 are shared: 22 tokens, but 132 of them in attention."""
    prompts = Prompts([10] * 12, [0] * 12)
    plan = plan_micro_batches([11] * 12, ranks=1, rows=1, tokens=22, packing=True, prompts=prompts)
    assert sorted(len(pack) for pack in plan[0]) == [4, 8]
