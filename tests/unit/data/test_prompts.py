import pytest

from nemo_edo.builtin_task.model import write_tokenizer
from nemo_edo.config import ArithmeticConfig
from nemo_edo.data.prompts import PromptStyle, encode_prompts, encode_solutions, prompt_style, render_prompt
from nemo_edo.types import Problem

TEMPLATE = PromptStyle("{question}\n")


def problem(line: int, question: str, solution: str = "1 + 2 = 3\n#### 3") -> Problem:
    return Problem(f"train-{line}", question, solution, "3", f"data/train.jsonl:{line}")


SHORT, LONG, LONGER = (problem(1, "1 + 2"), problem(2, "1 + 2 + 3"), problem(3, "1 + 2 + 3 + 4"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ArithmeticConfig())


def test_template_replaces_the_question_and_leaves_other_braces():
    assert render_prompt("{a} {question} {}{{", "x {question} {y}") == "{a} x {question} {y} {}{{"


def test_prompts_are_the_encoded_template_by_id(tokenizer):
    prompts = encode_prompts([SHORT, LONG], tokenizer, TEMPLATE, max_prompt_tokens=6)
    assert {name: tokenizer.decode(ids) for name, ids in prompts.items()} == {
        "train-1": "1 + 2\n", "train-2": "1 + 2 + 3\n"}


@pytest.fixture
def leading(tmp_path):
    """A tokenizer that puts <pad> in front of a text."""
    from tokenizers.processors import TemplateProcessing

    leading = write_tokenizer(tmp_path, ArithmeticConfig())
    leading.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", leading.pad_token_id)]
    )
    return leading


def test_special_tokens_of_the_tokenizer_lead_the_prompt_but_not_the_response(leading):
    prompt = encode_prompts([SHORT], leading, TEMPLATE, max_prompt_tokens=9)["train-1"]
    pair = encode_solutions([SHORT], leading, TEMPLATE, 99)[0]
    assert prompt == pair[0]
    assert prompt[0] == leading.pad_token_id
    assert leading.pad_token_id not in pair[1]


def test_too_long_prompts_name_the_longest_row_the_limit_and_the_keys(tokenizer):
    with pytest.raises(ValueError, match=r"^data/train.jsonl:3: the prompt has 8 tokens, more than the 5 ") as error:
        encode_prompts([SHORT, LONGER, LONG], tokenizer, TEMPLATE, max_prompt_tokens=5)
    for part in ("model.seq_length", "sampling.max_new_tokens", "2 of 3 rows"):
        assert part in str(error.value)


def test_solutions_end_in_the_end_of_sequence_token_and_may_fill_the_sequence_length_exactly(tokenizer):
    [(prompt, response)] = encode_solutions([SHORT], tokenizer, TEMPLATE, 13)
    assert tokenizer.decode(prompt) == "1 + 2\n"
    assert tokenizer.decode(response) == "1 + 2 = 3\n#### 3<eos>"
    assert len(prompt) + len(response) == 13
    with pytest.raises(ValueError, match=r"prompt with its solution has 13 tokens, more than the 12"):
        encode_solutions([SHORT], tokenizer, TEMPLATE, 12)


def test_unknown_text_names_its_row_and_a_tokenizer_without_an_end_token_is_an_error(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"train.jsonl:7: the tokenizer .*model.path"):
        encode_prompts([problem(7, "How many?")], tokenizer, TEMPLATE, max_prompt_tokens=99)
    with pytest.raises(ValueError, match=r"train.jsonl:8: the tokenizer"):
        encode_solutions([problem(8, "1 + 2", "It is 3.\n#### 3")], tokenizer, TEMPLATE, 99)
    endless = write_tokenizer(tmp_path, ArithmeticConfig())
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_solutions([SHORT], endless, TEMPLATE, 99)


def test_chat_template_is_used_where_there_is_one_asked_for_or_never(leading, tokenizer):
    leading.chat_template = template = "<eos>{% for m in messages %}{{ m['content'] }} + {% endfor %}"
    found = [prompt_style(TEMPLATE.template, asked, leading).chat for asked in ("auto", "true", "false")]
    assert [chat and chat.text for chat in found] == [template, template, None]
    assert [prompt_style(TEMPLATE.template, asked, tokenizer).chat for asked in ("auto", "false")] == [None, None]
    with pytest.raises(ValueError, match="data.chat_template is true, but the tokenizer .* has no chat template"):
        prompt_style(TEMPLATE.template, "true", tokenizer)
