"""``nemo-edo selftest`` where there is no GPU: what a CPU can do passes, and what is broken on purpose fails."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers.cli import finish, start

pytestmark = pytest.mark.slow


def test_two_processes_pass_every_split_that_a_cpu_has(tmp_path: Path):
    arguments = ("selftest", "--folder", str(tmp_path), "--only", "machine", "split")
    process = start(*arguments, processes=2, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = finish(process)
    assert process.returncode == 0, output + errors
    report = json.loads((tmp_path / "selftest.json").read_text())
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert report["processes"] == 2
    assert found.pop("context") == found.pop("GPUs") == found.pop("Transformer Engine") == "not possible"
    assert set(found.values()) == {"pass"} and {"all-reduce", "tensor", "pipeline", "experts"} <= set(found)


def test_a_folder_that_is_a_file_fails_with_what_to_do_and_the_rest_still_runs(tmp_path: Path, nemo_edo):
    (tmp_path / "file").touch()
    done = nemo_edo("selftest", "--folder", str(tmp_path / "file" / "inside"), "--only", "machine", "precision")
    lines = done.stdout.splitlines()
    [broken] = [line for line in lines if line.startswith("fail")]
    assert done.returncode == 1 and "shared folder" in broken and "--folder" in lines[lines.index(broken) + 1]
    assert any(line.startswith("pass") and "fp32, as transformers" in line for line in lines)
    assert any(line.startswith("not possible") and "fp8, mxfp8" in line for line in lines)
