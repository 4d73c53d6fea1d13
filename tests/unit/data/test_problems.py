"""Problems from GSM8K's files, from columns of any names, from a data set on disk, and from a function."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from nemo_edo.config import Columns, DataConfig
from nemo_edo.data.problems import MADE, ProblemFileError, load_problems, made_problems, write_problems
from nemo_edo.errors import UserError
from nemo_edo.types import Problem


def write_lines(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def row(question: str, answer: str = "#### 1") -> str:
    return json.dumps({"question": question, "answer": answer}, ensure_ascii=False)


def test_gsm8k_rows_load_without_annotations_and_with_canonical_answers(tmp_path):
    question = "Josh’s house costs $80,000 {sic}. What is his profit?"
    solution = "In 2/2=<<2/2=1>>1 year\nmade 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70,000"
    path = write_lines(tmp_path, row(question, solution))
    assert load_problems(path, DataConfig()).problems == [
        Problem("train-1", question, "In 2/2=1 year\nmade 200,000-130,000=$70,000\n#### 70,000", "70000", f"{path}:1")]


SEPARATORS = "one\u2028two\x85three"


@pytest.mark.parametrize(("lines", "questions"), [
    (["", row("a"), "  \t", row("b"), ""], {"train-2": "a", "train-4": "b"}),
    ([f"\ufeff{row('a')}\r\n{row('b')}\r\n"], {"train-1": "a", "train-2": "b"}),
    ([row(SEPARATORS)], {"train-1": SEPARATORS}),
], ids=["blank lines count", "byte-order mark and carriage returns", "Unicode line separators in a text"])
def test_lines_end_at_line_feeds_alone(tmp_path, lines, questions):
    problems = load_problems(write_lines(tmp_path, *lines), DataConfig()).problems
    assert {problem.id: problem.question for problem in problems} == questions


BAD_LINES = {
    '{"question": "a", "answer"': "is not valid JSON (Expecting ':' delimiter at column 27)",
    '{"question": "a"}': 'has no "answer" (its columns: question)',
    '{"question": "a", "answer": "#### 1", "of": [{"a": 1, "a": 1}]}': 'has the key "a" twice',
    '{"question": 3, "answer": "#### 1"}': '"question" is 3 (int), expected a text',
    '{"question": " \\n", "answer": "#### 1"}': '"question" is blank',
    '{"question": "a", "answer": "#### one"}': '"answer" does not end in one "#### number" line',
    '{"question": "a\\ud83d", "answer": "#### 1"}': '"question" holds half of a surrogate pair',
    b'{"question": "\xff"}': "is not UTF-8 (byte 15 of the line)",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_a_bad_row_is_named_with_its_line_and_reason_and_skip_reports_it(tmp_path, line, reason):
    path = write_lines(tmp_path, row("first"), "", line, row("last"))
    with pytest.raises(ProblemFileError) as error:
        load_problems(path, DataConfig())
    for part in (f"{path}:3: {reason}", "bad rows: 1 of 3", "--on-bad-rows=skip"):
        assert part in str(error.value)
    loaded = load_problems(path, DataConfig(on_bad_rows="skip"))
    assert [problem.id for problem in loaded.problems] == ["train-1", "train-4"]
    assert len(loaded.skipped) == 1 and loaded.skipped[0].startswith(f"{path}:3: {reason}")


def test_duplicate_question_names_the_first_line_whatever_the_white_space(tmp_path):
    """A bad row's question does not count."""
    rows = row("How  many?", "bad"), row("How  many?"), row("other"), row(" How\tmany? "), row("How\nmany?")
    path = write_lines(tmp_path, *rows)
    loaded = load_problems(path, DataConfig(on_bad_rows="skip"))
    assert [problem.id for problem in loaded.problems] == ["train-2", "train-3"]
    assert [f'"question" is the same as in {path}:2,' in bad for bad in loaded.skipped] == [False, True, True]


def test_a_folders_files_are_one_list_of_problems_whatever_their_names_without_hidden_ones_and_descriptions(tmp_path):
    files = {"a": [row("one"), "{"], "b": [row("two"), row("one")], ".ipynb_checkpoints": ["{"]}
    for name, lines in files.items():
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name, *lines)
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    loaded = load_problems(tmp_path, DataConfig(on_bad_rows="skip"))
    assert [problem.id for problem in loaded.problems] == [f"{tmp_path.name}-1", f"{tmp_path.name}-3"]
    assert [problem.source for problem in loaded.problems] == [f"{tmp_path}/{name}/train.jsonl:1" for name in "ab"]
    assert [bad.split(": ")[0] for bad in loaded.skipped] == [f"{tmp_path}/{name}/train.jsonl:2" for name in "ab"]
    assert f"the same as in {tmp_path}/a/train.jsonl:1," in loaded.skipped[1]


ROWS = [{"problem": "1 + 1", "gold": "2", "level": 3, "tags": {"kinds": ["sum"], "seen": None}},
        {"problem": "Which?", "gold": "the second", "level": None, "tags": {"kinds": [], "seen": 1.5}}]
NAMED = Columns(question="problem", answer="gold")


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["some.jsonl", "some.parquet", "some"])
def test_files_and_saved_data_sets_give_the_same_problems_with_named_columns_and_as_gsm8ks_rows(tmp_path, name: str):
    path = write(tmp_path / name, ROWS)
    found = load_problems(path, DataConfig(columns=NAMED)).problems
    assert [(p.id, p.question, p.answer, p.answer_kind, p.solution) for p in found] == [
        ("some-1", "1 + 1", "2", "number", ""), ("some-2", "Which?", "the second", "math", "")]  # fmt: skip
    assert [dict(p.metadata) for p in found] == [
        {"level": row["level"], "tags": row["tags"]} for row in ROWS]  # fmt: skip
    assert found[1].source == (f"{path}:2" if name.endswith("jsonl") else f"{path}:row 2")
    row = {"question": "1 + 1", "answer": "1 + 1 = <<1+1=2>>2\n#### 2", "id": 7}
    [found] = load_problems(write(tmp_path / f"as_{name}", [row]), DataConfig()).problems
    assert (found.answer, found.solution, found.metadata) == ("2", "1 + 1 = 2\n#### 2", {"id": 7})


@pytest.mark.parametrize(("rows", "columns", "message"), [
    ([{"problems": "x", "gold": "2"}], NAMED,
     'has no column "problem" (data.columns.question); did you mean problems? (its columns: problems, gold)'),
    ([{"prompt": "x"}], Columns(answer="prompt"), 'has no column "question" (its columns: prompt); other columns are'),
    ([{"problem": "x", "gold": None}], NAMED, '"gold" is null, expected a text or a whole number'),
    ([{"problem": [{"role": "user", "content": [{"type": "image"}]}], "gold": "2"}], NAMED,
     '"problem[0].content[0]" is'),
    ([{"problem": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "gold": "2"}], NAMED,
     "\"problem\" ends with a message of the role 'assistant'"),
    ([{"problem": "x", "id": "a"}, {"problem": "y", "id": "a"}], Columns(question="problem", id="id"),
     "has the id odd-a, as {path}:row 1 has"),
])  # fmt: skip
def test_an_odd_column_is_named_with_its_file_and_row(tmp_path: Path, rows, columns, message):
    path = write(tmp_path / "odd.parquet", rows)
    with pytest.raises(UserError) as refused:
        load_problems(path, DataConfig(columns=columns))
    assert f"{path}:row {len(rows)}: {message.format(path=path)}" in str(refused.value)


def test_a_column_that_nobody_named_refuses_no_file_and_a_whole_number_may_be_a_float(tmp_path: Path):
    when = datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)
    row = {"problem": "x", "gold": 2.0, "at": when, "day": when.date(), "price": Decimal("1.50"), "raw": b"x"}
    table = pa.Table.from_pylist([row]).append_column("ns", pa.array([1], pa.timestamp("ns")))
    pq.write_table(table, tmp_path / "odd.parquet")
    [found] = load_problems(tmp_path / "odd.parquet", DataConfig(columns=NAMED)).problems
    assert (found.answer, found.answer_kind) == ("2", "number")
    assert found.metadata == {"gold": 2.0, "at": "2024-01-02 03:00:00.000000Z", "day": "2024-01-02",
                              "price": "1.50", "raw": None, "ns": "1970-01-01 00:00:00.000000001"}  # fmt: skip


def test_a_column_serves_one_purpose_and_optional_ones_that_nobody_named_may_be_empty(tmp_path: Path):
    rows = [{"prompt": "x", "solution": "$2$"}, {"prompt": "y", "solution": "3"}]
    found = load_problems(write(tmp_path / "trl.jsonl", rows), DataConfig(columns=Columns("prompt", "solution")))
    assert [(one.answer, one.solution) for one in found.problems] == [("$2$", ""), ("3", "")]
    rows = [{"problem": "x", "answer": "2", "solution": None, "id": None},
            {"problem": "y", "answer": "3", "solution": ["a", "b"]}]  # fmt: skip
    found = load_problems(write(tmp_path / "some.jsonl", rows), DataConfig(columns=Columns("problem")))
    assert [(one.id, one.answer, one.solution) for one in found.problems] == [("some-1", "2", ""), ("some-2", "3", "")]


def test_a_folder_has_one_split_and_lines_may_be_in_a_file_named_json(tmp_path: Path):
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines" / "a.jsonl", ROWS).rename(tmp_path / "lines" / "a.json")
    assert len(load_problems(tmp_path / "lines", DataConfig(columns=NAMED)).problems) == len(ROWS)
    for split in ("train", "test"):
        write(tmp_path / "lines" / f"{split}-00000-of-00001.jsonl", ROWS)
    for layout in ("lines", "hub", "MATH"):
        for split in ("train", "test"):
            name = f"{split}-00000-of-00001-5b0b4c3f.jsonl" if layout == "hub" else f"{split}/1.jsonl"
            (tmp_path / layout / name).parent.mkdir(parents=True, exist_ok=True)
            write(tmp_path / layout / name, ROWS)
        with pytest.raises(UserError, match="has files of the splits test and train; name those of one"):
            load_problems(tmp_path / layout, DataConfig(columns=NAMED))
    (tmp_path / "one" / "eval").mkdir(parents=True)
    write(tmp_path / "one" / "eval" / "test.jsonl", ROWS)
    assert len(load_problems(tmp_path / "one", DataConfig(columns=NAMED)).problems) == len(ROWS)


@pytest.mark.parametrize("names", [("train", "val"), ("gsm8k_train", "gsm8k_test"), ("train_prefs-0", "test_prefs-0")])
def test_splits_are_told_apart_by_the_names_that_people_give_them(tmp_path: Path, names):
    for name in names:
        write(tmp_path / f"{name}.parquet", ROWS)
    with pytest.raises(UserError, match="has files of the splits"):
        load_problems(tmp_path, DataConfig(columns=NAMED))


def test_a_folder_of_parquet_is_read_once_and_rows_with_images_are_bad_ones(tmp_path: Path):
    (tmp_path / "data" / "train.parquet").mkdir(parents=True)
    image = {"image": {"bytes": b"x", "path": None}, "image_count": 1}
    write(tmp_path / "data" / "train.parquet" / "part-0.parquet", [{**ROWS[0], **image}, {**ROWS[1], "image": None}])
    loaded = load_problems(tmp_path / "data", DataConfig(columns=NAMED, on_bad_rows="skip"))
    [found] = loaded.problems
    assert found.question == ROWS[1]["problem"] and found.metadata["image_count"] is None
    assert len(loaded.skipped) == 1 and 'has an image in "image"' in loaded.skipped[0]


def test_an_object_of_several_lines_with_a_mistake_is_one_bad_row_and_so_is_a_line_of_many(tmp_path: Path):
    good = json.dumps(ROWS[0])
    bad_line = f'{{"problem": "x", "gold": "1",}}\n{good}\n{good}'
    twice = '{\n "problem": "x",\n "gold": "1",\n "gold": "2"\n}'
    for name, text in (("1", good), ("2", twice), ("3", bad_line), ("4", f" {good}\n\n {good}"), ("5", f"{good}\n[2]")):
        (tmp_path / f"{name}.json").write_text(text)
    loaded = load_problems(tmp_path, DataConfig(columns=NAMED, on_bad_rows="skip"))
    assert len(loaded.problems) == 6
    assert loaded.skipped[0] == f'{tmp_path}/2.json: has the key "gold" twice; keep one of the two'
    assert loaded.skipped[1].startswith(f"{tmp_path}/3.json:1: is not valid JSON")


def test_a_list_is_one_problem_in_each_row_and_one_that_is_cut_is_not_valid_json(tmp_path: Path):
    path, (first, last) = tmp_path / "list.json", map(json.dumps, ROWS)
    path.write_text(f'[{first}, {{}} ,\n{{"problem": "y", "gold": "3", "gold": "4"}}, {last}]')
    loaded = load_problems(path, DataConfig(columns=NAMED, on_bad_rows="skip"))
    assert [problem.id for problem in loaded.problems] == ["list-1", "list-4"]
    assert loaded.skipped[0].startswith(f"{path}:row 2: ")
    assert loaded.skipped[1].startswith(f'{path}:row 3: has the key "gold" twice; keep one of the two')
    path.write_text(path.read_text()[:-5])
    with pytest.raises(UserError, match="list.json: is not valid JSON"):
        load_problems(path, DataConfig(columns=NAMED, on_bad_rows="skip"))


def test_a_data_set_with_splits_asks_for_one(tmp_path: Path):
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match="has the splits train, test; name one, such as .*/both/train"):
        load_problems(tmp_path / "both", DataConfig(columns=NAMED))
    [first, _] = load_problems(tmp_path / "both" / "test", DataConfig(columns=NAMED)).problems
    assert first.id == "test-1"


CODE = """
from nemo_edo.types import Problem

def make(size, *, fails=False):
    if fails: raise OSError("no network")
    rows = [{"question": f"{i}?", "answer": i, "id": f"q{i}", "level": i % 3} for i in range(size)]
    return {"train": iter(rows), "test": [Problem("own", "Why?", "", "so", "here", metadata={"hard": True})]}

def rows(): return [{"question": "1?"}]
def odd(): return {"test": [{"question": "1?"}, {"quest": "2?"}]}
def same(): return {"train": [Problem("a", "1?", "", "", "")], "test": [Problem("a", "2?", "", "", "")]}
"""


def test_a_functions_problems_are_kept_and_read_back_with_their_metadata(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").write_text(CODE)
    made = made_problems("my_data:make", {"size": 2}, Columns())
    assert [(p.id, p.answer, p.metadata, p.source) for p in made["train"]] == [
        ("train-q0", "0", {"id": "q0", "level": 0, "answer": 0}, "my_data:make train 1"),
        ("train-q1", "1", {"id": "q1", "level": 1, "answer": 1}, "my_data:make train 2")]  # fmt: skip
    for split, problems in made.items():
        path = tmp_path / f"{split}.jsonl"
        write_problems(path, problems, benchmark=MADE, split=split, source={}, skipped=0)
        assert load_problems(path, DataConfig()).problems == problems


@pytest.mark.parametrize(("path", "arguments", "message"), [
    ("my_data:make", {}, "data.source_args do not fit data.source (my_data:make): missing a required argument: 'size'"),
    ("my_data:make", {"size": 1, "siz": 2}, "got an unexpected keyword argument 'siz'; it is my_data:make(size, *,"),
    ("my_data:make", {"size": 1, "fails": True}, "data.source (my_data:make) raised OSError: no network (/"),
    ("my_data:rows", {}, 'returned list, expected {"train": problems, "test": problems}'),
    ("my_data:odd", {}, 'my_data:odd test 2: has no column "question"; did you mean quest?'),
    ("my_data:same", {}, "gave train and test problems the same id, such as a"),
    ("my_data:mak", {}, "my_data has no mak; did you mean make?"),
])  # fmt: skip
def test_a_source_that_fails_is_told_with_its_setting(tmp_path: Path, monkeypatch, path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").write_text(CODE)
    with pytest.raises(UserError) as refused:
        made_problems(path, arguments, Columns())
    assert "data.source" in str(refused.value) and message in str(refused.value)
