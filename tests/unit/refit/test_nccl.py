"""Refit by broadcasts over a stub of NCCL's C interface (helpers/stub_nccl.c): no GPU is needed, and nothing of ours is
replaced."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import nccl_stub
from helpers.controller import workers_of
from helpers.scripted_server import ScriptedReplica, engine_of

from nemo_edo.refit import nccl
from nemo_edo.refit.libnccl import Communicator, Library, in_words
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.utils.http import ServerError

LIMIT_S, BUCKET = 300.0, 16_000
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return Library(nccl_stub.build(tmp_path_factory.mktemp("nccl")))


@pytest.fixture
def sync_of(policy, library, monkeypatch):
    """sync_of(servers): their engine, the NCCLSync, and its groups."""
    monkeypatch.setattr(nccl, "STUCK_AFTER_S", 0.2)

    def build(*servers: ScriptedReplica):
        for server in servers:
            server.link = nccl_stub.Workers(library, LIMIT_S)
        engine, groups = engine_of(*servers), []

        def new_group() -> Communicator:
            groups.append(nccl_stub.communicator(library, LIMIT_S))
            return groups[-1]

        sync = NCCLSync(engine, workers_of(policy), new_group, name="run", attempts=2, limit_s=LIMIT_S,
                        bucket_bytes=BUCKET)  # fmt: skip
        return engine, sync, groups

    return build


FIRST = ["/shutdown_weight_transfer_engine", "/get_world_size", "/init_weight_transfer_engine"]
EACH = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/weight_info"]


def test_every_worker_receives_every_weight_bit_for_bit_in_each_version(sync_of, policy, tiny):
    """In buckets, each of which ends with the weight that exceeds its size."""
    servers = ScriptedReplica("server 0", workers=2), ScriptedReplica("server 1", workers=1)
    engine, sync, groups = sync_of(*servers)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.add_(0.1)
        sync.push(version)
        expected = tiny.exported(policy)
        for server in servers:
            assert [name for name, _ in server.received] == list(expected)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in server.received)
            assert server.version == f"run/{version}"
    sizes = [weight.nbytes for weight in tiny.exported(policy).values()]
    *full, _ = servers[0].buckets
    assert sum(servers[0].buckets) == sum(sizes) and len(full) > 2
    assert all(BUCKET < size <= BUCKET + max(sizes) for size in full)
    assert engine.policy_version == 2 and len(groups) == 1
    assert all(server.paths() == [*FIRST, *EACH, *EACH] for server in servers)


def test_a_version_is_sent_once_and_a_restarted_server_is_refused_until_it_gets_the_next_in_a_new_group(sync_of):
    server = ScriptedReplica()
    engine, sync, groups = sync_of(server)
    sync.push(1)
    sync.push(1)
    assert server.paths() == [*FIRST, *EACH]
    engine.weights.restore(server)  # which kept its weights while it could not be reached
    server.restart()
    with pytest.raises(ServerError, match="server 0 has the weights 'default' where 'run/1' are expected"):
        engine.weights.restore(server)
    server.asked.clear()
    sync.push(2)
    assert len(groups) == 2 and server.version == "run/2"
    assert server.paths() == [*FIRST, *EACH]


def test_another_policys_group_is_left(sync_of):
    server = ScriptedReplica()
    engine, sync, groups = sync_of(server)
    sync.push(1)
    engine.weights = replace(sync)
    engine.weights.push(1)
    assert [group._communicator is None for group in groups] == [True, False]
    assert server.paths() == [*FIRST, *EACH, *FIRST, *EACH]


def test_a_failure_of_the_trainers_own_leaves_no_server_waiting(sync_of):
    server = ScriptedReplica()
    _, sync, groups = sync_of(server)
    workers = sync.workers

    def call(work, own):
        if groups:
            raise RuntimeError("out of memory")
        return workers.call(work, own=own)

    sync.workers = SimpleNamespace(call=call)
    with pytest.raises(RuntimeError, match="out of memory"):
        sync.push(1)
    assert not server.is_running and groups[0]._communicator is None


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"])
def test_a_refit_that_breaks_is_tried_again_with_a_new_group_and_no_update_is_left_open(sync_of, path: str):
    broken = ScriptedReplica("server 1", faults={path: 1})
    others = [] if path.startswith("/init") else [ScriptedReplica("server 0")]
    engine, sync, groups = sync_of(*others, broken)
    sync.push(1)
    assert {server.version for server in (*others, broken)} == {"run/1"}
    assert engine.policy_version == 1 and len(groups) == 2


def test_a_worker_that_dies_in_the_middle_costs_an_attempt_and_not_the_run(sync_of, policy, tiny):
    dies, waits = ScriptedReplica("server 0"), ScriptedReplica("server 1")
    _, sync, _ = sync_of(dies, waits)
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


# --- NCCL's library ---------------------------------------------------------------------------------------------------


nothing = bool
"""A check that finds nothing."""


def test_a_rank_that_never_joins_and_one_that_stops_coming_are_errors_after_the_limit(library):
    with pytest.raises(ServerError, match="ncclCommInitRankConfig has not ended after 0.3 s"):
        nccl_stub.communicator(library, limit_s=0.3).join(0, 2, nothing)
    group, worker = nccl_stub.communicator(library, LIMIT_S), nccl_stub.Workers(library, LIMIT_S)
    with ThreadPoolExecutor() as pool:
        others = pool.submit(worker.join, group.unique_id, range(1, 2), 2)
        group.join(0, 2, nothing)
        others.result()
        group.limit_s = 0.3
        with pytest.raises(ServerError, match="ncclBroadcast has not ended after 0.3 s"):
            group.broadcast(torch.zeros(3), nothing)
        with pytest.raises(ServerError, match="ncclBroadcast on a communicator that was aborted"):
            group.broadcast(torch.zeros(3), nothing)


def test_two_versions_are_loaded_side_by_side_and_older_ones_and_other_files_are_refused(tmp_path):
    """NCCL compares versions within a communicator alone: torch may have another."""
    (tmp_path / "older").mkdir()
    (tmp_path / "newer").mkdir()
    libraries = Library(nccl_stub.build(tmp_path / "older", 22809)), Library(nccl_stub.build(tmp_path / "newer"))
    assert [library.version for library in libraries] == ["2.28.9", "2.29.7"]
    assert in_words(libraries[1]).startswith(f"2.29.7 sends weights, in trainer and servers ({libraries[1].path});")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ServerError, match="is no NCCL of 2.14 or newer"):
        Library(tmp_path / "text")


def test_ranks_of_different_versions_are_refused_with_this_ones_version(library):
    group = nccl_stub.communicator(library, LIMIT_S)
    joins = f"""
import sys, torch
from helpers.nccl_stub import Workers
from nemo_edo.refit.libnccl import Library
Workers(Library({library.path!r}), {LIMIT_S}).join(bytes.fromhex({group.unique_id.hex()!r}), range(1, 2), 2)
"""
    other = subprocess.Popen([sys.executable, "-c", joins], stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STUB_NCCL_VERSION": "22809"})
    with pytest.raises(ServerError, match=r"invalid usage.*This process has NCCL 2\.29\.7 \(.*libnccl\.so\.2\)"):
        group.join(0, 2, nothing)
    assert "This process has NCCL 2.28.9" in other.communicate(timeout=LIMIT_S)[1]
