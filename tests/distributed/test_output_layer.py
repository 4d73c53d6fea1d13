"""The fused head in Megatron's layouts over two gloo processes: this file, run again by torchrun, holds it against the
logits in each. That those are right is test_layouts.py's claim."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HELPERS = Path(__file__).parents[1] / "helpers"
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
MODELS = {"untied": False, "tied": True}


def measure(tiny: dict, folder: Path, sizes: dict) -> dict[str, dict[str, torch.Tensor]]:
    """What each head gives: values and gradients of one batch."""
    from nemo_edo.config import ParallelismConfig, PrecisionConfig
    from nemo_edo.losses import LossTerm
    from nemo_edo.megatron.forward_backward import MicroBatching
    from nemo_edo.megatron.policy import MegatronPolicy
    from nemo_edo.parallel import linear

    def loss(log_probs, entropies, micro):
        total = -((log_probs + 0.1 * entropies) * micro.advantages[:, None] * micro.mask).sum()
        return {"loss": LossTerm(total, micro.mask.sum())}, {}

    linear.BLOCK_ELEMENTS, linear.MIN_COLUMNS = {"cpu": 1}, 50  # two blocks on each process
    batch, cut = tiny["random_batch"](rows=5), {"micro_batching": MicroBatching(2), "temperature": 0.7}
    built, parallelism = tiny["build_policy"](folder, ParallelismConfig(**sizes)), ParallelismConfig(**sizes)
    results = {}
    for kind in ("logits", "fused"):
        policy = MegatronPolicy(built.built, parallelism, PrecisionConfig(), built.device, kind)
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy.forward_backward(batch, loss, loss_counts={"loss": float(batch.mask.sum())}, **cut)
        log_probs, entropies = policy.log_probs(batch, **cut)
        results[kind] = {"log_probs": log_probs, "entropies": entropies, **tiny["exported_gradients"](policy)}
    return results


def main(models: Path) -> None:
    from nemo_edo.megatron import platform

    tiny = runpy.run_path(str(HELPERS / "tiny_models.py"))
    platform.init_process_group(torch.device("cpu"))
    results = {
        (layout, model): measure(tiny, models / model, sizes) for layout, sizes in LAYOUTS.items() for model in MODELS
    }
    tiny["leave"](results, models / "results.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    models = tmp_path_factory.mktemp("models")
    for name, tied in MODELS.items():
        runpy.run_path(str(HELPERS / "tiny_models.py"))["write_tiny_model"](models / name, tie_word_embeddings=tied)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*command, __file__, str(models)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-8000:]
    return torch.load(models / "results.pt")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_of_the_fused_head_are_those_of_the_logits(results, layout, model):
    found, expected = (results[layout, model][kind] for kind in ("fused", "logits"))
    assert found.keys() == expected.keys() and len(found) > 10
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        assert scale > 0, f"{name} is 0: nothing to compare"
        error = float((found[name] - tensor).abs().max()) / scale
        assert error < 1e-5, f"{name} is off by {error} of its largest element"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
