"""The memory estimates of split models against the tensors that two processes hold."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
LAYOUTS = [
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"use_distributed_optimizer": True},
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
EXPERT = {"expert_model_parallel_size": 2}
OF_EXPERTS = [EXPERT, {**EXPERT, "use_distributed_optimizer": True}, {"pipeline_model_parallel_size": 2},
              {"tensor_model_parallel_size": 2, "sequence_parallel": True},
              {**EXPERT, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}]
CASES = [(model, sizes) for sizes in LAYOUTS for model in ("qwen2", "qwen3")]
CASES += [("experts", sizes) for sizes in OF_EXPERTS]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py")))
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out") / "memory.json"
    tiny.write_tiny_model(models / "qwen2", tie_word_embeddings=True)
    tiny.write_tiny_model(models / "qwen3", "qwen3")
    tiny.write_tiny_model(models / "experts", "qwen3_moe", **EXPERTS)
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(HELPERS / "memory_worker.py"), str(models), str(out), json.dumps(CASES),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-8000:]
    return json.loads(out.read_text())


def test_every_rank_holds_the_estimated_weights_and_gradients_and_unless_split_optimizer_state(found):
    assert len(found) == 2 * len(CASES)
    for case in found:
        parts = ("weights", "gradients") if "distributed" in case["case"] else ("weights", "gradients", "optimizer")
        assert [case["measured"][part] for part in parts] == [case["estimated"][part] for part in parts], case["case"]


def test_the_distributed_optimizers_ranks_hold_the_estimated_state_together(found):
    """Shares differ by the padding of gradient buckets."""
    for model in ("qwen2", "qwen3", "experts"):
        ranks = [case for case in found if case["case"].startswith(model) and "distributed" in case["case"]]
        measured, estimated = (sum(case[side]["optimizer"] for case in ranks) for side in ("measured", "estimated"))
        assert len(ranks) == 2 and measured == estimated
