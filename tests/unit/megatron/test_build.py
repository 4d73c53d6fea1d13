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
from nemo_edo.megatron.build import build_model, check_model_folder, export_hf_folder, initialize_parallel_state
from nemo_edo.megatron.forward_backward import MicroBatching

MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tiny, tmp_path_factory) -> SimpleNamespace:
    """A folder that ``transformers`` wrote, and the Megatron policy made of it."""
    model_type, fields = MODELS[request.param]
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp(model_type), model_type, **fields)
    return SimpleNamespace(folder=folder, policy=tiny.build_policy(folder))


@pytest.fixture(scope="module")
def exported_folder(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_hf_folder(model.policy.built, out)
    return out


# --- conversion ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_are_those_of_transformers(model, tiny):
    tokens = tiny.random_batch(rows=3, length=20).tokens
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    (chunk,) = model.policy.chunks
    logits = chunk(tokens, positions, None)[..., : model.policy.built.vocab_size]
    expected = tiny.load_dense(model.folder)(tokens).logits
    assert expected.std() > 0.5, "the check needs logits that differ"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_exported_tensors_are_bit_equal_to_the_loaded_ones(model, exported_folder):
    before, after = load_file(model.folder / "model.safetensors"), load_file(exported_folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(tensor.dtype is torch.float32 for tensor in after.values())


def test_transformers_loads_the_exported_model(model, exported_folder, tiny):
    tokens = tiny.random_batch().tokens
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(f)(tokens).logits for f in (model.folder, exported_folder)]
    assert torch.equal(*logits)


def test_transformers_loads_the_exported_tokenizer(model, exported_folder):
    before, after = AutoTokenizer.from_pretrained(model.folder), AutoTokenizer.from_pretrained(exported_folder)
    assert before.get_vocab() == after.get_vocab()
    text = "1 + 2 = 3\n#### 3"
    assert after.decode(after(text).input_ids) == text
    assert after.eos_token_id == before.eos_token_id is not None


# --- precision ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2, dtype="bf16")


def test_bf16_models_have_bf16_parameters(half):
    assert {parameter.dtype for chunk in half.chunks for parameter in chunk.parameters()} == {torch.bfloat16}


def test_bf16_export_is_the_rounded_weights_and_says_bf16(half, tiny_qwen2, tmp_path):
    export_hf_folder(half.built, tmp_path)
    source, rounded = load_file(tiny_qwen2 / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(rounded[name], source[name].bfloat16()) for name in source)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_bf16_log_probs_are_near_those_of_transformers_in_bf16(half, tiny, tiny_qwen2):
    batch = tiny.random_batch()
    log_probs, entropies = half.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)
    with torch.no_grad():
        dense = tiny.dense_log_probs(tiny.load_dense(tiny_qwen2, torch.bfloat16), batch.tokens)
    assert log_probs.dtype is entropies.dtype is torch.float32
    for found, expected in zip((log_probs, entropies), dense, strict=True):
        torch.testing.assert_close(found * batch.mask, expected * batch.mask, rtol=0, atol=0.15)


# --- what cannot be built -----------------------------------------------------------------------------------------


def _rename_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))


def _remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"not a Hugging Face model folder.*config\.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "unsupported architecture": (
        _rename_architecture, r"config\.json: architectures \['NoSuchModel'\] are not supported.*Qwen2ForCausalLM"),
    "no tokenizer": (_remove_tokenizer, r"has no tokenizer \(tokenizer\.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*\.safetensors weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_cannot_be_trained_is_an_error_that_names_folder_and_fault(damage, tiny_qwen2, tmp_path):
    folder = Path(shutil.copytree(tiny_qwen2, tmp_path / "model"))
    check_model_folder(folder)  # sound before the damage
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        check_model_folder(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (ParallelismConfig(tensor_model_parallel_size=3), "tensor_model_parallel_size 3 .* the model's 4 attention"),
        (ParallelismConfig(tensor_model_parallel_size=4), "tensor_model_parallel_size 4 .* the model's 2 query"),
        (ParallelismConfig(pipeline_model_parallel_size=3), "pipeline_model_parallel_size 3 .* the model's 2 layers"),
    ],
    ids=["heads", "query groups", "layers"],
)
def test_a_split_that_the_model_does_not_allow_is_an_error_that_names_the_key(half, tiny_qwen2, parallelism, message):
    with pytest.raises(UserError, match=f"parallelism.{message}"):
        build_model(tiny_qwen2, parallelism, PrecisionConfig(), half.device)


def test_a_vocabulary_that_tensor_parallelism_cannot_split_is_an_error_that_names_the_key(half, tiny, tmp_path):
    folder = tiny.write_tiny_model(tmp_path / "odd", vocab_size=131)
    with pytest.raises(UserError, match="parallelism.tensor_model_parallel_size 2 does not divide .* 131 vocabulary"):
        build_model(folder, ParallelismConfig(tensor_model_parallel_size=2), PrecisionConfig(), half.device)


def test_another_model_of_the_same_split_makes_no_new_process_groups(half, tiny, tiny_qwen2):
    """Each group has threads that last as long as the process."""
    group = parallel_state.get_tensor_model_parallel_group()
    tiny.build_policy(tiny_qwen2)
    assert parallel_state.get_tensor_model_parallel_group() is group


def test_a_world_that_the_split_does_not_divide_is_an_error_that_says_how_many_processes_fit(half):
    with pytest.raises(UserError, match=r"1 processes cannot be split .* 2 x .* 3: start a multiple of 6 processes"):
        initialize_parallel_state(ParallelismConfig(2, 3), seed=0)
