"""Which parts of the package are installed, from its metadata; in an installation without the trainer too."""


import pytest

from nemo_edo.checks import installed as parts
from nemo_edo.cli import entry, main

DECLARED = [
    "numpy>=1.24", "torch>=2.6", "megatron-bridge<0.4,>=0.3.1; extra == 'bridge'",
    "hydra-core<1.4,>=1.3.2; extra == 'trainer'", "nemo-toolkit[core]>=3; extra == \"trainer\"",
    "triton>=3.0; (sys_platform == 'linux') and extra == 'trainer'",
]  # fmt: skip
TRAINER = 'pip install "nemo-edo[trainer]"'
BRIDGE = "pip install --no-deps 'megatron-bridge<0.4,>=0.3.1'"


@pytest.fixture
def with_packages(monkeypatch):
    """An environment with these packages alone, of version 1, on a Python that the trainer runs on."""

    def install(*names: str) -> None:
        def version(name: str) -> str:
            if name not in names:
                raise parts.PackageNotFoundError(name)
            return "1"

        monkeypatch.setattr(parts, "requires", lambda name: DECLARED)
        monkeypatch.setattr(parts, "version", version)
        monkeypatch.setattr(parts, "_on_its_python", lambda: "")

    return install


FUNCTIONS = ("numpy", "torch")


@pytest.mark.parametrize(("installed", "sentence"), [
    (FUNCTIONS, f"the trainer is not installed here (hydra-core and 2 more are missing): {TRAINER} and {BRIDGE}"),
    ((*FUNCTIONS, "hydra-core", "nemo-toolkit", "triton"),
     f"the trainer is not installed here (megatron-bridge is missing): {BRIDGE}"),
    ((*FUNCTIONS, "hydra-core", "nemo-toolkit", "triton", "megatron-bridge"), None),
])
def test_a_command_that_needs_the_trainer_says_in_one_sentence_what_installs_it(
    with_packages, monkeypatch, capsys, installed, sentence
):
    with_packages(*installed)
    assert parts.what_trainer_lacks() == sentence

    def train(*_):
        raise ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")

    monkeypatch.setitem(entry.RUN, "train", train)
    if sentence is None:
        with pytest.raises(ModuleNotFoundError):
            main(["train"])
    else:
        assert main(["train"]) == 2
        assert capsys.readouterr().err == f"nemo-edo: error: train needs omegaconf, and {sentence}\n"
