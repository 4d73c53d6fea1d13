import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_edo.data.problems import ProblemFileError, load_problems

ROBE = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total is 2+1=<<2+1=3>>3 bolts\n#### 3",
}
HOUSE = {
    "question": "Josh’s house costs $80,000 {sic}. What is his profit?",
    "answer": "So he made 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70,000",
}


def write(folder: Path, *lines: object) -> Path:
    """A file of the given lines: dicts as JSON, texts and bytes as they are."""
    path = folder / "train.jsonl"
    encoded = [line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
               for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def row(question: str, answer: str = "#### 1") -> dict[str, str]:
    return {"question": question, "answer": answer}


def test_gsm8k_rows_load_without_annotations_and_with_canonical_answers(tmp_path):
    path = write(tmp_path, ROBE, HOUSE)
    robe, house = load_problems(path, on_bad_rows="error").problems
    assert robe.id == "train-1"
    assert robe.question == ROBE["question"]
    assert robe.solution == "It takes 2/2=1 bolt of white fiber\nSo the total is 2+1=3 bolts\n#### 3"
    assert (robe.answer, robe.source) == ("3", f"{path}:1")
    assert (house.id, house.answer, house.source) == ("train-2", "70000", f"{path}:2")
    assert house.solution == "So he made 200,000-130,000=$70,000\n#### 70,000"


def test_blank_lines_are_passed_over_but_counted(tmp_path):
    problems = load_problems(write(tmp_path, "", row("a"), "  \t", row("b"), ""), on_bad_rows="error").problems
    assert [problem.id for problem in problems] == ["train-2", "train-4"]


def test_byte_order_mark_and_carriage_returns_are_tolerated(tmp_path):
    content = b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r\n" + json.dumps(row("b")).encode() + b"\r\n"
    problems = load_problems(write(tmp_path, content), on_bad_rows="error").problems
    assert [problem.question for problem in problems] == ["a", "b"]


def test_unicode_line_separators_inside_a_text_do_not_split_its_row(tmp_path):
    path = write(tmp_path, json.dumps(row("one\u2028two\x85three"), ensure_ascii=False))
    assert load_problems(path, on_bad_rows="error").problems[0].question == "one\u2028two\x85three"


BAD_LINES = {
    '{"question": "a", "answer"': "is not valid JSON (Expecting ':' delimiter at column 27)",
    "[" * 100_000: "is not valid JSON",
    '{"question": ' + "9" * 5000 + "}": "is not valid JSON",
    '["a", "b"]': "is not a JSON object",
    '{"question": "a"}': 'has no "answer" (its keys: question)',
    '{"problem": "a", "answer": "#### 1"}': 'has no "question" (its keys: problem, answer)',
    '{"question": 3, "answer": "#### 1"}': '"question" is of type int, expected a text',
    '{"question": "a", "answer": null}': '"answer" is of type NoneType, expected a text',
    '{"question": " \\n", "answer": "#### 1"}': '"question" is blank',
    '{"question": "a", "answer": "It is 1."}': '"answer" does not end in one "#### number" line',
    '{"question": "a", "answer": "#### one"}': '"answer" does not end in one "#### number" line',
    '{"question": "a", "answer": "#### 1\\n#### 1"}': '"answer" does not end in one "#### number" line',
    '{"question": "a\\ud83d", "answer": "#### 1"}': '"question" holds half of a surrogate pair',
    b'{"question": "\xff"}': "is not UTF-8 (byte 15 of the line)",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_bad_row_is_named_with_its_line_and_reason(tmp_path, line, reason):
    path = write(tmp_path, row("fine"), "", line)
    with pytest.raises(ProblemFileError) as error:
        load_problems(path, on_bad_rows="error")
    assert f"{path}:3: {reason}" in str(error.value)
    assert "bad rows: 1 of 2" in str(error.value)
    assert "--on-bad-rows=skip" in str(error.value)


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_skip_leaves_the_bad_row_out_and_reports_it(tmp_path, line, reason):
    path = write(tmp_path, row("first"), line, row("last"))
    loaded = load_problems(path, on_bad_rows="skip")
    assert [problem.id for problem in loaded.problems] == ["train-1", "train-3"]
    assert [bad.source for bad in loaded.skipped] == [f"{path}:2"]
    assert loaded.skipped[0].reason.startswith(reason)


def test_duplicate_question_names_the_first_line_whatever_the_white_space(tmp_path):
    path = write(tmp_path, row("How  many?"), row("other"), row(" How\tmany? "), row("How\nmany?"))
    loaded = load_problems(path, on_bad_rows="skip")
    assert [problem.id for problem in loaded.problems] == ["train-1", "train-2"]
    assert [bad.reason for bad in loaded.skipped] == 2 * [
        '"question" is the same as on line 1, expected each question once'
    ]


def test_question_of_a_bad_row_may_come_again(tmp_path):
    path = write(tmp_path, row("a", "no answer"), row("a"))
    assert [problem.id for problem in load_problems(path, on_bad_rows="skip").problems] == ["train-2"]


def test_error_lists_five_bad_rows_and_the_total(tmp_path):
    path = write(tmp_path, row("fine"), *["{"] * 7)
    with pytest.raises(ProblemFileError) as error:
        load_problems(path, on_bad_rows="error")
    message = str(error.value)
    assert [line for line in range(1, 9) if f"{path}:{line}:" in message] == [2, 3, 4, 5, 6]
    assert "bad rows: 7 of 8" in message
    assert "and 2 more" in message


def test_skip_with_nothing_left_is_an_error_that_does_not_advise_skipping(tmp_path):
    with pytest.raises(ProblemFileError, match="no good row is left") as error:
        load_problems(write(tmp_path, "{", "[]"), on_bad_rows="skip")
    assert "on-bad-rows" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("on_bad_rows", ["error", "skip"])
def test_file_without_rows_is_an_error(tmp_path, content, on_bad_rows):
    with pytest.raises(ProblemFileError, match=r"train\.jsonl: has no rows"):
        load_problems(write(tmp_path, content), on_bad_rows=on_bad_rows)


def test_file_that_cannot_be_read_is_named_with_the_cause(tmp_path):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    causes = {tmp_path / "none.jsonl": "No such file", tmp_path: "Is a directory", loop: "Too many levels"}
    for path, cause in causes.items():
        with pytest.raises(ProblemFileError) as error:
            load_problems(path, on_bad_rows="skip")
        assert str(error.value).startswith(f"{path}: cannot be read ({cause}")


def test_unknown_treatment_of_bad_rows_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="on_bad_rows is 'ignore', expected error or skip"):
        load_problems(write(tmp_path, ROBE), on_bad_rows="ignore")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.one_of(
    st.binary(max_size=20),
    st.sampled_from([row("a"), row("b"), row("c"), row("d", "x")]).map(lambda one: json.dumps(one).encode()),
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda some: st.lists(some, max_size=3)).map(
        lambda value: json.dumps(value).encode()),
)))
def test_every_row_of_a_random_file_is_either_loaded_or_reported(tmp_path, lines):
    path = tmp_path / "random.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    try:
        loaded = load_problems(path, on_bad_rows="skip")
    except ProblemFileError as error:
        assert "has no rows" in str(error) if not rows else f"bad rows: {len(rows)} of {len(rows)}" in str(error)
    else:
        assert len(loaded.problems) + len(loaded.skipped) == len(rows)
        assert 1 <= len(loaded.problems) <= 3
