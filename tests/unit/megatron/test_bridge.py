import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.bridge import build_model, check_model_folder
from nemo_edo.megatron.hf_export import export_hf_folder
from nemo_edo.megatron.platform import initialize_parallel_state

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}
MODELS = {
    "qwen2, tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "experts": ("qwen3_moe", EXPERTS),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tiny, tmp_path_factory) -> SimpleNamespace:
    """A folder that ``transformers`` wrote, and the Megatron policy made of it."""
    model_type, fields = MODELS[request.param]
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp(model_type), model_type, **fields)
    return SimpleNamespace(folder=folder, policy=tiny.build_policy(folder))


def test_exported_tensors_are_the_loaded_ones_to_the_last_bit_and_transformers_loads_them_and_the_tokenizer(
    model, tiny, tmp_path
):
    export_hf_folder(model.policy.built, tmp_path / "hf")
    tokens, folders = tiny.random_batch().tokens, (model.folder, tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(tensor.dtype is torch.float32 for tensor in after.values())
    with torch.no_grad():
        assert torch.equal(*(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in folders))
    before, after = map(AutoTokenizer.from_pretrained, folders)
    assert before.get_vocab() == after.get_vocab()
    assert after.eos_token_id == before.eos_token_id is not None


@pytest.fixture(scope="module")
def half(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2, dtype="bf16")


def test_bf16_parameters_and_their_export_are_the_rounded_weights_and_say_bf16(half, tiny_qwen2, tmp_path):
    assert {parameter.dtype for chunk in half.chunks for parameter in chunk.parameters()} == {torch.bfloat16}
    export_hf_folder(half.built, tmp_path)
    source, rounded = load_file(tiny_qwen2 / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(rounded[name], source[name].bfloat16()) for name in source)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("spoil", "named"), [
    (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    (lambda folder: (folder / "config.json").write_text("{"), r"config\.json:1: not valid JSON"),
    (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], r"tokenizer\.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
])
def test_a_folder_that_cannot_be_trained_is_an_error_that_names_folder_and_fault(spoil, named, tiny_qwen2, tmp_path):
    folder = Path(shutil.copytree(tiny_qwen2, tmp_path / "model"))
    check_model_folder(folder)  # sound before the damage
    spoil(folder)
    with pytest.raises(UserError, match=named) as error:
        check_model_folder(folder)
    assert str(folder) in str(error.value)


def test_a_split_that_the_model_or_the_world_does_not_allow_is_refused(half, tiny_qwen2):
    with pytest.raises(UserError, match="parallelism.tensor_model_parallel_size 3"):
        build_model(tiny_qwen2, ParallelismConfig(tensor_model_parallel_size=3), PrecisionConfig(), half.device)
    with pytest.raises(UserError, match="needs a multiple of 6 processes, got 1"):
        initialize_parallel_state(ParallelismConfig(2, 3), seed=0)


def test_another_model_of_the_same_split_makes_no_new_process_groups(half, tiny, tiny_qwen2):
    """Each group has threads that last as long as the process."""
    group = parallel_state.get_tensor_model_parallel_group()
    tiny.build_policy(tiny_qwen2)
    assert parallel_state.get_tensor_model_parallel_group() is group


def test_the_router_of_experts_adds_no_loss(tiny, tmp_path):
    policy = tiny.build_policy(tiny.write_tiny_model(tmp_path, "qwen3_moe", **EXPERTS))
    config = policy.chunks[0].config
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)


def test_an_export_in_shards_of_a_largest_size_is_the_model_for_transformers(tiny, policy, tiny_qwen2, tmp_path):
    export_hf_folder(policy.built, tmp_path, max_shard_bytes=30_000)
    shards = [load_file(file) for file in tmp_path.glob("model-*-of-*.safetensors")]
    sizes = [(len(shard), sum(tensor.nbytes for tensor in shard.values())) for shard in shards]
    assert len(shards) > 3 and max(size for _, size in sizes) > 30_000, "no tensor is larger than a shard"
    assert all(size <= 30_000 or tensors == 1 for tensors, size in sizes)
    tokens = tiny.random_batch(rows=3).tokens
    found, expected = (tiny.dense_logprobs(tiny.load_dense(folder), tokens)[0] for folder in (tmp_path, tiny_qwen2))
    assert torch.equal(found, expected)
