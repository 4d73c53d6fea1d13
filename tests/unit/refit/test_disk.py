"""Refit through folders: the requests to servers, their order, and failures."""

import gc
from types import SimpleNamespace

import pytest
import torch
from helpers.controller import workers_of
from helpers.scripted_server import ScriptedReplica, engine_of
from safetensors.torch import load_file

from nemo_edo.config import LoRAConfig
from nemo_edo.refit.disk import AdapterSync, DiskSync, RestartSync, WeightFolders
from nemo_edo.refit.servers import CACHE_RESETS, SleepOnTrainersGPUs
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.worker import Worker

REFIT = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("nemo_edo.refit.servers.CACHE_WAIT_S", 0.0)


@pytest.fixture
def sync_of(policy, tmp_path):
    """sync_of(replicas): their engine, and the DiskSync of the tiny model's weights."""

    def build(*replicas, kind=DiskSync, **settings):
        engine = engine_of(*replicas)
        folders = WeightFolders(tmp_path / "refit", workers_of(policy), num_bytes=1)
        return engine, kind(engine, folders, attempts=3, limit_s=5.0, **settings)

    return build


def test_a_push_writes_all_that_a_restart_needs_and_names_the_weights_before_the_version_changes(sync_of, policy, tiny):
    servers = ScriptedReplica("server 0"), ScriptedReplica("server 1", is_managed=False)
    engine, sync = sync_of(*servers)
    with torch.no_grad():
        for parameter in policy.chunks[0].parameters():
            parameter.add_(0.1)
    sync.push(3)
    assert engine.policy_version == 3
    folder = servers[0].model_folder
    for server in servers:
        assert server.paths() == REFIT
        assert server.weights == server.version == str(folder)
    assert folder.name == "version_00003"
    assert_equal(load_file(folder / "model.safetensors"), tiny.exported(policy))
    assert {"config.json", "tokenizer_config.json"} <= {file.name for file in folder.iterdir()}


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_folders_are_removed_once_all_servers_have_the_next_and_with_the_sync(sync_of, tmp_path):
    seen = []

    class Watching(ScriptedReplica):
        def request(self, method, path, **more):
            if path == "/collective_rpc":
                seen.append(sorted(folder.name for folder in (tmp_path / "refit").glob("*/*")))
            return super().request(method, path, **more)

    engine, sync = sync_of(Watching())
    for version in (1, 2, 3):
        sync.push(version)
    assert seen == [["version_00001"], ["version_00001", "version_00002"], ["version_00002", "version_00003"]]
    assert [folder.name for folder in (tmp_path / "refit").glob("*/*")] == ["version_00003"]
    engine.weights = None
    del sync
    gc.collect()
    assert list((tmp_path / "refit").glob("*/*")) == []


@pytest.mark.parametrize(("path", "failures", "starts"), [
    ("/collective_rpc", 2, 1), ("/update_weight_version", 2, 1), ("/weight_info", 2, 1),
    ("/reset_prefix_cache", CACHE_RESETS - 1, 1), ("/collective_rpc", 3, 2)])
def test_a_managed_server_that_fails_is_retried_and_in_the_end_restarted(sync_of, path, failures, starts):
    server = ScriptedReplica(faults={path: failures})
    _, sync = sync_of(server)
    sync.push(1)
    assert server.weights == server.version == str(server.model_folder) and server.starts == starts


def test_a_server_that_does_not_take_the_weights_is_excluded_until_it_takes_some_and_one_has_to_take_them(sync_of):
    good = ScriptedReplica("server 0")
    bad = ScriptedReplica("server 1", is_managed=False, faults={"/collective_rpc": 3})
    engine, sync = sync_of(good, bad)
    with pytest.warns(UserWarning, match="server 1 is excluded.*status 500"):
        sync.push(1)
    assert engine.replicas == [good]
    sync.push(2)
    assert engine.replicas == [good, bad] and bad.version == good.version
    good.faults, bad.faults, good.cannot_start = {"/collective_rpc": 3}, {"/collective_rpc": 3}, True
    with pytest.raises(ServerError, match="no server has taken the weights"):
        sync.push(3)
    assert engine.policy_version == 2


def test_a_restarted_server_gets_the_current_weights_before_requests_and_responses_from_others_are_refused(sync_of):
    own, given = ScriptedReplica("server 0"), ScriptedReplica("server 1", is_managed=False)
    engine, sync = sync_of(own, given)
    sync.push(5)
    own.restart()  # as the dispatcher does
    given.weights = given.version = "what it was started with"
    for server in (own, given):
        engine.weights.restore(server)
        assert server.weights == server.version and server.version.endswith("version_00005")
        engine.weights.require(server)
        server.version = "default"  # somebody has restarted it
        with pytest.raises(ServerError, match=f"{server} .*'default' .*version_00005"):
            engine.weights.require(server)


def test_a_server_that_loads_weights_only_at_its_start_is_restarted_with_each_version(sync_of):
    server = ScriptedReplica(model_name="version_00002")
    engine, sync = sync_of(server, kind=RestartSync)
    sync.push(2)
    assert [how for how, *_ in server.asked] == ["restart"] and server.weights.endswith("version_00002")
    assert engine.served_model == "version_00002"  # named after its folder
    engine.weights.restore(server)
    engine.weights.require(server)
    assert len(server.asked) == 1


@pytest.fixture
def adapted(tiny, tiny_qwen2):
    """A policy with adapters that are not zero."""
    policy = tiny.build_policy(tiny_qwen2, lora=LoRAConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(1)
    policy.load([0.1 * torch.randn(part.shape, generator=generator) for part in policy.snapshot()])
    return policy


@pytest.fixture
def adapters(adapted, tmp_path):
    """Folders of adapters, a server, its engine, and the DiskSync of the adapters."""
    server = ScriptedReplica()
    engine, folders = engine_of(server), WeightFolders(tmp_path, workers_of(adapted), num_bytes=1, adapters_only=True)
    return folders, server, engine, AdapterSync(engine, folders, attempts=1, limit_s=5.0)


def test_base_weights_are_sent_once_and_adapters_each_time_and_after_a_restart(adapted, adapters, tiny):
    folders, server, engine, sync = adapters
    for version in (1, 2):
        sync.push(version)
        folder = folders.root / f"version_0000{version}"
        assert server.adapters == {engine.served_model: str(folder)} and server.version == str(folder)
        assert sorted(path.name for path in folders.root.iterdir()) == ["base", folder.name]
    assert server.paths().count("/collective_rpc") == 1 and server.weights == str(folders.base)
    assert_equal(load_file(folders.base / "model.safetensors"), tiny.exported(adapted, merged=False))
    server.restart()
    assert server.weights == str(folders.base)
    engine.weights.restore(server)
    assert server.adapters == {engine.served_model: server.version} and server.version.endswith("version_00002")


def sleeping(server) -> SleepOnTrainersGPUs:
    """With workers of one rank, on whose GPU the server uses 400 of 1000 GiB while awake; it records the question."""

    def call(work) -> list[list[int]]:
        assert work is Worker.free_gpu_memory
        server.asked.append(("trainer", "frees its cache", None, None))
        return [[(1000 if server.asleep else 600) << 30]]

    return SleepOnTrainersGPUs(400 << 30, SimpleNamespace(call=call))


def test_servers_on_the_trainers_gpus_sleep_and_wake_in_two_steps_around_the_weights(sync_of):
    server = ScriptedReplica()
    _, sync = sync_of(server, sleep=sleeping(server))
    sync.push(1)
    server.asked.clear()
    sync.release()
    assert server.asleep
    assert server.paths() == ["frees its cache", "/sleep", "frees its cache"]
    assert ("POST", "/sleep", None, {"level": 2}) in server.asked
    server.asked.clear()
    sync.push(1)  # sleep has dropped the weights: the same version is sent again
    assert server.paths() == ["frees its cache", "/wake_up", *REFIT, "/wake_up"]
    assert [params for _, path, _, params in server.asked if path == "/wake_up"] == [
        {"tags": "weights"}, {"tags": "kv_cache"}]  # fmt: skip


def test_a_server_that_has_ended_is_not_asked_to_sleep(sync_of):
    server = ScriptedReplica()
    _, sync = sync_of(server, sleep=sleeping(server))
    sync.push(1)
    server.stop()
    server.asked.clear()
    sync.release()
    assert server.paths() == ["frees its cache", "frees its cache"]


def test_servers_that_are_awake_make_room_for_other_weights_first(sync_of):
    """As after a training that ended early, whose policy is then evaluated."""
    server = ScriptedReplica()
    _, sync = sync_of(server, sleep=sleeping(server))
    sync.push(1)
    server.asked.clear()
    sync.push(2)
    assert server.paths() == ["frees its cache", "/sleep", "frees its cache", "frees its cache", "/wake_up", *REFIT,
                              "/wake_up"]  # fmt: skip


def test_a_server_that_has_slept_gets_the_base_weights_again_before_its_adapters(adapters):
    _, server, _, sync = adapters
    sync.sleep = sleeping(server)
    for version in (1, 2):
        sync.push(version)
        assert server.paths().count("/collective_rpc") == version
        sync.release()
