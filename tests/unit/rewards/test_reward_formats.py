"""How reward models read paths: the official layouts, our own, and what a folder must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_edo.errors import UserError
from nemo_edo.rewards.reward_formats import (
    DECODER,
    ENCODER,
    OWN_FILE,
    QWEN_STEP,
    QWEN_SYSTEM,
    Encoded,
    OwnFormat,
    OwnSettings,
    QwenFormat,
    SkyworkFormat,
    load_format,
    read_reward_folder,
    too_long,
    write_own_settings,
)
from nemo_edo.test_time.search_llm import StepPath
from tests.helpers.reward_models import SPECIAL, write_tokenizer

PATH = StepPath("What is 2 + 3?", ("First, 2 + 3.", "That is 5.", "So 5."))
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, cls_token="[CLS]", sep_token="[SEP]")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prm_folder(folder: Path, architecture: str, **tokenizer) -> Path:
    """Without weights: what is wrong with a tokenizer has to be found before they are looked for."""
    write_tokenizer(folder, **tokenizer)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "qwen2"}))
    return folder


# --- Qwen2.5-Math-PRM -----------------------------------------------------------------------------------------------


def test_qwen_path_is_the_model_cards_conversation(tokenizer):
    [encoded] = QwenFormat(tokenizer).encode(PATH)
    answer = QWEN_STEP.join(PATH.steps) + QWEN_STEP
    roles = (("system", QWEN_SYSTEM), ("user", PATH.question), ("assistant", answer))
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in roles)
    assert tokenizer.decode(encoded.ids) == expected
    step_id = tokenizer.convert_tokens_to_ids(QWEN_STEP)
    assert encoded.ends == tuple(place for place, token in enumerate(encoded.ids) if token == step_id)
    assert len(encoded.ends) == 3


def test_qwen_step_that_writes_the_step_token_makes_no_step_of_its_own(tokenizer):
    path = StepPath(f"Is {QWEN_STEP} a token?", (f"One{QWEN_STEP}two", "three"))
    [encoded] = QwenFormat(tokenizer).encode(path)
    assert len(encoded.ends) == 2
    assert encoded == QwenFormat(tokenizer).encode(StepPath("Is  a token?", ("Onetwo", "three")))[0]


def test_qwen_question_alone_is_read_where_the_answer_would_begin(tokenizer):
    [encoded] = QwenFormat(tokenizer).encode(StepPath("What is 1 + 1?"))
    assert tokenizer.decode(encoded.ids).endswith("<|im_start|>assistant\n")
    assert encoded.ends == (len(encoded.ids) - 1,)


@pytest.mark.parametrize(("missing", "message"), [("<extra_0>", "no token '<extra_0>'"), (None, "no chat template")])
def test_qwen_folder_with_another_tokenizer_is_refused_before_its_weights_are_read(tmp_path, missing, message):
    folder = prm_folder(
        tmp_path, "Qwen2ForProcessRewardModel", special=tuple(token for token in SPECIAL if token != missing)
    )
    if missing is None:
        for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
            if path.suffix == ".json":
                fields = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
                path.write_text(json.dumps(fields))
            else:
                path.unlink(missing_ok=True)
    with pytest.raises(UserError, match=message):
        load_format(read_reward_folder(folder))


def test_qwen_template_that_drops_a_step_token_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="made 0 <extra_0> of 3 steps"):
        QwenFormat(tokenizer).encode(PATH)


# --- Skywork-o1-Open-PRM --------------------------------------------------------------------------------------------


def prepare_input(problem: str, response: str, tokenizer, step_token: str) -> tuple[list[int], list[int]]:
    """What Skywork's inference code computes, in words of our own: ids and the flags of the steps' last tokens."""
    ids = tokenizer.encode(tokenizer.bos_token + problem + "\n")
    flags = [0] * len(ids)
    step_id = tokenizer.encode(step_token)[-1]
    for step in response.split(step_token):
        piece = tokenizer.encode(step) if step != "" else []
        ids += [*piece, step_id]
        flags += [0] * len(piece) + [1]
    return ids, flags


def test_skywork_path_is_what_its_inference_code_prepares(tokenizer):
    [encoded] = SkyworkFormat(tokenizer).encode(PATH)
    ids, flags = prepare_input(PATH.question, "\n".join(PATH.steps), tokenizer, "\n")
    assert encoded.ids == tuple(ids)
    assert encoded.ends == tuple(place for place, flag in enumerate(flags) if flag)


def test_skywork_line_breaks_inside_a_step_are_not_read(tokenizer):
    [encoded] = SkyworkFormat(tokenizer).encode(StepPath("Why?", ("one\ntwo", "three")))
    assert len(encoded.ends) == 2
    assert encoded.ends[-1] == len(encoded.ids) - 1


def test_skywork_folder_without_bos_token_is_refused(tmp_path):
    folder = prm_folder(tmp_path, "Qwen2ForPrmModel", bos_token=None)
    with pytest.raises(UserError, match="names no bos_token"):
        load_format(read_reward_folder(folder))


# --- our own --------------------------------------------------------------------------------------------------------


@given(TEXT, st.lists(TEXT, max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_own_decoder_reads_each_path_as_the_beginning_of_the_longer_one(tokenizer, question: str, steps: list[str]):
    form = OwnFormat(tokenizer, OwnSettings(DECODER, "\n"))
    [whole] = form.encode(StepPath(question, tuple(steps)))
    assert len(whole.ends) == max(1, len(steps))
    for length in range(1, len(steps) + 1):
        shorter = form.last(StepPath(question, tuple(steps[:length])))
        assert shorter == whole.ids[: whole.ends[length - 1] + 1]


def test_own_encoder_reads_each_path_by_itself_between_its_special_tokens(tokenizer):
    encoded = OwnFormat(tokenizer, OwnSettings(ENCODER, "\n")).encode(PATH)
    texts = [tokenizer.decode(one.ids) for one in encoded]
    beginnings = ["".join(f"{step}\n" for step in PATH.steps[:length]) for length in (1, 2, 3)]
    expected = [f"[CLS]{PATH.question}\n{beginning}[SEP]" for beginning in beginnings]
    assert texts == expected
    assert [one.ends for one in encoded] == [(len(one.ids) - 1,) for one in encoded]
    [question] = OwnFormat(tokenizer, OwnSettings(ENCODER, "\n")).encode(StepPath("Why?"))
    assert tokenizer.decode(question.ids) == "[CLS]Why?\n[SEP]"


def test_own_decoder_begins_with_bos_where_its_tokenizer_does(tokenizer, monkeypatch):
    without = OwnFormat(tokenizer, OwnSettings(DECODER, "\n")).last(PATH)
    encode = tokenizer.encode

    def with_bos(text, add_special_tokens=True):
        return [tokenizer.bos_token_id] * add_special_tokens + encode(text, add_special_tokens=False)

    monkeypatch.setattr(tokenizer, "encode", with_bos)
    assert OwnFormat(tokenizer, OwnSettings(DECODER, "\n")).last(PATH) == (tokenizer.bos_token_id, *without)


def test_settings_file_is_what_tells_our_folders_from_others(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(UserError, match="architectures is .'LlamaForSequenceClassification'., expected Qwen2"):
        read_reward_folder(tmp_path)
    write_own_settings(tmp_path, OwnSettings(DECODER, "\n\n"))
    form = load_format(read_reward_folder(tmp_path))
    assert (type(form), form.separator) == (OwnFormat, "\n\n")


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "decoder"}', '{"kind": "x", "separator": "a", "version": 1}',
                                     '{"kind": "decoder", "separator": "a", "version": 2}',
                                     '{"kind": "decoder", "separator": 1, "version": 1}'])
def test_damaged_settings_file_is_named(tmp_path, content: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / OWN_FILE).write_text(content)
    with pytest.raises(UserError, match="reward_model.json"):
        read_reward_folder(tmp_path)


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(UserError, match="config.json is missing"):
        read_reward_folder(tmp_path)


def test_too_long_names_the_paths_with_a_sequence_above_the_limit():
    short, long = Encoded((1,) * 5, (4,)), Encoded((1,) * 6, (5,))
    assert too_long([[short], [short, long], [long]], 5) == [1, 2]
    assert too_long([[long]], None) == []
