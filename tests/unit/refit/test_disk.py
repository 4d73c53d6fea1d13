"""Refit through folders: what servers are asked, in which order, and what happens to one that fails."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from safetensors.torch import load_file

from nemo_edo.config import LoRAConfig
from nemo_edo.errors import UserError
from nemo_edo.refit import export, server_weights
from nemo_edo.refit.disk import DiskSync
from nemo_edo.refit.export import WeightFolders
from nemo_edo.refit.server_weights import AdapterWeights, RelaunchedWeights, ReloadedWeights, StaleWeights
from nemo_edo.refit.sleep import OnTrainersGPUs

REFIT = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server_weights, "CACHE_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture
def sync_of(policy, engine_of, tmp_path):
    """sync_of(replicas): their engine, and the DiskSync that brings the tiny model's weights to them."""

    def build(*replicas, weights=None, **settings):
        engine = engine_of(*replicas)
        folders = WeightFolders(tmp_path / "refit", policy.built, num_bytes=1)
        weights = weights or ReloadedWeights(limit_s=5.0)
        return engine, DiskSync(engine, folders, weights, attempts=3, **settings)

    return build


def change(policy) -> None:
    with torch.no_grad():
        for parameter in policy.chunks[0].parameters():
            parameter.add_(0.1)


def test_a_push_has_every_server_load_forget_and_name_the_weights_before_the_version_moves_on(
    sync_of, scripted_replica
):
    servers = scripted_replica("server 0"), scripted_replica("server 1", is_local=False)
    engine, sync = sync_of(*servers)
    sync.push(3)
    assert engine.policy_version == 3
    for server in servers:
        assert server.paths() == REFIT
        assert server.weights == server.version == str(engine.model_folder)
    assert engine.model_folder.name == "version_00003"


def test_the_folder_holds_the_trainers_weights_and_all_that_a_restarted_server_needs(
    sync_of, scripted_replica, policy, tiny
):
    engine, sync = sync_of(scripted_replica())
    change(policy)
    sync.push(1)
    expected = tiny.exported(policy)
    found = load_file(engine.model_folder / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert {"config.json", "tokenizer_config.json"} <= {file.name for file in engine.model_folder.iterdir()}


def test_earlier_folders_are_removed_once_all_servers_have_the_new_one_and_the_last_with_the_sync(
    sync_of, scripted_replica, tmp_path
):
    seen = []

    class Watching(scripted_replica):
        def request(self, method, path, **more):
            if path == "/collective_rpc":
                seen.append(sorted(folder.name for folder in (tmp_path / "refit").glob("*/*")))
            return super().request(method, path, **more)

    engine, sync = sync_of(Watching())
    for version in (1, 2, 3):
        sync.push(version)
    assert seen == [["version_00001"], ["version_00001", "version_00002"], ["version_00002", "version_00003"]]
    assert [folder.name for folder in (tmp_path / "refit").glob("*/*")] == ["version_00003"]
    engine.on_restart = engine.on_drawn = None
    del sync
    gc.collect()
    assert list((tmp_path / "refit").glob("*/*")) == []


def test_what_a_killed_process_has_left_is_removed(policy, tmp_path):
    left = tmp_path / "refit" / "refit_old" / "version_00001.part"
    left.mkdir(parents=True)
    WeightFolders(tmp_path / "refit", policy.built, num_bytes=1)
    assert not left.exists()


def test_a_version_that_the_servers_have_is_not_pushed_again_and_another_policys_is(sync_of, scripted_replica):
    server = scripted_replica()
    engine, sync = sync_of(server)
    sync.push(0)
    sync.push(0)
    assert server.paths() == REFIT
    first = engine.model_folder
    again = DiskSync(engine, sync._folders, ReloadedWeights(5.0), attempts=1)  # of another arm, at its version 0
    again.push(0)
    assert server.paths() == REFIT * 2 and engine.model_folder == first


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version", "/weight_info"])
def test_a_server_that_fails_twice_is_asked_again_and_has_the_weights(sync_of, scripted_replica, path: str):
    server = scripted_replica(faults={path: 2})
    engine, sync = sync_of(server)
    sync.push(1)
    assert server.weights == server.version == str(engine.model_folder) and server.generation == 1


def test_a_cache_that_is_held_for_a_while_is_reset_in_the_end_and_one_that_stays_is_a_failure(
    sync_of, scripted_replica
):
    engine, sync = sync_of(scripted_replica(faults={"/reset_prefix_cache": server_weights.CACHE_RESETS - 1}))
    sync.push(1)
    _, sync = sync_of(scripted_replica(is_local=False, faults={"/reset_prefix_cache": 10**6}))
    with pytest.raises(UserError, match="no server has taken .*prefix cache cannot be reset"):
        sync.push(1)


def test_a_server_of_the_runs_own_that_goes_on_failing_is_started_again_with_the_new_folder(sync_of, scripted_replica):
    server = scripted_replica(faults={"/collective_rpc": 3})
    engine, sync = sync_of(server)
    sync.push(1)
    assert ("restart", str(engine.model_folder), None, None) in server.asked
    assert server.generation == 2 and server.version == str(engine.model_folder)


def test_one_that_cannot_be_brought_to_the_weights_is_left_out_until_a_push_that_it_takes(sync_of, scripted_replica):
    good = scripted_replica("server 0")
    bad = scripted_replica("server 1", is_local=False, faults={"/collective_rpc": 3})
    engine, sync = sync_of(good, bad)
    with pytest.warns(UserWarning, match="server 1 is left out until the next refit: .*status 500"):
        sync.push(1)
    assert engine.replicas == [good]
    sync.push(2)
    assert engine.replicas == [good, bad] and bad.version == str(engine.model_folder)


def test_where_no_server_takes_the_weights_the_version_stays_and_the_error_names_one(sync_of, scripted_replica):
    servers = [scripted_replica(f"server {i}", faults={"/collective_rpc": 9}, cannot_start=True) for i in range(2)]
    engine, sync = sync_of(*servers)
    with pytest.raises(UserError, match="no server has taken the weights of .*version_00001: server 0 has ended"):
        sync.push(1)
    assert engine.policy_version == 0


def test_a_server_that_came_back_is_given_the_current_weights_before_it_is_asked(sync_of, scripted_replica):
    own, given = scripted_replica("server 0"), scripted_replica("server 1", is_local=False)
    engine, sync = sync_of(own, given)
    sync.push(5)
    own.restart(engine.model_folder)  # as the engine does
    given.weights = given.version = "what it was started with"
    for server in (own, given):
        engine.on_restart(server)
        assert server.weights == server.version == str(engine.model_folder)


def test_responses_of_a_server_with_other_weights_than_the_runs_are_refused(sync_of, scripted_replica):
    server = scripted_replica()
    engine, sync = sync_of(server)
    sync.push(1)
    engine.on_drawn(server)
    server.version = "default"  # started again by somebody
    with pytest.raises(StaleWeights, match="server 0 has the weights 'default' where '.*version_00001' are expected"):
        engine.on_drawn(server)


def test_a_server_that_loads_only_when_it_starts_is_started_again_with_each_version(sync_of, scripted_replica):
    server = scripted_replica(model_name="version_00002")
    engine, sync = sync_of(server, weights=RelaunchedWeights())
    sync.push(2)
    assert server.asked == [("restart", str(engine.model_folder), None, None)]
    assert engine.served_model == "version_00002"  # it is named after its folder
    engine.on_restart(server)
    engine.on_drawn(server)
    assert len(server.asked) == 1


def test_a_file_system_without_room_is_named_before_anything_is_written(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "free_bytes", lambda folder: 2**29)
    folders = WeightFolders(tmp_path / "refit", policy.built, num_bytes=2**30)
    with pytest.raises(UserError, match="refit.*: the weights take 1.00 GiB and 0.50 GiB are free.*refit.folder"):
        folders.write(0)
    assert list(folders.root.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error(policy, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="generation.refit.folder: .*file.* cannot be written"):
        WeightFolders(tmp_path / "file" / "refit", policy.built, num_bytes=1)


# --- adapters alone -------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(tiny, tiny_qwen2):
    """A policy with adapters that do something."""
    policy = tiny.build_policy(tiny_qwen2, lora=LoRAConfig(rank=4, alpha=8.0))
    with torch.no_grad():
        for chunk in policy.chunks:
            for name, parameter in chunk.named_parameters():
                if "linear_out" in name and parameter.requires_grad:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return policy


def test_adapters_go_alone_beside_weights_that_are_sent_once(adapted, engine_of, scripted_replica, tmp_path, tiny):
    server = scripted_replica()
    engine = engine_of(server)
    folders = WeightFolders(tmp_path / "refit", adapted.built, num_bytes=1, adapters_alone=True)
    sync = DiskSync(engine, folders, AdapterWeights(folders.base, 5.0), attempts=1)
    for version in (1, 2):
        sync.push(version)
        folder = folders.root / f"version_0000{version}"
        assert server.adapters == {engine.served_model: str(folder)} and server.version == str(folder)
        assert sorted(path.name for path in folders.root.iterdir()) == ["base", folder.name]
    assert server.paths().count("/collective_rpc") == 1 and server.weights == str(folders.base)
    base = load_file(folders.base / "model.safetensors")
    expected = tiny.exported(adapted, merged=False)
    assert base.keys() == expected.keys() and all(torch.equal(base[name], expected[name]) for name in base)


def test_weights_and_adapters_of_the_folders_make_the_merged_weights(adapted, tmp_path, tiny):
    folders = WeightFolders(tmp_path / "refit", adapted.built, num_bytes=1, adapters_alone=True)
    folder = folders.write(1)
    base, factors = load_file(folders.base / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
        base[name.removeprefix("base_model.model.").replace("lora_A.", "")] += scale * b @ a
        assert name.split(".")[-3] in settings["target_modules"]
    merged = tiny.exported(adapted)
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        torch.testing.assert_close(weight, merged[name])


def test_a_server_started_again_has_the_weights_and_is_given_the_adapter(
    adapted, engine_of, scripted_replica, tmp_path
):
    server = scripted_replica()
    engine = engine_of(server)
    folders = WeightFolders(tmp_path / "refit", adapted.built, num_bytes=1, adapters_alone=True)
    DiskSync(engine, folders, AdapterWeights(folders.base, 5.0), attempts=1).push(3)
    assert engine.model_folder == folders.base
    server.restart(engine.model_folder)
    engine.on_restart(server)
    assert server.adapters == {engine.served_model: server.version} and server.version.endswith("version_00003")


# --- shared GPUs ----------------------------------------------------------------------------------------------------


class Memory:
    """Of GPUs, in bytes: servers that are awake hold ``each``."""

    def __init__(self, servers, each: int) -> None:
        self.servers, self.each = servers, each

    def __call__(self) -> int:
        return 1000 - self.each * sum(not server.asleep for server in self.servers)


def test_servers_on_the_trainers_gpus_sleep_after_a_collection_and_wake_in_two_steps_around_the_weights(
    sync_of, scripted_replica
):
    server = scripted_replica()
    engine, sync = sync_of(server, sleep=OnTrainersGPUs(400, Memory([server], 400)))
    sync.push(1)
    server.asked.clear()
    sync.release()
    assert server.asleep
    assert server.asked == [("POST", "/sleep", None, {"level": 2}), ("GET", "/is_sleeping", None, None)]
    server.asked.clear()
    sync.push(1)  # its weights are gone: the same version is brought again
    assert server.paths() == ["/wake_up", *REFIT, "/wake_up", "/is_sleeping"]
    assert [params for _, path, _, params in server.asked if path == "/wake_up"] == [
        {"tags": "weights"}, {"tags": "kv_cache"}]  # fmt: skip


def test_servers_apart_are_never_put_to_sleep(sync_of, scripted_replica):
    server = scripted_replica()
    _, sync = sync_of(server)
    sync.push(1)
    sync.release()
    sync.push(1)
    assert server.paths() == REFIT


@pytest.mark.parametrize(("server", "each", "told"), [
    ({"deaf": True}, 400, "server 0 does not sleep: it was started without --enable-sleep-mode, or on a CPU"),
    ({}, 100, "have given back 0.00 GiB of GPU memory.*generation.placement=apart"),
])
def test_a_sleep_that_frees_nothing_is_an_error(sync_of, scripted_replica, server: dict, each: int, told: str):
    replica = scripted_replica(**server)
    _, sync = sync_of(replica, sleep=OnTrainersGPUs(400, Memory([replica], each)))
    with pytest.raises(UserError, match=told):
        sync.release()
