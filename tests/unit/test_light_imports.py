"""The losses, metrics and test-time methods serve any trainer: they work in an environment of torch and NumPy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nemo_edo

USE = """
import torch
import nemo_edo.losses, nemo_edo.metrics, nemo_edo.test_time

x = torch.full((2, 3), -1.0, requires_grad=True)
one, advantages = torch.ones(2, 3), nemo_edo.losses.group_advantages(torch.tensor([0.0, 1.0]), [0, 0])
config = nemo_edo.losses.GRPOLossConfig()
loss, _ = nemo_edo.losses.grpo_loss(x, x.detach(), x.detach(), advantages, one, config)
loss.mean().backward()
assert x.grad.abs().sum() > 0

assert nemo_edo.metrics.distinct_n(["a b c d e", "a b c d f"], n=4) == 0.75
assert nemo_edo.test_time.majority_vote(["2", "3", "2", None]) == "2"
posterior = nemo_edo.test_time.PosteriorVariance(2, prior_precision=1.0, noise_variance=0.5)
posterior.observe(torch.tensor([1.0, 0.0]))
assert abs(float(posterior.variance(torch.tensor([1.0, 0.0]))) - (0.5 / 1.5 + 0.5)) < 1e-6
"""
RUN = """
import json, sys
sys.path.append(sys.argv[1])
exec(sys.argv[2])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__mp_main__"})))
"""


def with_requirements(*names: str) -> dict[str, Distribution]:
    """The distributions of the running environment and what they declare to need here, extras left out."""
    found, wanted = {}, list(names)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = distribution(name)
            needs = [Requirement(line) for line in found[name].requires or []]
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def torch_and_numpy(tmp_path_factory) -> Path:
    """A site folder with links to them, to what torch needs, and to this package."""
    site = tmp_path_factory.mktemp("site")
    (site / "nemo_edo").symlink_to(Path(nemo_edo.__file__).parent)
    for found in with_requirements("torch", "numpy").values():
        tops = {file.parts[0] for file in found.files} - {"..", "__pycache__"}
        for top in tops - {link.name for link in site.iterdir()}:
            (site / top).symlink_to(found.locate_file(top))
    return site


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter that sees the standard library and the site folder; prints what else it has loaded."""
    command = [sys.executable, "-I", "-S", "-c", RUN, str(site), code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_losses_metrics_and_test_time_work_with_torch_and_numpy_alone(torch_and_numpy: Path):
    result = run(torch_and_numpy, USE)
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout))
    assert loaded >= {"nemo_edo", "numpy", "torch"}
    heavy = {"megatron", "nemo", "lightning", "transformers", "accelerate", "datasets", "vllm", "hydra", "omegaconf"}
    assert not loaded & (heavy | {"scipy", "pandas", "nltk", "httpx", "requests", "urllib3", "aiohttp"})


@pytest.mark.parametrize("name", ["transformers", "omegaconf", "scipy", "nemo_edo.configuration"])
def test_that_environment_lacks_what_the_rest_of_the_package_needs(torch_and_numpy: Path, name: str):
    result = run(torch_and_numpy, f"import {name}")
    assert result.returncode == 1 and "ModuleNotFoundError" in result.stderr
