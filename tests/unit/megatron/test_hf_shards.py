"""Files of weights: none too large, and together the folder that ``transformers`` loads."""

import torch
from safetensors.torch import load_file

from nemo_edo.megatron.hf_export import export_hf_folder


def test_an_export_in_shards_of_a_largest_size_is_the_model_for_transformers(tiny, policy, tiny_qwen2, tmp_path):
    export_hf_folder(policy.built, tmp_path, max_shard_bytes=30_000)
    shards = [load_file(file) for file in tmp_path.glob("model-*-of-*.safetensors")]
    sizes = [(len(shard), sum(tensor.nbytes for tensor in shard.values())) for shard in shards]
    assert len(shards) > 3 and max(size for _, size in sizes) > 30_000, "no tensor is larger than a shard"
    assert all(size <= 30_000 or tensors == 1 for tensors, size in sizes)
    tokens = tiny.random_batch(rows=3).tokens
    found, expected = (tiny.dense_logprobs(tiny.load_dense(folder), tokens)[0] for folder in (tmp_path, tiny_qwen2))
    assert torch.equal(found, expected)
