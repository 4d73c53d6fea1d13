"""The wheel in empty environments: the functions need torch, NumPy and SciPy; the command says what else there is.

On the Python of these tests, packages have the lock's versions. On other Pythons (make test-pythons) they have the
newest that torch 2.13 goes with; each Python has its own torch, of gigabytes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer_environment import ROOT, NoPackageIndex, run_uv

pytestmark = pytest.mark.peers
PACKAGES = ("losses", "metrics", "test_time")
HERE = "{}.{}".format(*sys.version_info)
PYTHONS = (HERE, *os.environ.get("LIGHT_PYTHONS", "").split())
TEST_TOOLS = ("pytest", "hypothesis", "scipy", "scikit-learn")
"""What the functions' tests import beside the functions."""


@pytest.fixture(scope="session", params=PYTHONS)
def python(request, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel, what it declares to need, and the test tools."""
    folder = tmp_path_factory.mktemp("light")
    python, versions = folder / "venv" / "bin" / "python", folder / "versions.txt"
    try:
        run_uv("build", "--wheel", "--out-dir", folder, ROOT)
        if request.param == HERE:
            versions.write_text(run_uv("export", "--locked", "--project", ROOT, "--no-emit-project", "--no-hashes",
                                       "--extra", "trainer", "--group", "test"))  # fmt: skip
            run_uv("venv", folder / "venv")
        else:
            versions.write_text("torch==2.13.*")
            run_uv("venv", "--python", request.param, folder / "venv")
        [wheel] = folder.glob("*.whl")
        run_uv("pip", "install", "--python", python, "--constraint", versions, wheel, *TEST_TOOLS)
    except NoPackageIndex as error:
        pytest.skip(str(error))
    return python


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
    # A benchmark is tested with its function.
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tools" / "benchmarks")])
    done = run(python, "-m", "pytest", *options, tests, cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 25


def test_without_the_trainer_the_command_says_what_to_install_and_doctor_which_parts_there_are(python, tmp_path):
    train = run(python, "-m", "nemo_edo", "train", "--config-name", "quickstart", cwd=tmp_path)
    assert train.returncode == 2 and len(train.stderr.splitlines()) == 1
    assert 'pip install ".[trainer]" in a checkout' in train.stderr
    assert "pip install --no-deps 'megatron-bridge" in train.stderr
    doctor = run(python, "-m", "nemo_edo", "doctor", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    lines = dict(line.split(maxsplit=1) for line in doctor.stdout.splitlines())
    assert re.fullmatch(r"losses, metrics, test_time, adapters: torch 2\S+, numpy \S+", lines["functions"])
    assert re.match(r"not installed \(\w+ and \d+ more are missing\): pip install", lines["trainer"])
