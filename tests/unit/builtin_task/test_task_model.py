import pytest
from transformers import AutoConfig, AutoTokenizer

from nemo_edo.builtin_task.model import vocabulary, write_base_model, write_tokenizer
from nemo_edo.config import ArithmeticConfig

CONFIG = ArithmeticConfig(warmup_problems=300, train_problems=20, test_problems=30)
QWEN = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 256, "head_dim": 64}


def test_encoding_is_one_token_a_number_or_sign_with_nothing_added_and_anything_else_is_unknown(tmp_path):
    write_tokenizer(tmp_path, CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    signs = ["6", " + ", "13", " = ", "19", "\n", "#### ", "19"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("6 + 13 = 19\n#### 19")) == signs
    for text in ("How many?", "1234", "6+3", "####2"):
        assert tokenizer.unk_token_id in tokenizer.encode(text)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "<eos>", "<unk>")
    ids = [*tokenizer.encode("#### 2"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    decoded = [tokenizer.decode(ids, skip_special_tokens=skipped) for skipped in (True, False)]
    assert decoded == ["#### 2", "#### 2<eos><pad>"]
    assert set(tokenizer("#### 2")) == {"input_ids", "attention_mask"}, "generate() refuses anything else"


@pytest.mark.parametrize("tied", [True, False])
def test_base_model_folder_loads_with_the_tokenizers_ids_and_the_given_fields(tmp_path, tied):
    write_base_model(tmp_path, QWEN | {"tie_word_embeddings": tied}, CONFIG)
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (config.model_type, config.architectures) == ("qwen2", ["Qwen2ForCausalLM"])
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (128, 2, 64)
    assert config.vocab_size == len(tokenizer) == len(vocabulary(CONFIG))
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config.bos_token_id is None
    assert config.tie_word_embeddings is tied


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "qwen22"}, "model.architecture.model_type is 'qwen22'.*did you mean qwen2"),
    ({"hiden_size": 64}, "model.architecture.hiden_size is not a field of Qwen2Config; did you mean hidden_size"),
    ({"vocab_size": 64}, "model.architecture.vocab_size is filled in"),
    ({"eos_token_id": 2}, "model.architecture.eos_token_id is filled in"),
])
def test_wrong_architecture_is_an_error_that_names_the_key_and_leaves_no_folder(tmp_path, change, message):
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=message):
        write_base_model(folder, QWEN | change, CONFIG)
    assert not folder.exists()
