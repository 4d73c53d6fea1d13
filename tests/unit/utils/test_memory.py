"""The host's memory, with and without control groups of both versions."""

import os
from pathlib import Path

import pytest

from nemo_edo.utils import memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes the kernel's files: 1 GB available, the process's groups, and files of groups by their path."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")

    def write(groups: str | None, **files: dict[str, object]) -> None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n")
        if groups is not None:
            (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
        for folder, contents in files.items():
            place = tmp_path / "cgroup" / Path(*folder.split("__"))
            place.mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (place / name.replace("__", ".")).write_text(f"{text}\n")

    return write


def second(limit: object, used: int = 0, files: int = 0) -> dict[str, object]:
    return {"memory__max": limit, "memory__current": used, "memory__stat": f"anon 5\ninactive_file {files}"}


def first(limit: int, used: int) -> dict[str, object]:
    return {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": used,
            "memory__stat": "inactive_file 1\ntotal_inactive_file 20"}


@pytest.mark.parametrize("groups", [None, "0::/\n"], ids=["no groups", "no limit"])
def test_without_a_limit_it_is_the_machines(host, groups):
    host(groups)
    assert (memory.total_bytes(), memory.available_bytes()) == (MACHINE, 1_024_000_000)


def test_the_narrowest_group_of_version_2_limits_it_and_droppable_files_are_not_used(host):
    host("0::/job/step\n", job=second(5000, 1000, 300), job__step=second("max", 900))
    assert (memory.total_bytes(), memory.available_bytes()) == (5000, 4300)


def test_a_container_sees_its_group_as_the_top_one(host):
    host("4:cpu,memory:/docker/abc\n3:cpuset:/\n0::/\n", memory=first(8000, 3000))
    assert (memory.total_bytes(), memory.available_bytes()) == (8000, 5020)
