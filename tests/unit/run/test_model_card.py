"""The card of an exported policy, and its upload to a stand-in of the hub's API."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from nemo_edo.config import GRPOConfig
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.model_card import Exported, HubRepository, write_card

EXPLORING = GRPOConfig(exploration_coefficient=0.05, log_ratio_floor=-0.3)


def exported(folder: Path, **changes) -> Exported:
    run = RunFolder(folder / "run")
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "evaluations").mkdir(parents=True, exist_ok=True)
    for arm, right in (("warmup", 1), ("grpo", 3)):
        rows = [{"greedy_accuracy": (float(n < right), 1.0), "vote@2": (n < right, 1), "vote@4": (n < right, 1)}
                for n in range(4)]
        run.write_evaluation(Evaluation.of_rows(arm, list("abcd"), rows))
    settings = {"name": "mine", "run": run, "policy": "grpo", "training": EXPLORING, "sft_steps": 7, "data": "math",
                "seed": 3, "bootstrap": 50, "base": folder / "base", "hub_name": None, "adapter": False}
    return Exported(**{**settings, **changes})


def card(folder: Path, **changes) -> ModelCard:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    write_card(exported(folder, **changes), out)
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
    ({"training": GRPOConfig(alpha=0)}, "grpo", "transformers"), ({"adapter": True}, "ed-grpo", "peft"),
    ({"training": None, "policy": "warmup"}, "supervised-fine-tuning", "transformers")])
def test_a_card_names_what_was_done(tmp_path: Path, changes, tag, library):
    found = card(tmp_path, **changes)
    assert found.data.tags[1] == tag and found.data.library_name == library
    assert ("Exploration-Driven" in found.text) == tag.startswith("ed-")


@pytest.mark.parametrize(("readme", "licence"), [
    ("---\nlicense: llama3.2\n---\n# Base", "llama3.2"), ("# Base", None), ("---\nlicense: [\n---\n", None)])
def test_the_licence_is_the_bases(tmp_path: Path, readme, licence):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text(readme)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("<html>")
    found = card(tmp_path, hub_name="owner/base")
    assert (found.data.license, found.data.base_model) == (licence, "owner/base")
    assert (tmp_path / "out" / "report.html").is_file() and "(report.html)" in found.text


class Hub(BaseHTTPRequestHandler):
    """What ``create_repo`` and ``upload_folder`` ask of the hub, with files in the commit itself."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lines = [json.loads(line) for line in body.splitlines()] if self.path.endswith("commit/main") else []
        for line in lines:
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.url}/me/{json.loads(body)['name']}"})
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]
            return self.answer({"files": files})
        if lines:
            return self.answer({"commitUrl": f"{self.server.url}/me/mine/commit/abc", "commitOid": "a" * 40})
        return self.answer({})

    def do_GET(self):
        self.answer({"id": "me/mine", "sha": "a" * 40, "siblings": []})

    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200 if self.headers.get("Authorization") == "Bearer token" else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.files = f"http://127.0.0.1:{server.server_port}", {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
    yield server
    server.shutdown()


def test_every_file_of_the_folder_is_uploaded(hub, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "token")
    card(tmp_path)
    (tmp_path / "out" / "config.json").write_text("{}")
    address = HubRepository("me/mine").upload(tmp_path / "out")
    assert address.endswith("me/mine")
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", ["me/mine", "a//b c"])
def test_a_hub_that_refuses_is_named_before_anything_is_exported(hub, monkeypatch, name):
    monkeypatch.setenv("HF_TOKEN", "another" if name == "me/mine" else "token")
    with pytest.raises(UserError, match=f"--push-to-hub {name}"):
        HubRepository(name)
