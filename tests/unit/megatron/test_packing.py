"""What attention sees of packed sequences; that results are those of separate rows is in test_forward_backward.py."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from nemo_edo.config import ParallelismConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.megatron.packing import packed_inputs
from nemo_edo.megatron.process_groups import device_and_groups


@pytest.mark.parametrize("length", [6, 10])
def test_rotary_positions_begin_at_zero_in_each_sequence(length):
    """Attention would not tell, which sees differences of positions alone, but far from 0 these are coarse."""
    device_and_groups(ParallelismConfig(), seed=0, threads=1)
    micro = build_batch([([5], [6, 7]), ([8, 9], [10, 11]), ([12], [13])], pad_id=0)
    packed = packed_inputs(micro, [3, 4, 2], (1, length)).packed
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    heads = torch.randn(length, 1, 8)
    found = apply_rotary_pos_emb(heads, rotary(packed.max_seqlen_q), config, cu_seqlens=packed.cu_seqlens_q,
                                 cp_group=parallel_state.get_context_parallel_group())
    alone = [apply_rotary_pos_emb(part[:, None], rotary(len(part)), config)[:, 0]
             for part in heads.split(packed.cu_seqlens_q.diff().tolist())]
    torch.testing.assert_close(found, torch.cat(alone))
