"""From the config to the servers: what is missing is told before anything is trained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nemo_edo.configuration import compose_run
from nemo_edo.errors import UserError
from nemo_edo.generation.servers import build_replicas, check_servers, server_python
from nemo_edo.generation.trtllm_server import TRTLLM
from nemo_edo.generation.vllm_server import VLLM


def config(*overrides: str, backend: str = "vllm"):
    return compose_run("quickstart", [f"generation={backend}", *overrides])


def options(command: list[str]) -> dict[str, str]:
    return {name.removeprefix("--"): value for name, value in zip(command, command[1:], strict=False)
            if name.startswith("--")}


def launched(cfg, gpus: int, tmp_path: Path) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Options and environment of each server that a config starts."""
    api = {"vllm": VLLM, "trtllm": TRTLLM}[cfg.generation.backend]()
    launches = [replica._launch for replica in build_replicas(cfg, tmp_path / "model", tmp_path, gpus)]
    return [(options(api.command(launch, tmp_path / "model", 8000)), api.environment(launch, "key"))
            for launch in launches]


def test_an_interpreter_without_the_server_is_told_with_what_to_do():
    with pytest.raises(UserError, match="has no vllm: make vllm-env .*servers.python.*servers.urls"):
        check_servers(config(f"generation.servers.python={sys.executable}"), gpus=0)


def test_an_interpreter_that_is_not_there_is_told():
    with pytest.raises(UserError, match="generation.servers.python: there is no /no/python"):
        check_servers(config("generation.servers.python=/no/python"), gpus=0)


def test_too_few_gpus_are_told(tmp_path: Path, monkeypatch):
    (tmp_path / "json.py").touch()
    monkeypatch.setattr(VLLM, "package", "json")
    overrides = [f"generation.servers.python={sys.executable}", "generation.servers.replicas=2",
                 "generation.servers.tensor_parallel_size=2", "generation.servers.first_gpu=4"]
    check_servers(config(*overrides), gpus=8)
    with pytest.raises(UserError, match="2 replicas of 2 GPUs from GPU 4 on need 8 GPUs; this machine has 7"):
        check_servers(config(*overrides), gpus=7)


def test_a_key_that_the_environment_lacks_is_told(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    cfg = config("generation.servers.urls=[http://a:1]", "generation.servers.api_key_variable=MY_KEY")
    with pytest.raises(UserError, match="api_key_variable is MY_KEY, which the environment does not have"):
        check_servers(cfg, gpus=0)


def test_servers_at_urls_get_the_key_of_the_environment(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MY_KEY", "secret")
    cfg = config("generation.servers.urls=[http://a:1,http://b:2/]", "generation.servers.api_key_variable=MY_KEY")
    replicas = build_replicas(cfg, tmp_path, tmp_path, gpus=0)
    assert [(r.url, r.is_local, r.headers) for r in replicas] == [
        ("http://a:1", False, {"Authorization": "Bearer secret"}),
        ("http://b:2", False, {"Authorization": "Bearer secret"})]


def test_every_run_makes_a_new_key_that_no_command_line_holds(tmp_path: Path):
    keys = [build_replicas(config(), tmp_path, tmp_path, gpus=0)[0]._key for _ in range(2)]
    assert keys[0] != keys[1] and all(len(key) >= 43 for key in keys)
    launch = build_replicas(config(), tmp_path, tmp_path, gpus=0)[0]._launch
    assert not any("secret" in part for part in VLLM().command(launch, tmp_path, 8000))
    assert VLLM().environment(launch, "secret")["VLLM_API_KEY"] == "secret"


def test_the_command_line_of_a_policys_server_is_this_one(tmp_path: Path):
    cfg = config("generation.servers.python=/x/python", "generation.servers.arguments=[--seed,'7']",
                 "generation.servers.tensor_parallel_size=2", "lora.rank=20", "generation.refit.lora=adapter")
    common = ["/x/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/model", "--served-model-name",
              "policy", "--host", "127.0.0.1", "--port", "8000", "--dtype", "float32", "--max-model-len", "64",
              "--max-num-seqs", "256", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
              "--middleware", "require_key.RequireKey", "--worker-extension-cls", "tied_head.TiedHead",
              "--disable-uvicorn-access-log"]
    machine = {
        0: ["--enforce-eager", "--distributed-executor-backend", "uni", "--no-enable-chunked-prefill",
            "--max-num-batched-tokens", "8192"],
        2: ["--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85"],
    }  # fmt: skip
    for gpus, of_machine in machine.items():
        [replica] = build_replicas(cfg, Path("/model"), tmp_path, gpus)
        command = VLLM().command(replica._launch, replica.model_folder, 8000)
        assert command == [*common, *of_machine, "--enable-lora", "--max-lora-rank", "32", "--seed", "7"]


@pytest.mark.parametrize(("top_p", "mode"), [(1.0, "processed_logprobs"), (0.9, "raw_logprobs")])
def test_the_kind_of_log_probabilities_follows_the_cut(top_p: float, mode: str, tmp_path: Path):
    [(command, _)] = launched(config(f"sampling.top_p={top_p}"), 0, tmp_path)
    assert (command["logprobs-mode"], command["generation-config"]) == (mode, "vllm")


@pytest.mark.parametrize("length", [512, 20_000])
def test_on_a_cpu_prompts_are_read_whole_and_there_is_room_for_the_longest(length: int, tmp_path: Path):
    """vLLM's engine ends where a prompt with a seed is read in parts there."""
    [replica] = build_replicas(config(f"model.seq_length={length}"), tmp_path, tmp_path, gpus=0)
    command = VLLM().command(replica._launch, tmp_path, 8000)
    assert "--no-enable-chunked-prefill" in command
    assert int(command[command.index("--max-num-batched-tokens") + 1]) >= length
    [replica] = build_replicas(config(), tmp_path, tmp_path, gpus=1)
    assert "--no-enable-chunked-prefill" not in VLLM().command(replica._launch, tmp_path, 8000)


def test_replicas_take_gpus_of_their_own_from_the_first_one_on(tmp_path: Path):
    cfg = config("generation.servers.replicas=2", "generation.servers.tensor_parallel_size=2",
                 "generation.servers.first_gpu=4")
    found = launched(cfg, 8, tmp_path)
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in found] == ["4,5", "6,7"]
    assert all(command["tensor-parallel-size"] == "2" for command, _ in found)


@pytest.mark.parametrize(("overrides", "threads"), [
    ([], "6"), (["generation.servers.replicas=2"], "3"), (["generation.servers.replicas=9"], "1"),
    (["generation.servers.replicas=2", "generation.servers.threads=5"], "5")])  # fmt: skip
def test_replicas_on_the_cpu_share_the_cores_with_threads_that_sleep_while_they_wait(
    overrides: list[str], threads: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for _, environment in launched(config(*overrides), 0, tmp_path):
        assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == (threads, "PASSIVE")


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_servers_listen_on_loopback_and_compute_in_the_trainers_length(backend: str, tmp_path: Path):
    [(command, _)] = launched(config(backend=backend), 1, tmp_path)
    assert command["host"] == "127.0.0.1"
    assert command.get("max-model-len", command.get("max_seq_len")) == "64"


@pytest.mark.parametrize(("overrides", "dtype"), [([], "float32"), (["precision=bf16"], "bfloat16"),
                                                  (["generation.servers.dtype=float16"], "float16")])
def test_servers_compute_as_the_trainer_does_unless_they_are_told(overrides: list[str], dtype: str, tmp_path: Path):
    [(command, _)] = launched(config(*overrides), 0, tmp_path)
    assert command["dtype"] == dtype


def test_the_interpreter_that_is_named_comes_first():
    assert server_python(config("generation.servers.python=/x/python").generation.servers) == "/x/python"


@pytest.mark.parametrize(("backend", "overrides", "told"), [
    ("vllm", ["sampling.top_p=0.9", "sampling.temperature=0.7"], "sampling.temperature is 0.7, expected 1"),
    ("trtllm", ["sampling.temperature=0.7"], "sampling.temperature is 0.7, expected 1"),
    ("trtllm", ["generation.servers.host=0.0.0.0"], "asks for no key"),
    ("trtllm", ["generation.servers.dtype=float16"], "the model folder's own numbers"),
    ("vllm", ["generation.servers.urls=[node7:8000]"], "expected a URL"),
    ("vllm", ["generation.servers.urls=[http://a:1,http://a:1/]"], "each server once"),
    ("vllm", ["generation.servers.api_key_variable=KEY"], "is for servers at urls"),
    ("vllm", ["generation.servers.memory_share=1"], "memory_share"),
    ("vllm", ["generation.servers.restarts=-1"], "restarts"),
    ("vllm", ["generation.servers.threads=0"], "threads"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_as_they_are_composed(backend: str, overrides: list[str], told: str):
    with pytest.raises(UserError, match=told):
        config(*overrides, backend=backend)
