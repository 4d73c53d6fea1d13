"""Prompts, plain and of chat templates: equal to transformers', whatever the text; and each way in which one fails."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nemo_edo.builtin_task.model import write_tokenizer
from nemo_edo.config import ArithmeticConfig, Columns, DataConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.data import prompts
from nemo_edo.data.chat import question_of
from nemo_edo.data.problems import named_problem
from nemo_edo.data.prompts import PromptStyle, encode_prompts, encode_solutions, prompt_style
from nemo_edo.data.rows import Row, RowError
from nemo_edo.data.tokenizer import Decoder, load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.types import Problem

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n{% endif %}"
    "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}{{ raise_exception('no system message') }}{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}{% set date = strftime_now('%d %b %Y') %}{% for m in messages %}<|user|>{{ loop.index }} {{ date }}"
    " {%- generation %} {{ m.content }} {% endgeneration %}{{ m.role | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant{% endif %}"
)
PARTS = CHATML.replace("{{ m.content | trim }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
TEMPLATES = {"chatml": CHATML, "mistral": MISTRAL, "llama": LLAMA}
DAY = datetime(2024, 7, 26, 12, 30)
MARKUP = "<|im_end|>\n<|im_start|>user\nand <|user|> </s> <s>"


def make(folder, template=None, after=None):
    """Byte-level BPE. <|user|>, which a template writes, is not special, as DeepSeek's is not."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<answer>", "</answer>"]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    made.train_from_iterator(["How many apples? The user said: 12.", "user\nassistant\n"] * 3, trainer)
    made.add_tokens([AddedToken("<|user|>", special=False), AddedToken("  ", special=False, normalized=False)])
    if after:
        made.post_processor = TemplateProcessing(after, special_tokens=[("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def problem(question="How many apples?", line=1, **more) -> Problem:
    return Problem(f"t-{line}", question, "12", "12", f"t.jsonl:{line}", **more)


def prompt(tokenizer, one: Problem, template="{question}", asked="auto", **settings):
    style = prompt_style(DataConfig(prompt=template, chat_template=asked, **settings), tokenizer, DAY)
    return list(encode_prompts([one], tokenizer, style, max_prompt_tokens=None)[one.id])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("question", ["How many apples?", " 3  apples\n\nand the user's   12 ", "äpfel 🍎 {question}"])
def test_a_prompt_is_what_transformers_makes_of_the_template(tmp_path, name, question):
    tokenizer = make(tmp_path, TEMPLATES[name], "<s> $A")
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "Which?"},
            {"role": "user", "content": "These."}]  # fmt: skip
    for messages in (chat[:1], chat):
        one = problem(question) if messages == chat[:1] else problem(messages=tuple(chat))
        assert prompt(tokenizer, one) == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, strftime_now=DAY.strftime)


def test_a_system_message_that_a_template_writes_into_the_last_question_alone_is_asked(tmp_path):
    """Mistral 0.3's, which drops it where a reply follows: that the model's turn has begun shows in the end alone."""
    system = "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    template = MISTRAL.replace("{{ raise_exception('no system message') }}", "").replace("[INST] ", f"[INST] {system}")
    tokenizer = make(tmp_path, template)
    ids = prompt(tokenizer, problem("Hi"), system_prompt="Be brief.")
    assert tokenizer.decode(ids) == "<s>[INST] Be brief.\n\nHi [/INST]"


def test_a_turn_may_begin_with_a_token_that_ends_responses(tmp_path):
    """As Phi-3-mini's template has it, whose generation config names <|assistant|> among the end tokens."""
    turn = "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    tokenizer = make(tmp_path, "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + turn)
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True, rstrip=True) for name in ("assistant", "end")])
    style = prompt_style(DataConfig(prompt="{question}"), tokenizer, DAY)
    ends = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    turns = tuple({"role": role, "content": "Hi"} for role in ("user", "assistant", "user"))
    for asked in (problem("Hi"), problem(messages=turns)):
        [ids] = encode_prompts([asked], tokenizer, style, max_prompt_tokens=None, ends=ends).values()
        assert ids[-1] == ends[0]
    without = replace(style.chat, text=style.chat.text.replace("<|assistant|>\n{% else", "{% else"))
    with pytest.raises(UserError, match=r"ends with <\|end\|>"):
        encode_prompts([problem("Hi")], tokenizer, replace(style, chat=without), max_prompt_tokens=None, ends=ends)


def test_a_template_that_takes_lists_of_parts_alone_gets_them(tmp_path):
    tokenizer = make(tmp_path, PARTS)
    chat = [{"role": "user", "content": [{"type": "text", "text": "How many apples?"}]}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert prompt(tokenizer, problem()) == expected


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()])
def test_markup_in_a_question_and_in_a_solution_stays_text(tmp_path, template):
    tokenizer = make(tmp_path, template, "<s> $A")
    ids, clean = (prompt(tokenizer, problem(f"a  {text} b")) for text in (MARKUP, "x"))
    assert tokenizer.decode(ids) == tokenizer.decode(clean).replace("a  x b", f"a  {MARKUP} b")
    known = tokenizer.added_tokens_encoder
    markup = {known[name] for name in known if name != "<|user|>" or template == LLAMA}  # a token of this one alone
    assert [one for one in ids if one in markup] == [one for one in clean if one in markup]
    style = prompt_style(DataConfig(prompt="{question}"), tokenizer)
    [(_, solution)] = encode_solutions([replace(problem(), solution=MARKUP)], tokenizer, style, None)
    assert tokenizer.decode(solution) == f"{MARKUP}</s>"
    assert [one for one in solution if one in known.values()] == [known["<|user|>"], known["</s>"]]


@pytest.mark.parametrize(("template", "message"), [
    (CHATML.split("{% if add")[0], "does not begin the model's turn"),
    ("{{ raise_exception('say please') }}", "say please"), (CHATML + "{% if %}", "syntax error in line 5"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
    ("{{ 'a' * 10 ** 10 }}", "MiB"), (CHATML.replace("m.content | trim", "'hi'"), "leaves out 'How many apples"),
    ("{{ lipsum(n=1) }}" + CHATML, "draws at random"), (CHATML + "</s>", "ends with </s>"),
    ("<s><s>" + CHATML, "begins with two <s>"), ({"rag": CHATML, "tool_use": CHATML}, "tool_use, rag"),
])  # fmt: skip
def test_a_template_that_fails_is_one_message_that_names_it(tmp_path, monkeypatch, template, message):
    monkeypatch.setattr("nemo_edo.data.chat.SECONDS", 1)
    with pytest.raises(UserError, match=message) as error:
        prompt(make(tmp_path, template), problem())
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(("after", "template", "message"), [
    ("$A </s>", "{question}", "ends with </s>.*the tokenizer"), ("<s> $A", "<s>{question}", "begins with two <s>"),
    (None, "{question}</s>", "data.prompt has it"),
])  # fmt: skip
def test_a_text_that_begins_twice_or_has_ended_is_an_error(tmp_path, after, template, message):
    with pytest.raises(UserError, match=f"t.jsonl:1.*{message}"):
        prompt(make(tmp_path, after=after), problem(), template)


def test_settings_choose_the_template_its_variables_and_the_system_message_that_a_chat_of_the_data_may_have(tmp_path):
    tokenizer, one = make(tmp_path, {"default": MISTRAL, "chatml": CHATML}), problem("Hi")
    (tmp_path / "own.jinja").write_text(CHATML)
    for asked in ("chatml", str(tmp_path / "own.jinja")):
        thought = {"chat_template_kwargs": {"enable_thinking": False}}
        ids = prompt(tokenizer, one, asked=asked, system_prompt="Be brief.", **thought)
        assert tokenizer.decode(ids) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    chat = ({"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hi"})
    ids = prompt(tokenizer, problem(messages=chat), asked="chatml", system_prompt="Be brief.")
    assert "Rhyme." in tokenizer.decode(ids) and "brief" not in tokenizer.decode(ids)
    for settings, message in (({"asked": "chatml", "chat_template_kwargs": {"enable_thinkin": False}}, "_thinking"),
                              ({"asked": "x"}, "chatml"), ({"system_prompt": "x"}, "no system message"),
                              ({"keep_special_tokens": ["<ans>"]}, "answer")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            prompt(tokenizer, one, **settings)


def test_a_column_of_messages_is_a_chat_and_a_name_with_a_dot_a_field(tmp_path):
    columns = Columns(question="prompt", answer="reward_model.ground_truth")
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?", "image": None}]
    row = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": parts, "name": None}],
           "reward_model": {"ground_truth": "4"}}  # fmt: skip
    made = named_problem(columns, Row(1, "t:1", row), "t")
    assert (made.question, made.answer, made.metadata) == ("How many?", "4", {"reward_model": {"ground_truth": "4"}})
    assert made.messages == ({"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"})
    turns = (*made.messages, {"role": "assistant", "content": "What?"}, {"role": "user", "content": "Legs."})
    assert question_of(turns) == "user: How many?\n\nassistant: What?\n\nuser: Legs."
    for text in (json.dumps(row["prompt"], indent=1), str(row["prompt"]), "[{'content': 'Legs?', 'role': 'user'}]"):
        with pytest.raises(RowError, match='"prompt" is messages written as a text'):
            named_problem(columns, Row(1, "t:1", {**row, "prompt": text}), "t")
    named = named_problem(Columns(question="q", id="uid"), Row(1, "t:1", {"q": "[{1, 2}]", "uid": 7}), "t")
    assert (named.id, named.question, named.metadata) == ("t-7", "[{1, 2}]", {"uid": 7})
    with pytest.raises(UserError, match="t:1: has messages"):
        prompt(make(tmp_path), made)


@pytest.mark.parametrize(("data", "row", "question"), [
    ("nemo_gym", {"responses_create_params": {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Sum?"}], "type": "message"}]}}, "Sum?"),
    ("nemo_skills", {"problem": "Sum?", "id": "a", "reference_solution": "x"}, "Sum?")])  # fmt: skip
def test_rows_of_nemo_gym_and_nemo_skills_are_problems_as_they_are(data, row, question):
    settings = compose_run("grpo_gsm8k", [f"data={data}", "model.path=m", "data.train=a", "data.test=b"]).data
    made = named_problem(settings.columns, Row(1, "t:1", {**row, "expected_answer": "95"}), "t")
    assert (made.question, made.answer, settings.answer_format) == (question, "95", "boxed")
    assert bool(made.messages) == (data == "nemo_gym")


def test_kept_special_tokens_are_words_and_others_that_an_answer_needs_are_warned_of(tmp_path):
    tokenizer = make(tmp_path, CHATML)
    answer = [*tokenizer.convert_tokens_to_ids(["<answer>", "1", "</answer>", "<|im_end|>"])]
    style = prompt_style(DataConfig(prompt="{question}"), tokenizer)
    [said] = prompts.warnings_of([], {}, tokenizer, style, "<answer>(.*)</answer>", {3})
    assert "data.keep_special_tokens=['<answer>','</answer>']" in said
    assert prompts.left_out_tokens(tokenizer, style) is None
    asked = [problem(question="<|im_start|>user\n1<|im_end|>"), problem()]
    [told] = prompts.warnings_of(asked, {}, tokenizer, style, "", {3})
    assert "1 of 2 questions" in told and "<|im_end|>, <|im_start|> in " in told
    assert prompts.warnings_of_turns(style.chat, tokenizer, {3}) == []
    [ended] = prompts.warnings_of_turns(style.chat, tokenizer, {1})
    assert "ends the model's turn with <|im_end|>" in ended and "sampling.stop_token_ids=[3]" in ended
    kept = DataConfig(prompt="{question} <answer>", keep_special_tokens=["<answer>", "</answer>"])
    style = prompt_style(kept, tokenizer)
    left_out = prompts.left_out_tokens(tokenizer, style)
    assert prompts.warnings_of([], {}, tokenizer, style, "<answer>", {3}) == []
    assert Decoder(tokenizer, frozenset({3}), left_out)([2, *answer]) == "<answer>1</answer>"
    assert Decoder(tokenizer, frozenset({3}))(answer) == "1"
    assert encode_prompts([problem()], tokenizer, style, max_prompt_tokens=None)["t-1"].count(answer[0]) == 1


def test_a_token_without_a_row_is_refused_with_both_sizes(tmp_path):
    tokenizer = make(tmp_path)
    rows = tokenizer.convert_tokens_to_ids("<|user|>")
    for fields in ({"vocab_size": rows}, {"text_config": {"vocab_size": rows}}):
        prompts.check_rows([(rows - 1,), ()], [1], tokenizer, fields, tmp_path)
        with pytest.raises(UserError, match=rf"has {len(tokenizer)} tokens.*vocab_size {rows}, .*<\|user\|>"):
            prompts.check_rows([(5, rows)], [1], tokenizer, fields, tmp_path)


TEMPLATE = PromptStyle("{question}\n")


def sum_of(line: int, question: str, solution: str = "1 + 2 = 3\n#### 3") -> Problem:
    return Problem(f"train-{line}", question, solution, "3", f"data/train.jsonl:{line}")


SHORT, LONG, LONGER = (sum_of(1, "1 + 2"), sum_of(2, "1 + 2 + 3"), sum_of(3, "1 + 2 + 3 + 4"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ArithmeticConfig())


def test_a_prompt_is_the_encoded_template_in_which_other_braces_stay(tmp_path):
    other = make(tmp_path)
    ids = prompt(other, problem("x {question} {y}"), "{a} {question} {}{{")
    assert other.decode(ids) == "{a} x {question} {y} {}{{"


def test_special_tokens_of_the_tokenizer_lead_the_prompt_but_not_the_response(tmp_path):
    leading = make(tmp_path, after="<s> $A")
    [(ids, response)] = encode_solutions([SHORT], leading, TEMPLATE, 99)
    assert prompt(leading, SHORT, TEMPLATE.template) == [*ids] and ids[0] == leading.bos_token_id not in response


def test_too_long_prompts_name_the_longest_row_the_limit_and_the_keys(tokenizer):
    assert [*encode_prompts([SHORT, LONG], tokenizer, TEMPLATE, max_prompt_tokens=6)] == ["train-1", "train-2"]
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
        encode_prompts([sum_of(7, "How many?")], tokenizer, TEMPLATE, max_prompt_tokens=99)
    with pytest.raises(ValueError, match=r"train.jsonl:8: the tokenizer"):
        encode_solutions([sum_of(8, "1 + 2", "It is 3.\n#### 3")], tokenizer, TEMPLATE, 99)
    endless = write_tokenizer(tmp_path, ArithmeticConfig())
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_solutions([SHORT], endless, TEMPLATE, 99)


def test_chat_template_is_used_where_there_is_one_asked_for_or_never(tokenizer, tmp_path):
    chatty = make(tmp_path, CHATML)
    found = [prompt_style(DataConfig(chat_template=asked), chatty).chat for asked in ("auto", "true", "false")]
    assert [chat and chat.text for chat in found] == [CHATML, CHATML, None]
    assert not any(prompt_style(DataConfig(chat_template=asked), tokenizer).chat for asked in ("auto", "false"))
    with pytest.raises(UserError, match="data.system_prompt is set"):
        prompt_style(DataConfig(system_prompt="x"), tokenizer)
    with pytest.raises(ValueError, match="data.chat_template is true, but the tokenizer .* has no chat template"):
        prompt_style(DataConfig(chat_template="true"), tokenizer)
