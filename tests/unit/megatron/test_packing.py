"""What the model sees of a micro-batch, in rows and packed."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from nemo_edo.config import ParallelismConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.megatron.packing import packed_inputs, row_inputs


@pytest.fixture(scope="module", autouse=True)
def groups():
    from nemo_edo.megatron.build import device_and_groups

    device_and_groups(ParallelismConfig(), seed=0, threads=1)


@pytest.fixture
def micro():
    """Rows of three, four and two tokens."""
    return build_batch([([5], [6, 7]), ([8, 9], [10, 11]), ([12], [13])], pad_id=0)


LENGTHS = [3, 4, 2]


def test_rows_are_padded_to_their_shape(micro):
    inputs = row_inputs(micro, (3, 4))
    assert inputs.tokens.tolist() == [[5, 6, 7, 0], [8, 9, 10, 0], [12, 13, 0, 0]]
    assert inputs.targets.tolist() == [[6, 7, 0, 0], [9, 10, 11, 0], [13, 0, 0, 0]]
    assert inputs.positions.tolist() == [[0, 1, 2, 3]] * 3
    assert inputs.packed is None
    assert torch.equal(inputs.to_rows(inputs.targets), micro.tokens[:, 1:])


def test_packed_rows_stand_behind_each_other_without_their_padding(micro):
    inputs = packed_inputs(micro, LENGTHS, (1, 6))
    assert inputs.tokens.tolist() == [[5, 6, 8, 9, 10, 12]]
    assert inputs.targets.tolist() == [[6, 7, 9, 10, 11, 13]]
    assert inputs.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    packed = inputs.packed
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 2, 5, 6]
    assert (packed.qkv_format, packed.cu_seqlens_q.dtype) == ("thd", torch.int32)
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 3
    assert torch.equal(inputs.to_rows(inputs.targets), micro.tokens[:, 1:])


def test_a_longer_pack_pads_its_last_sequence(micro):
    inputs = packed_inputs(micro, LENGTHS, (1, 10))
    assert inputs.tokens.tolist() == [[5, 6, 8, 9, 10, 12, 0, 0, 0, 0]]
    assert inputs.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 4]]
    assert inputs.packed.cu_seqlens_q.tolist() == [0, 2, 5, 10]
    assert inputs.packed.max_seqlen_q == 5
    assert torch.equal(inputs.to_rows(inputs.targets), micro.tokens[:, 1:])


def test_gradients_of_rows_reach_the_positions_of_the_pack_and_no_padding(micro):
    inputs = packed_inputs(micro, LENGTHS, (1, 8))
    values = torch.arange(8.0)[None].requires_grad_()
    weights = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0], [6.0, 9.0, 9.0]])
    (inputs.to_rows(values) * weights).sum().backward()
    assert values.grad.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]


@pytest.mark.parametrize("length", [6, 10])
def test_rotary_positions_begin_anew_with_each_sequence(micro, length):
    """Attention would not tell, which sees differences of positions alone, but far from 0 these are coarse."""
    packed = packed_inputs(micro, LENGTHS, (1, length)).packed
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    heads = torch.randn(length, 1, 8)
    found = apply_rotary_pos_emb(heads, rotary(packed.max_seqlen_q), config, cu_seqlens=packed.cu_seqlens_q,
                                 cp_group=parallel_state.get_context_parallel_group())
    alone = [apply_rotary_pos_emb(part[:, None], rotary(len(part)), config)[:, 0]
             for part in heads.split(packed.cu_seqlens_q.diff().tolist())]
    torch.testing.assert_close(found, torch.cat(alone))
