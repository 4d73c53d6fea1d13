"""The host's memory, with and without control groups of both versions."""

import os

import pytest

from nemo_edo.utils import memory

MACHINE, AVAILABLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1_024_000_000
SECOND = {
    "job": {"memory.max": 5000, "memory.current": 1000, "memory.stat": "anon 5\ninactive_file 300"},
    "job/step": {"memory.max": "max", "memory.current": 900, "memory.stat": "anon 5\ninactive_file 0"},
}
FIRST = {"memory": {"memory.limit_in_bytes": 8000, "memory.usage_in_bytes": 3000,
                    "memory.stat": "inactive_file 1\ntotal_inactive_file 20"}}


@pytest.mark.parametrize(("groups", "files", "total", "available"), [
    (None, {}, MACHINE, AVAILABLE), ("0::/\n", {}, MACHINE, AVAILABLE),
    ("0::/job/step\n", SECOND, 5000, 4300),  # the narrowest group's limit; files that may be dropped are not used
    ("4:cpu,memory:/docker/abc\n3:cpuset:/\n0::/\n", FIRST, 8000, 5020),  # a container's group is the top one
], ids=["no groups", "no limit", "version 2", "version 1 in a container"])
def test_memory_is_the_machines_or_what_the_processs_group_has(tmp_path, monkeypatch, groups, files, total, available):
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    contents = {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n"}
    contents |= {} if groups is None else {"proc/self/cgroup": groups}
    contents |= {f"cgroup/{group}/{name}": f"{text}\n" for group, of_group in files.items()
                 for name, text in of_group.items()}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (memory.total_bytes(), memory.available_bytes()) == (total, available)
