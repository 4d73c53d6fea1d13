import json
from pathlib import Path

import pytest

from nemo_edo.data.problems import ProblemFileError, load_problems
from nemo_edo.types import Problem

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
    assert load_problems(path, on_bad_rows="error").problems == [
        Problem("train-1", ROBE["question"], "It takes 2/2=1 bolt of white fiber\nSo the total is 2+1=3 bolts\n#### 3",
                "3", f"{path}:1"),
        Problem("train-2", HOUSE["question"], "So he made 200,000-130,000=$70,000\n#### 70,000", "70000", f"{path}:2")]


ROW_A, ROW_B = (json.dumps({"question": text, "answer": "#### 1"}).encode() for text in "ab")
SEPARATORS = "one\u2028two\x85three"


@pytest.mark.parametrize(("lines", "questions"), [
    (["", ROW_A, "  \t", ROW_B, ""], {"train-2": "a", "train-4": "b"}),
    ([b"\xef\xbb\xbf" + ROW_A + b"\r\n" + ROW_B + b"\r\n"], {"train-1": "a", "train-2": "b"}),
    ([json.dumps(row(SEPARATORS), ensure_ascii=False)], {"train-1": SEPARATORS}),
], ids=["blank lines count", "byte-order mark and carriage returns", "Unicode line separators in a text"])
def test_lines_end_at_line_feeds_alone(tmp_path, lines, questions):
    problems = load_problems(write(tmp_path, *lines), on_bad_rows="error").problems
    assert {problem.id: problem.question for problem in problems} == questions


BAD_LINES = {
    '{"question": "a", "answer"': "is not valid JSON (Expecting ':' delimiter at column 27)",
    "[" * 100_000: "is not valid JSON",
    '{"question": ' + "9" * 5000 + "}": "is not valid JSON",
    '["a", "b"]': "is not a JSON object",
    '{"question": "a"}': 'has no "answer" (its columns: question)',
    '{"problem": "a", "answer": "#### 1"}': 'has no "question" (its columns: problem, answer)',
    '{"question": 3, "answer": "#### 1"}': '"question" is 3 (int), expected a text',
    '{"question": "a", "answer": null}': 'has no "answer" (its columns: question, answer)',
    '{"question": " \\n", "answer": "#### 1"}': '"question" is blank',
    '{"question": "a", "answer": "#### one"}': '"answer" does not end in one "#### number" line',
    '{"question": "a", "answer": "#### 1\\n#### 1"}': '"answer" does not end in one "#### number" line',
    '{"question": "a\\ud83d", "answer": "#### 1"}': '"question" holds half of a surrogate pair',
    '{"question": "a", "answer": "#### 1", "answer": "#### 2"}': 'has the key "answer" twice; keep one of the two',
    '{"question": "a", "answer": "#### 1", "of": [{"a": 1, "a": 1}]}': 'has the key "a" twice',
    b'{"question": "\xff"}': "is not UTF-8 (byte 15 of the line)",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_a_bad_row_is_named_with_its_line_and_reason_and_skip_reports_it(tmp_path, line, reason):
    path = write(tmp_path, row("first"), "", line, row("last"))
    with pytest.raises(ProblemFileError) as error:
        load_problems(path, on_bad_rows="error")
    for part in (f"{path}:3: {reason}", "bad rows: 1 of 3", "--on-bad-rows=skip"):
        assert part in str(error.value)
    loaded = load_problems(path, on_bad_rows="skip")
    assert [problem.id for problem in loaded.problems] == ["train-1", "train-4"]
    assert [bad.source for bad in loaded.skipped] == [f"{path}:3"]
    assert loaded.skipped[0].reason.startswith(reason)


def test_duplicate_question_names_the_first_line_whatever_the_white_space(tmp_path):
    """A bad row's question does not count."""
    rows = row("How  many?", "bad"), row("How  many?"), row("other"), row(" How\tmany? "), row("How\nmany?")
    path = write(tmp_path, *rows)
    loaded = load_problems(path, on_bad_rows="skip")
    assert [problem.id for problem in loaded.problems] == ["train-2", "train-3"]
    assert [f'"question" is the same as in {path}:2,' in bad.reason for bad in loaded.skipped] == [False, True, True]


def test_a_folders_files_are_one_list_of_problems_whatever_their_names(tmp_path):
    for name, lines in (("a", [row("one"), "{"]), ("b", [row("two"), row("one")])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, *lines)
    loaded = load_problems(tmp_path, on_bad_rows="skip")
    assert [problem.id for problem in loaded.problems] == [f"{tmp_path.name}-1", f"{tmp_path.name}-3"]
    assert [problem.source for problem in loaded.problems] == [f"{tmp_path}/{name}/train.jsonl:1" for name in "ab"]
    assert [bad.source for bad in loaded.skipped] == [f"{tmp_path}/a/train.jsonl:2", f"{tmp_path}/b/train.jsonl:2"]
    assert f"the same as in {tmp_path}/a/train.jsonl:1," in loaded.skipped[1].reason
