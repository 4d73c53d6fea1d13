"""``nemo-edo selftest`` where there is no GPU: what a CPU can do passes, and what is broken on purpose fails."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cli, completions_server, nccl_stub
from helpers.cli import finish, start
from helpers.forked import Child
from helpers.ports import free_ports

from nemo_edo.checks import numbers

pytestmark = pytest.mark.slow
_CLONE_NEWNS, _READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def compute_less() -> None:
    """In the command's process."""
    numbers.ROWS, numbers.SPEED_ROUNDS = 8, 1


FEWER = ("tests.e2e.test_selftest:compute_less",)


def make_read_only(folder: str) -> None:
    """For this process and its children: ``Cli``'s ``before``."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.fsencode(folder)
    mounts = [(b"/", _RECURSIVE | _PRIVATE), (path, _BIND), (path, _REMOUNT | _BIND | _READ_ONLY)]
    if libc.unshare(_CLONE_NEWNS) or any([libc.mount(place, place, None, flags, None) for place, flags in mounts]):
        raise OSError(ctypes.get_errno(), "unshare or mount")


def environment(folder: Path, *, nccl: int | None = None, server: str | None = None) -> Path:
    """The interpreter of a new environment. nccl: with a stub that has this version. server: with a vLLM whose server
    has this source."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    if nccl is not None:
        library = packages / "nvidia" / "nccl" / "lib"
        library.mkdir(parents=True)
        nccl_stub.build(library, nccl)
    if server is not None:
        module = packages / "vllm" / "entrypoints" / "openai"
        module.mkdir(parents=True)
        (packages / "vllm" / "__init__.py").touch()
        (module / "api_server.py").write_text(server)
    return folder / "bin" / "python"


def test_two_processes_pass_every_split_that_a_cpu_has(tmp_path: Path):
    arguments, said = ("selftest", "--folder", str(tmp_path), "--only", "machine", "split"), tmp_path / "said"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    ranks = [Child(cli.run, arguments, [FEWER], output=said, environment={**place, "RANK": rank, "LOCAL_RANK": rank})
             for rank in "01"]
    assert [rank.wait(500.0) for rank in ranks] == [0, 0], said.read_text()
    report = json.loads((tmp_path / "selftest.json").read_text())
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert report["processes"] == 2
    assert found.pop("NCCL of trainer and servers") != "fail"  # possible where the servers' environment is there
    absent = ("context", "context, grouped queries", "context, packed", "tensor and pipeline, tied head", "GPUs",
              "Transformer Engine")  # fmt: skip
    assert {found.pop(name) for name in absent} == {"not possible"}
    assert set(found.values()) == {"pass"} and {"all-reduce", "tensor", "pipeline", "experts"} <= set(found)


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Status and the rest of each check's line, with those that belong to it, by "group: name"."""
    found = {}
    for line in output.replace("\n" + " " * 14, " ").splitlines()[1:-1]:
        name, _, rest = line[14:].partition("  ")
        found[name.strip()] = (line[:13].strip(), rest.strip())
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_folder_that_cannot_be_written_to_fails_what_needs_it_and_nothing_else(tmp_path: Path, nemo_edo):
    """Nor is there a vLLM: the environment that stands for the servers' is empty."""
    environment(tmp_path / ".venv-vllm")
    before = [FEWER, ("tests.e2e.test_selftest:make_read_only", str(tmp_path))]
    groups = ("machine", "precision", "training", "server")
    done = nemo_edo("selftest", "--folder", "here", "--only", *groups, cwd=tmp_path, before=before)
    found = rows(done.stdout)
    assert done.returncode == 1 and "no selftest.json: Read-only file system" in done.stdout
    failed = {name: said for name, (status, said) in found.items() if status == "fail"}
    assert set(failed) == {"machine: shared folder", "training: checkpoint at another layout"}
    assert all("Read-only file system" in said and "do: " in said and "--folder" in said for said in failed.values())
    assert found["precision: fp32, as transformers"][0] == found["training: ED-iDPO step"][0] == "pass"
    status, said = found["server: vLLM, refit by disk"]
    assert status == "not possible" and "has no vllm: make vllm-env" in said
    assert found["precision: fp8, mxfp8"][0] == "not possible"


SCRIPTED = f"""
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(completions_server.__file__).parent)!r})
import completions_server
completions_server.KEY = os.environ["VLLM_API_KEY"].lower()
print("an illegal memory access was encountered", flush=True)
asyncio.run(completions_server.main(int(sys.argv[sys.argv.index("--port") + 1]), Path(STATE)))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, "no kernel image is available"),
        ({"die_at_refit": True}, r"its server died and was restarted at a refit \(2 starts\)"),
    ],
    ids=["at its start", "at a refit"],
)
def test_a_server_that_dies_fails_its_check_alone_with_what_to_do(tmp_path: Path, nemo_edo, fault, said):
    """Another NCCL than torch's is none of its faults."""
    state = tmp_path / "state.json"
    state.write_text(json.dumps(fault))
    ends, serves = "import sys; sys.exit('no kernel image is available')", SCRIPTED.replace("STATE", repr(str(state)))
    environment(tmp_path / ".venv-vllm", nccl=22907, server=serves if fault else ends)
    done = nemo_edo("selftest", "--only", "machine", "server", cwd=tmp_path)
    found = rows(done.stdout)
    assert done.returncode == 1, done.stderr
    assert {name for name, (status, _) in found.items() if status == "fail"} == {"server: vLLM, refit by disk"}
    told = found["server: vLLM, refit by disk"][1]
    assert re.search(said, told), told
    assert "server_0.log" in told and "do: read" in told
    status, versions = found["machine: NCCL of trainer and servers"]
    assert status == "pass" and "2.29.7" in versions and str(tmp_path / ".venv-vllm") in versions
    report = json.loads((tmp_path / "runs" / "selftest" / "selftest.json").read_text())
    assert [check["status"] for check in report["checks"]] == [status for status, _ in found.values()]


def test_a_run_with_servers_is_one_run_of_all_processes(tmp_path: Path):
    """Whose server is a stand-in, with other log-probabilities than the trainer's."""
    state = tmp_path / "state.json"
    state.write_text("{}")
    environment(tmp_path / ".venv-vllm", server=SCRIPTED.replace("STATE", repr(str(state))))
    process = start("selftest", "--only", "server", processes=2, cwd=tmp_path, stdout=subprocess.PIPE)
    status, said = rows(finish(process)[0])["server: vLLM, refit by disk"]
    assert status == "fail" and "rank 0" in said and "iteration 0: the mean gap" in said  # a guard has ended the run
    assert "rank 1" not in said and "did not end" not in said
