"""Refit by broadcasts: what trainer and servers tell each other, and in which order; without NCCL itself."""

from functools import partial

import pytest
from helpers.controller import workers_of
from helpers.scripted_server import Link, ScriptedReplica, assert_two_versions_arrive, engine_of

from nemo_edo.errors import UserError
from nemo_edo.refit.nccl import NCCLSync, stream
from nemo_edo.utils.http import ServerError

LIMIT_S = 20.0


@pytest.fixture
def sync_of(policy):
    """sync_of(servers): their engine, the NCCLSync, and its links."""

    def build(*servers, attempts: int = 2):
        links: list[Link] = []

        def new_link() -> Link:
            links.append(Link(servers, LIMIT_S))
            return links[-1]

        engine = engine_of(*servers)
        weights = partial(stream, workers_of(policy))
        sync = NCCLSync(engine, weights, new_link, name="run", attempts=attempts, limit_s=LIMIT_S)
        return engine, sync, links

    return build


FIRST = ["/get_world_size", "/init_weight_transfer_engine"]
EACH = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/weight_info"]


def test_every_server_receives_every_weight_of_every_push_and_its_new_name(sync_of, policy, tiny):
    servers = ScriptedReplica("server 0", workers=2), ScriptedReplica("server 1", workers=1)
    engine, sync, links = sync_of(*servers)
    assert_two_versions_arrive(sync, policy, tiny.exported, servers)
    assert engine.policy_version == 2
    assert all(server.paths() == [*FIRST, *EACH, *EACH] for server in servers)
    [link] = links
    assert sorted(link.ranks) == [0, 1, 2, 3]


def test_a_version_is_sent_once_and_a_restarted_server_gets_a_new_link(sync_of):
    server = ScriptedReplica()
    _, sync, links = sync_of(server)
    sync.push(1)
    sync.push(1)
    assert server.paths() == [*FIRST, *EACH]
    server.starts += 1
    sync.push(2)
    assert len(links) == 2 and server.version == "run/2"
    assert server.paths() == [*FIRST, *EACH, "/shutdown_weight_transfer_engine", *FIRST, *EACH]


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"])
def test_a_refit_that_breaks_is_tried_again_with_a_new_link(sync_of, path: str):
    server = ScriptedReplica(faults={path: 1})
    engine, sync, links = sync_of(server)
    sync.push(1)
    assert server.version == "run/1" and engine.policy_version == 1 and len(links) == 2


def test_a_server_that_cannot_begin_leaves_no_update_open_at_the_others(sync_of):
    others, broken = ScriptedReplica("server 0"), ScriptedReplica("server 1", faults={"/start_weight_update": 1})
    _, sync, _ = sync_of(others, broken)
    sync.push(1)
    assert others.version == broken.version == "run/1"


def test_a_server_that_refuses_the_weights_is_named_and_the_version_stays(sync_of):
    engine, sync, _ = sync_of(ScriptedReplica(faults={"/update_weights": 9}))
    with pytest.raises(UserError, match="server 0.*update_weights: status 500"):
        sync.push(1)
    assert engine.policy_version == 0


def test_a_server_that_came_back_within_a_collection_is_refused_until_the_next_refit(sync_of):
    server = ScriptedReplica()
    engine, sync, _ = sync_of(server)
    sync.push(1)
    with pytest.raises(ServerError, match="server 0 was restarted"):
        engine.on_restart(server)
    engine.on_generated(server)
    server.version = "default"
    with pytest.raises(ServerError, match="'default' .*'run/1'"):
        engine.on_generated(server)
