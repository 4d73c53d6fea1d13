"""Every token that a model's files or the config name as an end ends a response."""

import json
from pathlib import Path

import pytest
from helpers.tiny_models import write_tiny_model
from tokenizers import Tokenizer

from nemo_edo.data.tokenizer import load_tokenizer, read_stop_tokens
from nemo_edo.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer and config.json name token 1."""
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    path = folder / name
    fields = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**fields, "eos_token_id": value}))


@pytest.mark.parametrize(("of_generation", "of_config", "more", "expected", "disagree"), [
    ([1, 7], 1, (), (1, 7), None), (9, [1, 5], (3,), (1, 3, 5, 9), "config.json has 1, 5"),
    (None, None, (2, 1), (1, 2), None),
])
def test_the_end_tokens_are_the_union_of_all_sources_and_files_that_have_nothing_in_common_are_named_with_their_ids(
        folder: Path, of_generation, of_config, more, expected, disagree: str | None):
    write(folder, "config.json", of_config)
    write(folder, "generation_config.json", of_generation)
    found = read_stop_tokens(folder, load_tokenizer(folder), more)
    said = found.lines()
    assert found.ids == expected
    assert all(str(token) in said[0] for token in expected) and len(said) == 1 + bool(disagree)
    if disagree:
        assert disagree in said[1] and "the tokenizer has 1" in said[1] and "sampling" not in said[1]


def test_an_end_token_outside_of_the_vocabulary_is_refused_with_its_source_and_so_is_a_model_without_any(folder: Path):
    tokenizer = load_tokenizer(folder)
    write(folder, "generation_config.json", [1, 50_000])
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id .*50000"):
        read_stop_tokens(folder, tokenizer, ())
    write(folder, "generation_config.json", None)
    with pytest.raises(UserError, match=r"^sampling.stop_token_ids .*50000"):
        read_stop_tokens(folder, tokenizer, (50_000,))
    write(folder, "config.json", None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"eos_token.*sampling.stop_token_ids"):
        read_stop_tokens(folder, tokenizer, ())


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_token_ids_are_those_of_the_file_whatever_the_models_type(tmp_path, model_type):
    folder, text = write_tiny_model(tmp_path, model_type), "1 + 2 + 3 = 6"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert load_tokenizer(folder)(text)["input_ids"] == ids and len(ids) == 7
