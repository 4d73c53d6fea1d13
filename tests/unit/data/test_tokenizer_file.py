"""A tokenizer is the one of its file, whatever the type of the model that it comes with."""

import pytest
from helpers.tiny_models import write_tiny_model
from tokenizers import Tokenizer

from nemo_edo.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_token_ids_are_those_of_the_file_whatever_the_models_type(tmp_path, model_type):
    folder, text = write_tiny_model(tmp_path, model_type), "1 + 2 + 3 = 6"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert load_tokenizer(folder)(text)["input_ids"] == ids and len(ids) == 7
