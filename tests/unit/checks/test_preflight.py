"""What a command checks before torch is imported and a folder is made, and how ``parallelism=auto`` is fitted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.problem_files import ROWS, problem_overrides
from helpers.tiny_models import write_tiny_model
from huggingface_hub import constants

from nemo_edo.checks.preflight import preflight, with_fitted_parallelism
from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.data.model_folder import find_model
from nemo_edo.errors import UserError

GB = 10**9
COMMANDS = """
import json, sys
from nemo_edo.cli import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), "torch" in sys.modules)
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that name a model and problems."""
    problems = problem_overrides(tmp_path, train=ROWS[:3], test=ROWS[3:])
    return [f"model.path={write_tiny_model(tmp_path / 'model')}", *problems]


def test_processes_and_files_are_checked_before_torch_is_imported_and_a_folder_made(files, tmp_path):
    damaged = shutil.copytree(tmp_path / "model", tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unheard"}}')
    said = {
        "parallelism=tp4": "tensor_model_parallel_size 4 needs a multiple of 4 processes, got 1",
        f"data.train={tmp_path}/none.jsonl": f"data.train is '{tmp_path}/none.jsonl': there is no such file or folder",
        f"data.test={tmp_path}/none.jsonl": "data.test is ",
        f"model.path={tmp_path}/none": f"{tmp_path}/none is not a Hugging Face model folder",
        f"model.path={damaged}": f"the tokenizer of {damaged} cannot be loaded",
        "model.path=owner/name": "HF_HUB_OFFLINE forbids a download; check the name, or copy the model's folder here",
        "model.seq_length=5000": "has max_position_embeddings 64: set model.seq_length to at most that",
    }
    commands = [["train", "--config-name=grpo_gsm8k", *files, f"output_dir={tmp_path}/runs", wrong] for wrong in said]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1",
                   "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", COMMANDS, json.dumps(commands)], env=environment, capture_output=True,
                          text=True, timeout=300)
    assert done.stdout.splitlines() == ["2 False"] * len(said), done.stderr
    for message, line in zip(said.values(), done.stderr.splitlines(), strict=True):
        assert line.startswith("nemo-edo: error: ") and message in line
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub's, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_models_name_on_the_hub_is_its_snapshot_in_the_cache_if_that_is_complete(cache: Path, files):
    """The cache's layout: models--OWNER--NAME with refs/main, blobs, and snapshots/COMMIT of links to these."""
    entry, commit = cache / "models--owner--name", "0123abcd" * 5
    snapshot = entry / "snapshots" / commit
    for folder in (entry / "refs", entry / "blobs", snapshot):
        folder.mkdir(parents=True)
    (entry / "refs" / "main").write_text(commit)
    for place, file in enumerate(sorted(Path(files[0].partition("=")[2]).iterdir())):
        shutil.copy(file, entry / "blobs" / str(place))
        (snapshot / file.name).symlink_to(f"../../blobs/{place}")
    assert find_model("owner/name") == snapshot
    short = ["model.seq_length=64", "sampling.max_new_tokens=8"]
    cfg = compose_run("grpo_gsm8k", [*files, "model.path=owner/name", *short])
    assert preflight(cfg).model.path == "owner/name", "another machine has its cache elsewhere"
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match="hub.* has no complete model of that name, and HF_HUB_OFFLINE forbids"):
        find_model("owner/name")
    assert find_model(str(cache / "none")) == cache / "none", "no name on the hub: whoever reads the folder says so"


def test_a_network_that_breaks_down_is_a_message(cache: Path, monkeypatch):
    def fails(*_, local_files_only, **__):
        raise OSError if local_files_only else httpx.RemoteProtocolError("peer closed the connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"a download fails \(RemoteProtocolError\)"):
        find_model("OWNER/NAME")


QWEN_7B = ModelShape(num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28, num_query_groups=4,
                     kv_channels=128, vocab_size=152064, tied=False, qkv_bias=True, qk_norm=False)


def auto(*overrides: str) -> RunConfig:
    needed = ["model.path=x", "data.train=x", "data.test=x", "model.seq_length=1024", "generation.max_batch_size=8"]
    return compose_run("grpo_gsm8k", [*needed, *overrides])


@pytest.mark.parametrize(("world", "local", "gb", "size", "shards"), [
    (1, 1, 80, 1, False),  # it does not fit, and there is nothing to split it over
    (8, 8, 1000, 1, False), (8, 8, 120, 1, True), (8, 8, 60, 4, False), (8, 8, 1, 4, True),  # 4 query groups
    (8, 2, 40, 2, True),  # within a node
    (3, 3, 80, 1, True), (6, 6, 80, 2, True),
])
def test_auto_splits_a_model_over_as_few_processes_as_it_fits_on_and_the_rest_is_data_parallel(
        world, local, gb, size, shards):
    """And the optimizer's state over those, rather than layers."""
    found = with_fitted_parallelism(auto(), QWEN_7B, world, local, gb * GB).parallelism
    assert (found.tensor_model_parallel_size, found.sequence_parallel) == (size, size > 1)
    assert found.use_distributed_optimizer == shards
    if gb == 1:
        with pytest.raises(UserError, match="tensor_model_parallel_size=4"):
            with_fitted_parallelism(auto(), QWEN_7B, world, local, gb * GB, must_fit=True)


def test_auto_does_not_split_for_rows_that_decoding_takes_only_where_there_is_room():
    long = ["model.seq_length=8392", "sampling.max_new_tokens=8192", "grpo.micro_batch_tokens=8392"]
    of_few, of_auto = (
        with_fitted_parallelism(auto(*long, f"generation.max_batch_size={rows}"), QWEN_7B, 8, 8, 85 * GB, must_fit=True)
        for rows in (16, "auto")
    )
    assert of_few.parallelism == of_auto.parallelism


def test_auto_leaves_a_given_size_alone_and_names_what_makes_every_size_impossible():
    given = auto("parallelism=tp4")
    assert with_fitted_parallelism(given, QWEN_7B, 8, 8, GB) is given
    with pytest.raises(UserError, match="pipeline_model_parallel_size 3 needs a multiple of 3 processes, got 8"):
        with_fitted_parallelism(auto("parallelism.pipeline_model_parallel_size=3"), QWEN_7B, 8, 8, GB)
