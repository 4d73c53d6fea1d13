"""tools/uv on machines of several kinds: which Python 3.12 it takes, and what it says where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "uv"
RUNS_312 = "#!/bin/sh\nexit 0\n"
SHIM_WITHOUT_A_VERSION = "#!/bin/sh\nexit 127\n"
RUNS_311 = "#!/bin/sh\nexit 1\n"  # to the question whether it is 3.12
UV = """#!/bin/sh
case "$*" in
  *"python dir") exit 0 ;;
  "python find"*) exit 2 ;;
  "python install"*) exit {install} ;;
esac
echo "$UV_PYTHON: $*"
"""


@pytest.fixture
def machine(tmp_path):
    """machine(files, **variables): runs ``tools/uv sync`` where these files are programs, besides some of the system,
    and returns the finished process."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "cat"):
        (programs / name).symlink_to(f"/bin/{name}")

    def run(files: dict[str, str], **variables: str) -> subprocess.CompletedProcess:
        for name, content in {"bin/uv": UV.format(install=1), **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(0o755)
        tool = tmp_path / "checkout" / "tools" / "uv"  # its checkout may have a uv already
        tool.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOOL, tool)
        environment = {"PATH": str(programs), "HOME": str(tmp_path), **variables}
        return subprocess.run([tool, "sync"], env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize(("files", "taken"), [
    ({"bin/python3.12": RUNS_312, "bin/python3": RUNS_311}, "bin/python3.12"),
    ({"bin/python3": RUNS_312}, "bin/python3"),
    ({"bin/python3.12": SHIM_WITHOUT_A_VERSION, ".pyenv/versions/3.12.1/bin/python3.12": RUNS_312},
     ".pyenv/versions/3.12.1/bin/python3.12"),
    ({"bin/pyenv": "#!/bin/sh\necho {home}/elsewhere\n", "elsewhere/versions/3.12.9/bin/python3.12": RUNS_312},
     "elsewhere/versions/3.12.9/bin/python3.12"),
    ({"miniconda3/bin/python3.12": RUNS_312}, "miniconda3/bin/python3.12"),
], ids=["python3.12", "python3", "a shim that does not run", "pyenv's own root", "conda"])  # fmt: skip
def test_a_python_312_that_runs_is_found(machine, tmp_path, files, taken):
    done = machine({name: content.replace("{home}", str(tmp_path)) for name, content in files.items()})
    assert done.stdout == f"{tmp_path / taken}: sync\n", done.stderr


def test_a_named_python_is_taken_and_another_version_is_refused(machine, tmp_path):
    files = {"bin/python3.12": RUNS_312, "own/python": RUNS_312, "own/older": RUNS_311}
    assert machine(files, PYTHON=str(tmp_path / "own/python")).stdout == f"{tmp_path}/own/python: sync\n"
    refused = machine(files, PYTHON=str(tmp_path / "own/older"))
    assert refused.returncode == 1 and f"PYTHON={tmp_path}/own/older" in refused.stderr


def test_without_a_python_312_two_commands_are_named(machine):
    done = machine({"bin/python3": RUNS_311})
    assert done.returncode == 1 and not done.stdout
    assert "pyenv install 3.12" in done.stderr and "make PYTHON=" in done.stderr
