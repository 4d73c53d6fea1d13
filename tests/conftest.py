"""What this machine cannot run is skipped with a reason, and the last lines of a run list it."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.cli import Cli
from hypothesis import HealthCheck, settings
from peer_environment import NoPackageIndex, peer_environment

# A busy machine generates inputs slowly, and slowness is no failure. Every run has the same inputs, so that a failure
# comes from a change; --hypothesis-profile=new generates others.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **SLOW)
settings.register_profile("new", **SLOW)
settings.load_profile("same")

# What a shell runs in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Of all processes that tests start. More threads would compete for the cores of a small machine; torch reads their
# number as it is imported.
os.environ["PYTHONPATH"] = os.pathsep.join(
    map(str, (ROOT, TESTS, ROOT / "tools" / "docs", ROOT / "tools" / "benchmarks")))
os.environ["OMP_NUM_THREADS"] = "1"
FIRST = ("tests/slurm", "tests/chaos", "tests/rehearsal", "tests/distributed", "tests/servers", "tests/e2e",
         "tests/peers")
"""Folders whose files take minutes: what begins last is to be short, since other processes then have nothing to do."""


def pytest_configure(config: pytest.Config) -> None:
    """Megatron is imported as commands import it on a CPU, before a test module does it in another way: what its
    kernels are compiled with is chosen then, and not every machine has a compiler."""
    collects = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if collects and find_spec("megatron") is not None and not Path("/dev/nvidiactl").exists():
        from nemo_edo.megatron.cpu.without_cuda import fused_kernels
        from nemo_edo.megatron.platform import NEVER_USED, unimportable

        with unimportable(NEVER_USED):
            fused_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(FIRST) if item.nodeid.startswith(name)), 99))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # only now: without GPU tests nobody need wait for it here

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def nemo_edo() -> Cli:
    """nemo_edo("train", ...): runs a command and returns its status and output."""
    return Cli()


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """The interpreter that has vLLM, in an environment that is built once (make vllm-env) and kept in the checkout."""
    try:
        return peer_environment("vllm")
    except NoPackageIndex as error:
        pytest.skip(str(error))
