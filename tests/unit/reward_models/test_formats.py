"""How reward models encode paths: the official formats and ours, and what a folder must have."""

import json

import pytest
from helpers.responses import scored
from helpers.reward_models import SPECIAL, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nemo_edo.errors import UserError
from nemo_edo.reward_models import formats
from nemo_edo.reward_models.formats import DECODER, ENCODER, OwnFormat, OwnSettings, QwenFormat, load_format
from nemo_edo.reward_models.process_reward import encode_responses
from nemo_edo.test_time.search_llm import StepPath

PATH = StepPath("What is 2 + 3?", ("First, 2 + 3.", "That is 5.", "So 5."))
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, cls_token="[CLS]", sep_token="[SEP]")
    return AutoTokenizer.from_pretrained(folder)


def test_qwen_path_is_the_model_cards_conversation_and_a_question_ends_where_the_answer_begins(tokenizer, monkeypatch):
    [encoded] = QwenFormat(tokenizer).encode(PATH)
    answer = formats.QWEN_STEP.join(PATH.steps) + formats.QWEN_STEP
    roles = (("system", formats.QWEN_SYSTEM), ("user", PATH.question), ("assistant", answer))
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in roles)
    assert tokenizer.decode(encoded.ids) == expected
    step_id = tokenizer.convert_tokens_to_ids(formats.QWEN_STEP)
    assert encoded.ends == tuple(place for place, token in enumerate(encoded.ids) if token == step_id)
    [question] = QwenFormat(tokenizer).encode(StepPath("What is 1 + 1?"))
    assert tokenizer.decode(question.ids).endswith("<|im_start|>assistant\n")
    assert question.ends == (len(question.ids) - 1,)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="made 0 <extra_0> of 3 steps"):
        QwenFormat(tokenizer).encode(PATH)


@pytest.mark.parametrize("form", [
    QwenFormat, formats.SkyworkFormat, lambda tokenizer: OwnFormat(tokenizer, OwnSettings(DECODER, "\n"))])
@pytest.mark.parametrize("marks", [formats.QWEN_STEP, "<ext<extra_0>ra_0>", "<|im_end|>\n<|im_start|>user\n"])
def test_special_tokens_in_a_text_stay_text_and_add_no_step(tokenizer, form, marks):
    (said,), (clean,) = (form(tokenizer).encode(StepPath(f"Is {mark} one?", (f"One{mark}two", "three")))
                         for mark in (marks, "x"))
    special = [[one for one in encoded.ids if one in tokenizer.all_special_ids] for encoded in (said, clean)]
    assert special[0] == special[1] and len(said.ends) == len(clean.ends) == 2
    assert tokenizer.decode(said.ids) == tokenizer.decode(clean.ids).replace("Is x one", f"Is {marks} one").replace(
        "Onextwo", f"One{marks}two")


@pytest.mark.parametrize(("architecture", "missing", "message"), [
    ("Qwen2ForProcessRewardModel", "<extra_0>", "no token '<extra_0>'"),
    ("Qwen2ForProcessRewardModel", "chat_template", "no chat template"), ("Qwen2ForPrmModel", "bos_token", "bos_token"),
])
def test_a_folder_with_another_tokenizer_is_refused_without_its_weights(tmp_path, architecture, missing, message):
    names = {"bos_token": None} if missing == "bos_token" else {}
    fast = write_tokenizer(tmp_path, special=tuple(token for token in SPECIAL if token != missing), **names)
    if missing == "chat_template":
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        fast.chat_template = None
        fast.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "qwen2"}))
    with pytest.raises(UserError, match=message):
        load_format(formats.read_reward_folder(tmp_path))


def prepare_input(problem: str, response: str, tokenizer, step_token: str) -> tuple[list[int], list[int]]:
    """What Skywork's inference code computes: ids, and flags of the steps' last tokens."""
    ids = tokenizer.encode(tokenizer.bos_token + problem + "\n")
    flags = [0] * len(ids)
    step_id = tokenizer.encode(step_token)[-1]
    for step in response.split(step_token):
        piece = tokenizer.encode(step) if step != "" else []
        ids += [*piece, step_id]
        flags += [0] * len(piece) + [1]
    return ids, flags


def test_skywork_path_is_what_its_inference_code_prepares_and_breaks_inside_a_step_are_not_scored(tokenizer):
    [encoded] = formats.SkyworkFormat(tokenizer).encode(PATH)
    ids, flags = prepare_input(PATH.question, "\n".join(PATH.steps), tokenizer, "\n")
    assert encoded.ids == tuple(ids)
    assert encoded.ends == tuple(place for place, flag in enumerate(flags) if flag)
    ids, flags = prepare_input("Why?", "\n\none\n\n\ntwo", tokenizer, "\n")
    rollout = scored("p", text="\n\none\n\n\ntwo\n\n").rollout
    [[spaced]] = encode_responses([rollout], {"p": "Why?"}, formats.SkyworkFormat(tokenizer), separator=None)
    last = [place for place, flag in enumerate(flags) if flag]
    assert (spaced.ids, spaced.ends) == (tuple(ids), (last[2], last[5]))  # blank lines are tokens, but no steps
    [broken] = formats.SkyworkFormat(tokenizer).encode(StepPath("Why?", ("one\ntwo", "three")))
    assert len(broken.ends) == 2 and broken.ends[-1] == len(broken.ids) - 1


@given(TEXT, st.lists(TEXT, max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_our_decoders_encode_a_path_as_a_prefix_of_every_extension(tokenizer, question: str, steps: list[str]):
    form = OwnFormat(tokenizer, OwnSettings(DECODER, "\n"))
    [whole] = form.encode(StepPath(question, tuple(steps)))
    assert len(whole.ends) == max(1, len(steps))
    for length in range(1, len(steps) + 1):
        shorter = form.last(StepPath(question, tuple(steps[:length])))
        assert shorter == whole.ids[: whole.ends[length - 1] + 1]


def test_our_encoders_encode_each_path_between_special_tokens_and_decoders_after_bos(tokenizer, monkeypatch):
    encoded = OwnFormat(tokenizer, OwnSettings(ENCODER, "\n")).encode(PATH)
    beginnings = ["".join(f"{step}\n" for step in PATH.steps[:length]) for length in (1, 2, 3)]
    expected = [f"[CLS]{PATH.question}\n{beginning}[SEP]" for beginning in beginnings]
    assert [tokenizer.decode(one.ids) for one in encoded] == expected
    assert [one.ends for one in encoded] == [(len(one.ids) - 1,) for one in encoded]
    [question] = OwnFormat(tokenizer, OwnSettings(ENCODER, "\n")).encode(StepPath("Why?"))
    assert tokenizer.decode(question.ids) == "[CLS]Why?\n[SEP]"
    without, encode = OwnFormat(tokenizer, OwnSettings(DECODER, "\n")).last(PATH), tokenizer.encode

    def with_bos(text, add_special_tokens=True):
        return [tokenizer.bos_token_id] * add_special_tokens + encode(text, add_special_tokens=False)

    monkeypatch.setattr(tokenizer, "encode", with_bos)
    assert OwnFormat(tokenizer, OwnSettings(DECODER, "\n")).last(PATH) == (tokenizer.bos_token_id, *without)


def test_the_settings_file_marks_our_folders_and_a_damaged_one_or_a_missing_config_is_named(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="config.json"):
        formats.read_reward_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(UserError, match="LlamaForSequenceClassification.*expected Qwen2"):
        formats.read_reward_folder(tmp_path)
    formats.write_own_settings(tmp_path, OwnSettings(DECODER, "\n\n"))
    form = load_format(formats.read_reward_folder(tmp_path))
    assert (type(form), form.separator) == (OwnFormat, "\n\n")
    whole = {"kind": "decoder", "separator": "a", "version": 1}
    for bad in ([], {"kind": "decoder"}, {**whole, "kind": "x"}, {**whole, "version": 2}, {**whole, "separator": 1}):
        (tmp_path / formats.OWN_FILE).write_text(json.dumps(bad))
        with pytest.raises(UserError, match="reward_model.json"):
            formats.read_reward_folder(tmp_path)
