"""The sizes of conf/model/ against what their makers publish, and the counts against transformers' models."""

import pytest
import torch
from generated import model_section
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_edo.config.model_shape import ModelShape, check_expected
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError

PUBLISHED = {  # numbers in the safetensors files of the models' pages on Hugging Face, tied weights counted once
    "qwen2_5_0_5b": 494_032_768, "qwen2_5_1_5b": 1_543_714_304, "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512, "qwen2_5_14b": 14_770_033_664, "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648, "qwen3_0_6b": 596_049_920, "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360, "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264, "qwen3_30b_a3b": 30_532_122_624, "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496, "llama3_2_1b": 1_235_814_400, "llama3_2_3b": 3_212_749_824,
}
MODELS = sorted(path.stem for path in (shipped_config_dir() / "model").glob("*.yaml"))
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 130,
        "num_key_value_heads": 2, "tie_word_embeddings": False}


def architecture(model: str) -> dict:
    return dict(model_section(model)["architecture"])


@pytest.mark.parametrize("model", sorted({*MODELS, *PUBLISHED} - {"hf", "tiny_llama"}))
def test_a_model_has_the_published_number_of_parameters_and_fields_of_transformers(model: str):
    fields = architecture(model)
    assert ModelShape.from_hf(fields, model).parameters == PUBLISHED[model]
    config = AutoConfig.for_model(**fields)
    positions = config.rope_parameters
    assert positions["rope_type"] == ("llama3" if model.startswith("llama") else "default")
    assert positions["rope_theta"] == fields["rope_theta"]
    assert set(fields) <= {*type(config)().to_dict(), *config.attribute_map, "head_dim", "rope_theta", "rope_scaling"}


@pytest.mark.parametrize("fields", [{"model_type": "mistral"}, {"model_type": "llama", "head_dim": 32},
                                    {"model_type": "qwen3"}], ids=str)
def test_parameters_of_what_has_no_file_there_are_those_of_transformers_models(fields: dict):
    fields = {**TINY, **fields}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert ModelShape.from_hf(fields, "test").parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": None, "hidden_size": None}, "here has no hidden_size, vocab_size"),
    ({"model_type": "qwen3_moe", "num_experts": 4}, "here has no num_experts_per_tok"),
])
def test_sizes_that_are_not_known_are_told_with_their_source(changes: dict, message: str):
    fields = {**TINY, "model_type": "llama", **changes}
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf(fields, "here")


def test_sizes_that_both_name_have_to_agree():
    expected = architecture("qwen2_5_7b")
    check_expected(None, {"hidden_size": 1}, "here")
    check_expected(expected, {**expected, "rope_theta": 1.0, "head_dim": 128}, "here")
    with pytest.raises(UserError, match="here has num_hidden_layers 48, but model.architecture.num_hidden_layers is"):
        check_expected(expected, architecture("qwen2_5_14b"), "here")
