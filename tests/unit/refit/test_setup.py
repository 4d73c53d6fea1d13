"""What a config says about refits is checked before anything is trained."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.controller import workers_of
from helpers.scripted_server import ScriptedReplica, engine_of

from nemo_edo.config.compose import ConfigError, arm_configs, compose_run
from nemo_edo.errors import UserError
from nemo_edo.refit import export, setup
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.worker import Worker

VLLM = ["generation.backend=vllm"]
CORRECTED = "grpo.sampler_correction=tis"


def config(*overrides: str):
    return compose_run("quickstart", [*VLLM, "~arms", *overrides])


@pytest.mark.parametrize(("overrides", "named"), [
    (["generation.placement=shared"], "placement is shared.*placement=apart"),
    (["generation.refit.transport=nccl"], "transport is nccl.*disk"),
    (["generation.refit.lora=adapter"], "refit.lora is adapter.* lora.rank"),
])
def test_what_this_machine_or_model_cannot_do_is_refused(overrides, named, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=named):
        setup.check_refit(config(*overrides), Path("run"))


def test_a_file_system_without_room_for_two_versions_is_refused(tmp_path, tiny_qwen2, monkeypatch):
    cfg = config(f"model.path={tiny_qwen2}", f"generation.refit.folder={tmp_path}")
    size = setup.weight_bytes(cfg, tiny_qwen2)
    files = sum(file.stat().st_size for file in tiny_qwen2.glob("*.safetensors"))
    assert size == pytest.approx(files, rel=0.05)
    monkeypatch.setattr(export, "free_bytes", lambda folder: 2 * size - 1)
    with pytest.raises(UserError, match=f"generation.refit.folder: {tmp_path}"):
        setup.check_refit(cfg, tmp_path / "run")
    monkeypatch.setattr(export, "free_bytes", lambda folder: 2 * size)
    setup.check_refit(cfg, tmp_path / "run")


def test_what_shared_servers_must_free_is_their_share_of_each_gpu(policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    shared = ["generation.placement=shared", "generation.servers.replicas=2", "generation.servers.memory_share=0.4"]
    engine = engine_of(ScriptedReplica("server 0"), ScriptedReplica("server 1"))
    left = [1000, 800]
    monkeypatch.setattr(Worker, "free_gpu_memory", lambda worker: [left.pop()])
    with pytest.raises(ServerError, match="freed"):  # 200 of 800
        setup.build_sleep(config(*shared), workers_of(policy)).begin(engine.replicas)


def test_weights_are_in_shared_memory_for_servers_of_this_machine_and_in_the_runs_folder_for_others(tmp_path):
    own, other = (setup.refit_root(config(), tmp_path / name) for name in ("a", "b"))
    assert own.parent == other.parent == Path("/dev/shm") and own != other
    urls = "generation.servers.urls=[http://node7:8000]"
    assert setup.refit_root(config(urls), tmp_path / "a") == tmp_path / "a" / "refit"
    assert setup.refit_root(config(urls, "generation.refit.folder=weights"), tmp_path / "a").is_absolute()


@pytest.mark.parametrize(("overrides", "named"), [
    (["generation.one_step_off=true"], "grpo.sampler_correction .* generation.one_step_off"),
    (["generation.stale=correct"], "grpo.sampler_correction .* generation.stale"),
    (["generation.one_step_off=true", CORRECTED, "algorithm=idpo"], "iterative DPO"),
    (["generation.one_step_off=true", CORRECTED, "generation.backend=megatron"], "one_step_off .*backend megatron"),
    (["generation.placement=shared", "generation.backend=megatron"], "placement is 'shared', expected apart"),
    (["generation.one_step_off=true", CORRECTED, "generation.placement=shared"], "sleep"),
    (["generation.one_step_off=true", CORRECTED, "train.rollouts=somewhere"], "nothing is generated"),
    (["generation.placement=shared", "generation.refit.transport=nccl"], "'nccl', expected disk .*placement shared"),
    (["generation.stale=perhaps"], "generation.stale is 'perhaps', expected one of refuse, correct"),
    (["generation.refit.transport=pigeon"], "generation.refit.transport is 'pigeon', expected one of disk, nccl"),
    (["generation.backend=trtllm", "generation.refit.transport=nccl"], "disk with generation.backend trtllm"),
    (["generation.backend=trtllm", "generation.servers.urls=[http://a:1]"], "restart"),
])
def test_settings_that_do_not_go_together_are_refused_with_their_names(overrides, named):
    with pytest.raises(ConfigError, match=named):
        config(*overrides)


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_one_step_off_runs_with_either_correction_and_every_arm_needs_one(correction):
    ahead = ["generation.one_step_off=true", f"grpo.sampler_correction={correction}"]
    assert arm_configs(config(*ahead))["policy"].sampler_correction == correction
    with pytest.raises(ConfigError, match="arms.plain.sampler_correction is 'none'"):
        compose_run("quickstart", [*VLLM, *ahead, "~arms", "+arms={plain: {sampler_correction: none}}"])
