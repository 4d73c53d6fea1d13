"""Files that appear whole or not at all, and sizes of files in words."""

import os
from pathlib import Path

import pytest

from nemo_edo.errors import UserError
from nemo_edo.utils.files import file_name, parse_size, read_mapping, replacing, temporary_name, write_text


def test_the_path_has_its_earlier_content_until_the_block_ends_and_keeps_it_after_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half of the n")
        raise KeyError
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])


def test_it_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("synced") or fsync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda *paths: events.append("replaced") or replace(*paths))
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert events == ["synced", "replaced"]


@pytest.mark.parametrize(("text", "expected"), [("500 mb", 5 * 10**8), ("2GiB", 2**31), ("1.5KB", 1500), ("123", 123)])
def test_sizes_are_read_as_transformers_reads_them(text: str, expected: int):
    assert parse_size("--max-shard-size", text) == expected


def test_what_a_killed_writer_left_or_a_planted_link_at_the_temporary_name_is_not_written_through(tmp_path: Path):
    (tmp_path / "outside").write_text("kept")
    temporary_name(tmp_path / "report.html").symlink_to(tmp_path / "outside")
    write_text(tmp_path / "report.html", "new")
    assert ((tmp_path / "outside").read_text(), (tmp_path / "report.html").read_text()) == ("kept", "new")


@pytest.mark.parametrize("text", ["a: &a [1, 1]\nb: *a", "a: " + "[" * 5000, "a: " + "9" * 5000, "- 1", "\x00"],
                         ids=["alias", "deep", "digits", "list", "nul"])
def test_yaml_that_no_program_of_ours_wrote_is_one_message(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml"):
        read_mapping(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["x" * 300, "a/../b", "nul\0", "lone \ud800", "é", ".hidden", ""])
def test_any_text_makes_a_files_name_of_its_own(tmp_path: Path, text: str):
    (tmp_path / f"{file_name(text)}.json").touch()
    assert [path.parent for path in tmp_path.rglob("*")] == [tmp_path]
    assert file_name(text) != file_name(f"{text}!") and file_name("plain-1") == "plain-1"
