"""Refit through NCCL's C interface, over a stub of it (helpers/stub_nccl.c): no GPU is needed, and nothing of ours is
replaced."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import nccl_stub
from helpers.controller import workers_of
from helpers.scripted_server import ScriptedReplica, assert_two_versions_arrive, engine_of

from nemo_edo.refit import nccl
from nemo_edo.refit.libnccl import Library, NCCLError, common_library, in_words
from nemo_edo.refit.nccl import NCCLSync, stream
from nemo_edo.utils.http import ServerError
from nemo_edo.utils.processes import package_file

LIMIT_S = 300.0
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return Library(nccl_stub.build(tmp_path_factory.mktemp("nccl")))


def test_two_versions_are_loaded_side_by_side_and_a_refit_uses_the_servers(tmp_path):
    """NCCL compares versions within a communicator alone: torch may have another."""
    paths = {version: nccl_stub.build((tmp_path / str(version)).mkdir() or tmp_path / str(version), version)
             for version in (22809, 22907)}
    of_trainer, of_servers = (common_library(path) for path in paths.values())
    assert [of_trainer.version, of_servers.version] == ["2.28.9", "2.29.7"]
    assert in_words(of_servers).startswith(f"2.29.7 sends weights, in trainer and servers ({paths[22907]}); torch's")
    with pytest.raises(NCCLError, match="older than 2.14"):
        common_library(nccl_stub.build(tmp_path, 21000))


@pytest.fixture
def sync_of(policy, library):
    def build(*servers: ScriptedReplica, attempts: int = 2, limit_s: float = LIMIT_S):
        for server in servers:
            server.link = nccl_stub.Workers(library, limit_s)
        engine = engine_of(*servers)
        weights = partial(stream, workers_of(policy))
        sync = NCCLSync(engine, weights, lambda: nccl_stub.link(library, limit_s), name="run",
                        attempts=attempts, limit_s=limit_s)  # fmt: skip
        return engine, sync

    return build


def test_every_worker_receives_every_weight_bit_for_bit_in_each_version(sync_of, policy, tiny):
    servers = ScriptedReplica("server 0", workers=2), ScriptedReplica("server 1", workers=1)
    engine, sync = sync_of(*servers)
    assert_two_versions_arrive(sync, policy, tiny.exported, servers)
    assert engine.policy_version == 2


def test_a_worker_that_dies_in_the_middle_costs_an_attempt_and_not_the_run(sync_of, monkeypatch, policy, tiny):
    monkeypatch.setattr(nccl, "STUCK_AFTER_S", 0.2)
    dies, waits = ScriptedReplica("server 0"), ScriptedReplica("server 1")
    _, sync = sync_of(dies, waits)
    dies.link.dies_after = 2

    def request(*args, ask=dies.request, **kwargs):
        try:
            return ask(*args, **kwargs)
        except ConnectionError as error:
            dies.stop()
            raise ServerError(f"server 0: {error}") from error

    dies.request = request
    sync.push(1)
    assert dies.starts == 2 and waits.starts == 2  # the other one still waited in NCCL
    expected = tiny.exported(policy)
    for server in (dies, waits):
        assert server.version == "run/1"
        assert all(torch.equal(tensor, expected[name]) for name, tensor in server.received)


def nothing() -> None:
    pass


def test_a_rank_that_never_joins_and_one_that_stops_coming_are_errors_after_the_limit(library):
    link = nccl_stub.link(library, limit_s=0.3)
    with pytest.raises(NCCLError, match="ncclCommInitRankConfig has not ended after 0.3 s"):
        link.join(2, nothing)
    link, worker = nccl_stub.link(library, LIMIT_S), nccl_stub.Workers(library, LIMIT_S)
    with ThreadPoolExecutor() as pool:
        others = pool.submit(worker.join_as_server, link.unique_id, range(1, 2), 2)
        link.join(2, nothing)
        others.result()
        link._communicator._limit_s = 0.3
        with pytest.raises(NCCLError, match="ncclBroadcast has not ended after 0.3 s"):
            link.broadcast(torch.zeros(3), nothing)
        with pytest.raises(NCCLError, match="ncclBroadcast on a communicator that was aborted"):
            link.broadcast(torch.zeros(3), nothing)


def test_a_server_that_refuses_to_join_is_named_at_once(library):
    def refused() -> None:
        raise ServerError("server 0: status 500")

    with pytest.raises(ServerError, match="server 0: status 500"):
        nccl_stub.link(library, limit_s=60.0).join(2, refused)


def test_ranks_of_different_versions_are_refused_with_this_ones_version(library, tmp_path):
    link = nccl_stub.link(library, LIMIT_S)
    joins = f"""
import sys, torch
from helpers.nccl_stub import Workers
from nemo_edo.refit.libnccl import Library
Workers(Library({library.path!r}), {LIMIT_S}).join_as_server(bytes.fromhex({link.unique_id.hex()!r}), range(1, 2), 2)
"""
    other = subprocess.Popen([sys.executable, "-c", joins], stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STUB_NCCL_VERSION": "22809"})
    with pytest.raises(NCCLError, match=r"invalid usage.*This process has NCCL 2\.29\.7 \(.*libnccl\.so\.2\)"):
        link.join(2, nothing)
    assert "This process has NCCL 2.28.9" in other.communicate(timeout=LIMIT_S)[1]


def test_the_library_is_the_servers_and_another_file_is_refused(tmp_path):
    folder = tmp_path / "lib" / "site"
    (folder / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    (folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2").touch()
    environment = tmp_path / "python"
    environment.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.path.insert(0, \'{folder}\'); '
                           'sys.argv = sys.argv[1:]; exec(sys.argv[0])" "$3" "$4"\n')  # fmt: skip
    environment.chmod(0o755)
    found = package_file(str(environment), "nvidia.nccl", "lib/libnccl.so.2")
    assert found == str(folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    assert package_file(str(environment), "nvidia.nothing", "lib/libnccl.so.2") is None
    with pytest.raises(NCCLError, match="is no NCCL of 2.14 or newer"):
        Library(found)
