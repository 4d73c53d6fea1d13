"""Files of weights: none too large, and together the folder that ``transformers`` loads."""

import json

import torch
from safetensors.torch import load_file

from nemo_edo.megatron.build import export_hf_folder
from nemo_edo.megatron.hf_shards import write_shards


def test_shards_hold_all_tensors_in_files_that_are_no_larger_than_asked_for(tiny, tiny_qwen2, tmp_path):
    tiny.build_policy(tiny_qwen2)  # the world of one process
    tensors = {f"t{size}": torch.full((size,), float(size)) for size in (10, 5, 30, 4, 4, 2, 1)}
    write_shards(tensors.items(), tmp_path, max_bytes=64)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in tensors.values())
    found = {file.name: load_file(file) for file in tmp_path.glob("*.safetensors")}
    assert sorted(found) == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, tensor in tensors.items():
        assert torch.equal(found[index["weight_map"][name]][name], tensor)
    assert [sorted(shard) for _, shard in sorted(found.items())] == [["t10", "t5"], ["t30"], ["t1", "t2", "t4"]]


def test_an_export_in_shards_is_the_model_for_transformers(tiny, tiny_qwen2, tmp_path):
    policy = tiny.build_policy(tiny_qwen2)
    export_hf_folder(policy.built, tmp_path / "shards", max_shard_bytes=40_000)
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 3
    batch = tiny.random_batch(rows=3)
    found, expected = (
        tiny.dense_log_probs(tiny.load_dense(folder), batch.tokens)[0] for folder in (tmp_path / "shards", tiny_qwen2)
    )
    assert torch.equal(found, expected)
