"""Which parts of the package are installed, from its metadata; in an installation without the trainer too."""

import sys

import pytest

import nemo_edo
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


def test_doctor_of_an_installation_of_the_functions_alone_lists_the_parts(with_packages, monkeypatch, capsys):
    with_packages(*FUNCTIONS, "trl")
    monkeypatch.setitem(sys.modules, "nemo_edo.checks.doctor", None)  # its import fails as without Hydra
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "functions    losses, metrics, test_time, adapters: torch 1, numpy 1",
        f"trainer      not installed (hydra-core and 2 more are missing): {TRAINER}",
        f"bridge       not installed (megatron-bridge is missing): {BRIDGE}",
        "adapted      trl 1 (of trl, verl, nemo-rl, slime, prime-rl)",
    ]
    assert main(["doctor", "--config-name", "quickstart"]) == 2  # of a config it can say nothing
    assert TRAINER in capsys.readouterr().err


def test_runs_from_python_say_it_too(with_packages, monkeypatch):
    with_packages(*FUNCTIONS)
    monkeypatch.setitem(sys.modules, "nemo_edo.api", None)
    with pytest.raises(ImportError, match="^nemo_edo.train needs nemo_edo.api, and the trainer is "):
        _ = nemo_edo.train


def test_the_python_of_the_trainer_is_named_where_this_is_another(monkeypatch):
    for version, words in (((3, 10), " on Python 3.12"), ((3, 12), ""), ((3, 14), " on Python 3.12")):
        monkeypatch.setattr(parts.sys, "version_info", (*version, 0))
        assert parts._on_its_python() == words
