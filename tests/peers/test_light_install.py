"""The wheel in empty environments: the functions need torch, NumPy and SciPy alone, and the command says what else there is.

For the Python of these tests, torch, NumPy, the test tools and what they declare to need are linked from its
environment, and nothing else is. For other Pythons they are installed, in environments that are kept: on Linux, PyPI's
torch is several gigabytes, so it is done on demand (make test-pythons).
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from peer_environment import ROOT, UNREACHABLE

pytestmark = pytest.mark.peers
PACKAGES = ("losses", "metrics", "test_time")
HERE = "{}.{}".format(*sys.version_info)
PYTHONS = (HERE, *os.environ.get("LIGHT_PYTHONS", "").split())
TEST_TOOLS = ("pytest", "hypothesis", "scipy", "scikit-learn")
"""What the functions' tests import beside the functions."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "-w", folder, ROOT]
    built = subprocess.run(pip, capture_output=True, text=True)
    if UNREACHABLE.search(built.stderr):
        pytest.skip("no package index to install the build backend from")
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session", params=PYTHONS)
def python(request, wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel, what it declares to need, and the test tools."""
    version = request.param
    folder = tmp_path_factory.mktemp("light") if version == HERE else ROOT / f".venv-light-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        interpreter = sys.executable if version == HERE else shutil.which(f"python{version}")
        assert interpreter, f"LIGHT_PYTHONS names {version}, but there is no python{version}"
        subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    if version == HERE:
        [site] = folder.glob("lib/python*/site-packages")
        [installed] = distributions(name="nemo-edo", path=[str(site)])
        link([*needs_of(installed), *map(distribution, TEST_TOOLS)], site)
    else:
        subprocess.run([*pip, wheel, *TEST_TOOLS], check=True)
    return python


def needs_of(package: Distribution) -> list[Distribution]:
    """What is installed of what it declares to need without extras."""
    found = []
    for need in map(Requirement, package.requires or []):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            try:
                found.append(distribution(need.name))
            except PackageNotFoundError:  # torch's CUDA libraries, beside its CPU build
                continue
    return found


def link(packages: list[Distribution], site: Path) -> None:
    """Symbolic links to these packages and to all that they need."""
    seen = set()
    while packages:
        package = packages.pop()
        if package.name in seen:
            continue
        seen.add(package.name)
        packages += needs_of(package)
        tops = {file.parts[0] for file in package.files or [] if file.suffix != ".pth"} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))


def run(python: Path, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(argument) for argument in (python, *arguments)]
    return subprocess.run(command, cwd=cwd, env={**without, **variables}, capture_output=True, text=True, timeout=500)


LOADED = """
import sys
import nemo_edo
assert not {"torch", "numpy"} & sys.modules.keys(), "import nemo_edo is to stay light"
for name in sys.argv[1:]:
    __import__(f"nemo_edo.{name}")
for absent in ("transformers", "omegaconf", "megatron", "yaml"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    sys.exit(f"the environment is not empty: it has {absent}")
"""


def test_the_functions_load_from_the_wheel_with_their_types_where_nothing_of_the_trainer_is(python, tmp_path):
    done = run(python, "-c", LOADED, *PACKAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    typed = "from importlib.resources import files; print(files('nemo_edo').joinpath('py.typed').is_file())"
    assert run(python, "-c", typed, cwd=tmp_path).stdout.strip() == "True"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_functions_pass_their_tests_from_the_wheel(python, package, tmp_path):
    tests = ROOT / "tests" / "unit" / package
    alone = ["-c", os.devnull, f"--rootdir={tests}", f"--confcutdir={tests}", "--import-mode=importlib"]
    options = ["-q", "-p", "no:cacheprovider", "-k", "not bleu", *alone]  # BLEU needs a package of the trainer
    benchmarks = str(ROOT / "tools" / "benchmarks")  # a benchmark is tested with its function
    done = run(python, "-m", "pytest", *options, tests, cwd=tmp_path, PYTHONPATH=benchmarks, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_without_the_trainer_the_command_says_what_to_install_and_doctor_which_parts_there_are(python, tmp_path):
    train = run(python, "-m", "nemo_edo", "train", "--config-name", "quickstart", cwd=tmp_path)
    assert train.returncode == 2 and len(train.stderr.splitlines()) == 1
    assert 'pip install "nemo-edo[trainer]"' in train.stderr
    assert "pip install --no-deps 'megatron-bridge" in train.stderr
    doctor = run(python, "-m", "nemo_edo", "doctor", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    lines = dict(line.split(maxsplit=1) for line in doctor.stdout.splitlines())
    assert re.fullmatch(r"losses, metrics, test_time, adapters: torch 2\S+, numpy \S+", lines["functions"])
    assert re.match(r"not installed \(\w+ and \d+ more are missing\): pip install", lines["trainer"])
