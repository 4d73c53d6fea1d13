"""What the import of a Hugging Face folder takes of each process's memory."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
SHAPE = {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of 312 MB of which no layer has more than a twenty-fourth."""
    folder = tmp_path_factory.mktemp("model")
    runpy.run_path(str(HELPERS / "tiny_models.py"))["write_tiny_model"](folder, "llama", **SHAPE)
    return folder


@pytest.mark.parametrize("split", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_no_process_holds_the_whole_model_while_it_is_imported(folder, split):
    """Its own half is there before; what the import adds to it is a few tensors at a time."""
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(HELPERS / "import_worker.py"), str(folder), json.dumps(split)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-8000:]
    ranks = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["held"] == pytest.approx(whole / 2, rel=0.01)
        assert rank["grown"] < whole / 4
