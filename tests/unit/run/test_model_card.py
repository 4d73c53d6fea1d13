"""The card of an exported policy, and its upload to a hub."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError

from nemo_edo.config import DataConfig, ModelConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.run import model_card
from nemo_edo.run.model_card import HubRepository, write_card
from nemo_edo.run.stored_run import StoredRun
from nemo_edo.run_folder import RunFolder

EXPLORING = ["grpo.exploration_coefficient=0.05", "grpo.log_ratio_floor=-0.3", "sft.steps=7", "seed=3",
             "evaluation.bootstrap=50", "replicate_baseline=false"]


def card(folder: Path, **changes) -> ModelCard:
    run = RunFolder(folder / "run")
    (folder / "run" / "base").mkdir(parents=True, exist_ok=True)
    for arm, right in (("warmup", 1), ("grpo", 3)):
        rows = [{"greedy_accuracy": (float(n < right), 1.0), "vote@2": (n < right, 1), "vote@4": (n < right, 1)}
                for n in range(4)]
        run.write_evaluation(Evaluation.of_rows(arm, list("abcd"), rows))
    cfg = replace(
        compose_run("quickstart", [*EXPLORING, *changes.get("overrides", ()), "~arms", "+arms={grpo: {}}"]),
        model=changes.get("model", ModelConfig(architecture={"model_type": "llama"})),
        data=DataConfig(train="math", test="other"))
    out = folder / "out"
    out.mkdir(exist_ok=True)
    write_card(out, StoredRun(run, cfg), changes.get("policy", "grpo"), name="mine", adapter="adapter" in changes)
    return ModelCard.load(out / "README.md")


def test_a_card_has_method_coefficient_floor_data_and_metrics_with_their_intervals(tmp_path: Path):
    found = card(tmp_path)
    for part in ("(alpha * beta): 0.05", "log-ratios: -0.3", "math; seed 3", "7 steps",
                 "Exploration-Driven Optimization", 'AutoModelForCausalLM.from_pretrained("mine")', "not stated"):
        assert part in found.text
    [row] = [line for line in found.text.splitlines() if line.startswith("| vote@4")]
    assert row.startswith("| vote@4 | 0.250 [") and " 0.750 [" in row and "vote@2" not in found.text
    assert found.data.tags == ["nemo-edo", "ed-grpo"] and found.data.license is None


@pytest.mark.parametrize(("changes", "tag", "library"), [
    ({"overrides": ["grpo.exploration_coefficient=0"]}, "grpo", "transformers"), ({"adapter": True}, "ed-grpo", "peft"),
    ({"policy": "warmup"}, "supervised-fine-tuning", "transformers")])
def test_a_card_names_what_was_done(tmp_path: Path, changes, tag, library):
    found = card(tmp_path, **changes)
    assert found.data.tags[1] == tag and found.data.library_name == library
    assert ("Exploration-Driven" in found.text) == tag.startswith("ed-")


@pytest.mark.parametrize(("readme", "licence"), [
    ("---\nlicense: llama3.2\n---\n# Base", "llama3.2"), ("# Base", None), ("---\nlicense: [\n---\n", None)])
def test_the_licence_is_the_bases(tmp_path: Path, monkeypatch, readme, licence):
    base, model = tmp_path / "run" / "base", ModelConfig(path="owner/base")
    base.mkdir(parents=True)
    (base / "README.md").write_text(readme)
    (tmp_path / "run" / "report.html").write_text("<html>")
    monkeypatch.setattr(model_card, "model_folder", lambda *_: base)
    found = card(tmp_path, model=model)
    assert (found.data.license, found.data.base_model) == (licence, "owner/base")
    assert (tmp_path / "out" / "report.html").is_file() and "(report.html)" in found.text


def test_every_file_of_the_folder_is_uploaded_and_a_hub_that_refuses_is_named_before(monkeypatch, tmp_path: Path):
    files = {}

    def create_repo(api, name, exist_ok):
        if name != "me/mine":
            raise RepositoryNotFoundError("401 Unauthorized", response=mock.Mock(headers={}))
        return SimpleNamespace(repo_id=name)

    def upload_folder(api, repo_id, folder_path, commit_message):
        files.update({path.name: path.read_bytes() for path in folder_path.iterdir()})

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    card(tmp_path)
    (tmp_path / "out" / "config.json").write_text("{}")
    address = HubRepository("me/mine").upload(tmp_path / "out")
    assert address.endswith("me/mine") and files.keys() == {"README.md", "config.json"}
    with pytest.raises(UserError, match="--push-to-hub me/another: 401"):
        HubRepository("me/another")
