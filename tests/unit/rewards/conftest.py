import pytest

from nemo_edo.rewards.verifier import MathVerifier
from nemo_edo.utils.worker_pool import Limits


@pytest.fixture(scope="session")
def verifier():
    """Generous limits: these tests are about verdicts, and a machine may be busy."""
    return MathVerifier(Limits(seconds=30, memory_mb=1024, workers=2))
