"""Context parallelism: a sequence that two gloo processes share is the sequence of one process.

Transformer Engine's attention for it needs a GPU; ``tests/helpers/context_worker.py`` has one that does not.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HELPERS = Path(__file__).parents[1] / "helpers"
LAYOUTS = ["context", "context, distributed optimizer"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    tiny = runpy.run_path(str(HELPERS / "tiny_models.py"))
    model = tiny["write_tiny_model"](folder / "model", "qwen3", num_hidden_layers=2)
    for launcher in ((), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")):
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, str(HELPERS / "context_worker.py"), str(model), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
        )
        assert finished.returncode == 0, finished.stderr[-8000:]
    return folder


def shares(out: Path) -> list[dict]:
    return [torch.load(out / f"shares {rank} of 2.pt") for rank in (0, 1)]


def test_a_rank_has_a_chunk_from_the_front_and_the_one_as_far_from_the_end(out):
    """Of four chunks of two positions each: their causal attention costs both ranks the same."""
    first, second = ([row["share"][line].tolist() for line in (0, 1)] for row in shares(out))
    assert first == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert second == [[2, 3, 4, 5], [10, 11, 12, 13]]


def test_gathered_shares_stand_where_they_were_taken_from(out):
    for found in shares(out):
        assert torch.equal(found["gathered"], 2 * torch.arange(16.0).view(2, 8))


def test_gradients_of_all_shares_add_up_to_that_of_the_whole(out):
    for found in shares(out):
        torch.testing.assert_close(found["gradient"], found["expected"])


@pytest.fixture(params=LAYOUTS)
def both(request, out) -> tuple[dict, dict]:
    return torch.load(out / "2.pt")[request.param], torch.load(out / "1.pt")[request.param]


def test_log_probs_and_entropies_are_those_of_one_process(both):
    for values in ("log_probs", "entropies"):
        assert both[1][values].abs().max() > 1
        torch.testing.assert_close(both[0][values], both[1][values], rtol=0, atol=1e-5)
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], rel=1e-5)


def test_gradients_and_steps_are_those_of_one_process(both):
    found, expected = both
    whole = max(gradient.abs().max() for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-5 * float(whole))
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, weight in expected["trained"].items():
        torch.testing.assert_close(found["trained"][name], weight, rtol=0, atol=1e-5)
