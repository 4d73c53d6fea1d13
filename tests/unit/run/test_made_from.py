"""What a run was made from is compared by content: whatever file changes, its setting is named."""

import os
import shutil
from pathlib import Path

import pytest

from nemo_edo.config.compose import compose_run
from nemo_edo.errors import UserError
from nemo_edo.run import made_from
from nemo_edo.run.inputs import input_files
from nemo_edo.run.made_from import MadeFrom


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch):
    """A config whose inputs are in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.jsonl", "warm.jsonl", "template.jinja", "model/model.safetensors",
                 "model/config.json", "model/README.md", "given/grpo/iter_00000/rank_0_of_2.parquet",
                 "given/grpo/iter_00000/rank_1_of_2.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"of {name}")
    (tmp_path / "rewarding").mkdir()
    (tmp_path / "rewarding" / "__init__.py").touch()
    (tmp_path / "rewarding" / "rule.py").write_text("def score(response):\n    from .deep import one\n")
    (tmp_path / "rewarding" / "deep.py").write_text("import far\none = 1\n")
    (tmp_path / "far.py").write_text("import os, nemo_edo.types\n")
    (tmp_path / "credit.py").write_text("")
    return compose_run("quickstart", [
        "data.train=train.jsonl", "data.test=test.jsonl", "data.warmup=warm.jsonl", "data.chat_template=template.jinja",
        "model.path=model", "model.architecture=null", "rewards.function=rewarding.rule:score", "train.rollouts=given",
        "~arms", "+arms={grpo: {advantage: 'credit:ranks'}}", "grpo.iterations=1", "replicate_baseline=false",
    ])  # fmt: skip


def of(cfg, noted, harmless=()) -> MadeFrom:
    return MadeFrom(input_files(cfg), noted, cfg.allow_changed, harmless)


@pytest.mark.parametrize(("file", "setting"), [
    ("train.jsonl", "data.train"), ("test.jsonl", "data.test"), ("warm.jsonl", "data.warmup"),
    ("template.jinja", "data.chat_template"), ("model/model.safetensors", "model.path"),
    ("model/config.json", "model.path"), ("rewarding/rule.py", "rewards.function"), ("far.py", "rewards.function"),
    ("rewarding/deep.py", "rewards.function"), ("credit.py", "arms.grpo.advantage"),
    ("given/grpo/iter_00000/rank_1_of_2.parquet", "train.rollouts"),
])  # fmt: skip
def test_a_changed_or_missing_file_stops_the_run_unless_its_setting_is_allowed(cfg, capsys, file: str, setting: str):
    began = of(cfg, {})
    noted = began.notes()
    os.utime(file)  # another time and the same content
    of(cfg, noted).require_unchanged()
    with Path(file).open("a") as opened:
        opened.write("#")
    for one in (lambda: of(cfg, noted), began.require_unchanged):
        with pytest.raises(UserError, match=rf"{Path(file).name}.*allow_changed=\[{setting}\]"):
            one()
    cfg.allow_changed = [setting]
    resumed = of(cfg, noted)
    assert len(resumed.changed) == 1 and resumed.changed[0] in capsys.readouterr().err
    cfg.allow_changed = []
    assert of(cfg, resumed.notes()).changed == []
    noted = resumed.notes()
    Path(file).unlink()
    with pytest.raises(UserError, match=rf"{setting}: .*{file} .*is missing"):
        of(cfg, noted)


def test_what_reaches_no_number_is_a_warning_and_contents_are_read_once(cfg, monkeypatch):
    noted = of(cfg, {}).notes()
    with monkeypatch.context() as patched:
        patched.setattr(made_from, "checksum", lambda path: pytest.fail(f"{path} is read again"))
        of(cfg, noted).notes()
    Path("model/README.md").write_text("no input")
    Path("warm.jsonl").write_text("other")
    [said] = of(cfg, noted, ["data.warmup"]).changed
    assert said.startswith("data.warmup: warm.jsonl has other content")
    cfg.allow_changed = ["data.tset"]
    with pytest.raises(UserError, match="did you mean data.test"):
        of(cfg, noted)


def test_a_copy_of_everything_elsewhere_is_the_same(cfg, tmp_path, monkeypatch):
    noted = of(cfg, {}).notes()
    shutil.copytree(tmp_path, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    assert of(cfg, noted).changed == []
