"""What a run's summary says of the code that it ran."""

import subprocess
from pathlib import Path

from nemo_edo.run import summary


def test_the_commit_has_a_plus_where_the_package_differs_and_not_where_other_files_do(tmp_path: Path, monkeypatch):
    source, table = tmp_path / "package" / "run" / "summary.py", tmp_path / "docs" / "table.csv"
    for file in (source, table):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(summary, "__file__", str(source))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    table.write_text("one more row")
    assert summary._commit() == head
    source.write_text("changed")
    assert summary._commit() == f"{head}+"
