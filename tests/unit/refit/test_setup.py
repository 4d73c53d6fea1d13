"""What a config says about refits is checked before anything is trained."""

from pathlib import Path

import pytest

from nemo_edo.config.compose import ConfigError, compose_run
from nemo_edo.errors import UserError
from nemo_edo.refit import setup
from nemo_edo.rollouts import store

CORRECTED = "grpo.sampler_correction=tis"


def config(*overrides: str):
    return compose_run("quickstart", ["generation.backend=vllm", "~arms", *overrides])


def root(run: Path, *overrides: str) -> Path:
    return setup.refit_root(config(*overrides).generation, run)


def test_a_file_system_without_room_for_two_versions_is_refused(tmp_path, tiny_qwen2, monkeypatch):
    cfg = config(f"model.path={tiny_qwen2}", f"generation.refit.folder={tmp_path}")
    size = setup.weight_bytes(tiny_qwen2, "fp32")
    files = sum(file.stat().st_size for file in tiny_qwen2.glob("*.safetensors"))
    assert size == pytest.approx(files, rel=0.05)
    given = cfg.generation, cfg.lora, cfg.model.path, "fp32", tmp_path / "run"
    monkeypatch.setattr(store, "free_bytes", lambda folder: 2 * size - 1)
    with pytest.raises(UserError, match=f"generation.refit.folder: {tmp_path}"):
        setup.check_refit(*given)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 2 * size)
    setup.check_refit(*given)


def test_weights_are_in_shared_memory_for_servers_of_this_machine_and_in_the_runs_folder_for_others(tmp_path):
    own, other = (root(tmp_path / name) for name in ("a", "b"))
    assert own.parent == other.parent == Path("/dev/shm") and own != other
    urls = "generation.servers.urls=[http://node7:8000]"
    assert root(tmp_path / "a", urls) == tmp_path / "a" / "refit"
    assert root(tmp_path / "a", urls, "generation.refit.folder=weights").is_absolute()


@pytest.mark.parametrize(("overrides", "named"), [
    (["generation.one_step_off=true"], "grpo.sampler_correction .* generation.one_step_off"),
    (["generation.one_step_off=true", CORRECTED, "algorithm=idpo"], "iterative DPO"),
    (["generation.one_step_off=true", CORRECTED, "generation.placement=shared"], "sleep"),
    (["generation.one_step_off=true", CORRECTED, "train.rollouts=somewhere"], "nothing is generated"),
    (["generation.placement=shared", "generation.refit.transport=nccl"], "'nccl', expected disk .*placement shared"),
    (["generation.backend=trtllm", "generation.refit.transport=nccl"], "disk with generation.backend trtllm"),
    (["generation.backend=trtllm", "generation.servers.urls=[http://a:1]"], "restart"),
])
def test_settings_that_do_not_go_together_are_refused_with_their_names(overrides, named):
    with pytest.raises(ConfigError, match=named):
        config(*overrides)
