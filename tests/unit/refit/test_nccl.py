"""Refit by broadcasts: what trainer and servers tell each other, and in which order; without NCCL itself."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from nemo_edo.errors import UserError
from nemo_edo.http_client import ServerError
from nemo_edo.refit import nccl
from nemo_edo.refit.nccl import NCCLSync, exported

LIMIT_S = 20.0


class Group:
    """Both ends of a link: who met whom, and a queue for each server."""

    def __init__(self) -> None:
        self.unique_id = bytes(range(128))
        self.ranks: list[int] = []
        self.queues: dict[str, queue.Queue] = {}
        self.complete = threading.Event()
        self.lock = threading.Lock()

    def meet(self, ranks: range, world_size: int) -> None:
        with self.lock:
            self.ranks += ranks
            if sorted(self.ranks) == list(range(world_size)):
                self.complete.set()
        assert self.complete.wait(LIMIT_S), "the others did not come"

    def join(self, world_size: int) -> None:
        self.meet(range(1), world_size)

    def broadcast(self, tensor) -> None:
        for waiting in self.queues.values():
            waiting.put(tensor.clone())

    def receive(self, server):
        return self.queues[server.name].get(timeout=LIMIT_S)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(nccl, "REFUSED_WITHIN_S", 0.05)


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture
def sync_of(policy, engine_of):
    """sync_of(servers): their engine, the NCCLSync, and the groups that it has made."""

    def build(*servers, attempts: int = 2):
        groups: list[Group] = []

        def new_link() -> Group:
            groups.append(Group())
            for server in servers:
                server.link = groups[-1]
                groups[-1].queues[server.name] = queue.Queue()
            return groups[-1]

        engine = engine_of(*servers)
        sync = NCCLSync(engine, exported(policy.built), new_link, name="run", attempts=attempts, limit_s=LIMIT_S)
        return engine, sync, groups

    return build


FIRST = ["/get_world_size", "/init_weight_transfer_engine"]
EACH = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/weight_info"]


def test_every_server_receives_every_weight_of_every_push_and_its_new_name(sync_of, scripted_replica, policy, tiny):
    servers = scripted_replica("server 0", workers=2), scripted_replica("server 1", workers=1)
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
    assert engine.policy_version == 2
    assert all(server.paths() == [*FIRST, *EACH, *EACH] for server in servers)
    [group] = groups
    assert sorted(group.ranks) == [0, 1, 2, 3]


def test_a_version_that_the_servers_have_is_not_sent_again(sync_of, scripted_replica):
    server = scripted_replica()
    _, sync, _ = sync_of(server)
    sync.push(1)
    sync.push(1)
    assert server.paths() == [*FIRST, *EACH]


def test_a_server_that_was_started_again_is_linked_anew(sync_of, scripted_replica):
    server = scripted_replica()
    _, sync, groups = sync_of(server)
    sync.push(1)
    server.generation += 1
    sync.push(2)
    assert len(groups) == 2 and server.version == "run/2"
    assert server.paths() == [*FIRST, *EACH, "/shutdown_weight_transfer_engine", *FIRST, *EACH]


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"])
def test_a_refit_that_breaks_is_tried_again_with_a_new_link(sync_of, scripted_replica, monkeypatch, path: str):
    monkeypatch.setattr(nccl, "REFUSED_WITHIN_S", 0.5)  # the refusal has to come before the link is waited for
    server = scripted_replica(faults={path: 1})
    engine, sync, groups = sync_of(server)
    sync.push(1)
    assert server.version == "run/1" and engine.policy_version == 1 and len(groups) == 2


def test_a_server_that_refuses_the_weights_is_named_and_the_version_stays(sync_of, scripted_replica):
    engine, sync, _ = sync_of(scripted_replica(faults={"/update_weights": 9}))
    with pytest.raises(UserError, match="no refit in 2 attempts: server 0: POST /update_weights: status 500"):
        sync.push(1)
    assert engine.policy_version == 0


def test_a_server_that_came_back_within_a_collection_is_refused_until_the_next_refit(sync_of, scripted_replica):
    server = scripted_replica()
    engine, sync, _ = sync_of(server)
    sync.push(1)
    with pytest.raises(ServerError, match="has no weights before the next refit"):
        engine.on_restart(server)
    engine.on_drawn(server)
    server.version = "default"
    with pytest.raises(ServerError, match="'default' where 'run/1' are expected"):
        engine.on_drawn(server)
