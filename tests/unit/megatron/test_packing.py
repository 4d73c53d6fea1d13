"""What the model and its attention see of a micro-batch: shapes, packs, and rows that share prompts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_edo.data.batching import build_batch, sequence_lengths
from nemo_edo.data.shares import Prompts
from nemo_edo.megatron import packing
from nemo_edo.megatron.packing import InputShapes, input_shapes, packed_inputs
from nemo_edo.megatron.shared_prompts import shared_inputs


def config(**fields) -> SimpleNamespace:
    plain = {
        "tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1, "fp8": None,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "fp8_recipe": "tensorwise",
    }
    return SimpleNamespace(**{**plain, **fields})


TP4_SP = {"tensor_model_parallel_size": 4, "sequence_parallel": True}


@pytest.mark.parametrize(("fields", "multiple"), [
    (TP4_SP, 4),
    ({"context_parallel_size": 3}, 6),
    (TP4_SP | {"context_parallel_size": 2}, 8),
    ({"fp8": "hybrid"}, 16),
    (TP4_SP | {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 128),
    ({"fp8": "hybrid", "context_parallel_size": 2}, 32),
    (TP4_SP | {"fp8": "e4m3", "fp8_recipe": "blockwise"}, 512),  # each rank's tokens are gathered in blocks of 128
])
def test_every_rank_gets_whole_shares_of_a_sequence(fields, multiple):
    assert input_shapes(config(**fields)).multiple == multiple


def test_lengths_are_rounded_up_and_interleaved_stages_exchange_tensors_of_one_shape():
    assert InputShapes(multiple=4).fit([(2, 8), (3, 9)]) == [(2, 8), (3, 12)]
    shapes = input_shapes(config(pipeline_model_parallel_size=3, virtual_pipeline_model_parallel_size=2))
    assert shapes == InputShapes(uniform=True, group=3)
    assert shapes.fit([(2, 8), (3, 5)]) == [(3, 8), (3, 8)]


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_ranks_get_of_each_packed_sequence_what_megatron_rotates_there(size, monkeypatch):
    """Padded to a multiple of 2 C, so that each has its own chunks r and 2 C - 1 - r; the last to the pack's end."""
    multiple, lengths = 2 * size, [9, 3, 14]
    micro = build_batch([([1, 2], [3 + n for n in range(length - 2)]) for length in lengths], pad_id=0)
    padded = [InputShapes(sequence=multiple).padded(length - 1) for length in lengths]
    padded[-1] += multiple
    monkeypatch.setattr(packing.parallel_state, "get_context_parallel_world_size", lambda: size)
    seen = torch.zeros_like(micro.mask)
    for rank in range(size):
        monkeypatch.setattr(packing.parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        inputs = packed_inputs(micro, lengths, (1, sum(padded)))
        places = [_get_thd_freqs_on_this_cp_rank(rank, size, torch.empty(count // size), torch.arange(count))
                  for count in padded]  # fmt: skip
        assert inputs.positions[0].tolist() == torch.cat(places).tolist()
        assert inputs.packed.cu_seqlens_q.diff().tolist() == padded
        read = torch.zeros(sum(padded) // size, dtype=torch.bool).index_fill_(0, inputs.read, True)
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor([count // size for count in padded]))
        for row, place, token, is_read in zip(rows, inputs.positions[0], inputs.tokens[0], read, strict=True):
            inside = place < lengths[row] - 1
            assert token == (micro.tokens[row, place] if inside else 0)
            assert is_read == (bool(micro.mask[row, place]) if inside else False)
            if inside:
                seen[row, place] += 1
    assert torch.equal(seen, inputs.kept.float())
    of_megatron = PackedSeqParams(cu_seqlens_q_padded=inputs.packed.cu_seqlens_q, total_tokens=sum(padded))
    assert torch.equal(inputs.packed.seq_idx, of_megatron.seq_idx)  # what Mamba layers read, of all ranks' tokens


def test_attention_has_blocks_of_sequences_of_like_length():
    lengths = [20, 4, 19, 5, 20]
    micro = build_batch([([1, 2], [3] * (length - 2)) for length in lengths], pad_id=0)
    inputs = shared_inputs(micro, sequence_lengths(micro), Prompts.of(micro), (1, 68 - 5 - 4))
    assert inputs.packed.blocks == ((3, 19), (2, 4))


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
