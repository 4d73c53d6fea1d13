"""From the config to the servers: what is missing is an error before anything is trained."""

import socket
import sys
from pathlib import Path

import pytest

from nemo_edo.config.compose import compose_run
from nemo_edo.errors import UserError
from nemo_edo.generation import replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.generation.servers import check_servers
from nemo_edo.run.build import Builder
from nemo_edo.run_folder import RunFolder
from nemo_edo.utils.http import ServerError

SERVERS = "generation.servers"


def config(*overrides: str, backend: str = "vllm"):
    return compose_run("quickstart", [f"generation={backend}", *overrides])


def of_servers(**settings) -> list[str]:
    return [f"{SERVERS}.{name}={value}" for name, value in settings.items()]


def built(cfg, gpus: int = 0):
    return Builder(cfg, RunFolder(Path("/run"))).replicas(cfg.generation, Path("/logs"), gpus)


def commands(cfg, gpus: int = 0) -> list[tuple[list[str], dict[str, str]]]:
    """Command line and environment of each server that a config starts."""
    apis = [replica.api for replica in built(cfg, gpus)]
    return [(api.command(Path("/model"), 8000), api.environment("a-secret")) for api in apis]


def option(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@pytest.mark.parametrize(("settings", "named"), [
    ({"python": sys.executable}, "has no vllm: make vllm-env .*servers.python.*servers.urls"),
    ({"python": "/no/python"}, f"{SERVERS}.python: .*/no/python"),
    ({"urls": "[http://a:1]", "api_key_variable": "MY_KEY"}, "api_key_variable is MY_KEY")])  # fmt: skip
def test_servers_that_cannot_be_started_or_reached_are_refused(monkeypatch, settings: dict, named: str):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match=named):
        check_servers(config(*of_servers(**settings)).generation, gpus=0)


def test_replicas_take_separate_gpus_from_first_gpu_and_too_few_are_refused(monkeypatch):
    monkeypatch.setattr(VLLM, "package", "json")
    cfg = config(*of_servers(python=sys.executable, replicas=2, tensor_parallel_size=2, first_gpu=4))
    check_servers(cfg.generation, gpus=8)
    with pytest.raises(UserError, match="8 GPUs.* 7"):
        check_servers(cfg.generation, gpus=7)
    found = commands(cfg, gpus=8)
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in found] == ["4,5", "6,7"]
    assert all(option(command, "tensor-parallel-size") == "2" for command, _ in found)


@pytest.mark.parametrize(("inherited", "expected"), [
    (None, "4,5"), ("8, 9,10,11,12,13,14,15", "12,13"), ("a,b,c,d,GPU-4a,GPU-5a", "GPU-4a,GPU-5a")])
@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_servers_choose_among_the_gpus_that_the_run_may_use(monkeypatch, backend, inherited, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    [(_, environment)] = commands(config(*of_servers(tensor_parallel_size=2, first_gpu=4), backend=backend), gpus=8)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected


def test_servers_at_urls_get_the_key_of_the_environment_and_others_a_new_one_that_no_command_line_shows(monkeypatch):
    monkeypatch.setenv("MY_KEY", "a-secret")
    at_urls = built(config(*of_servers(urls="[http://a:1,http://b:2/]", api_key_variable="MY_KEY")))
    assert [(one.url, one.is_managed, one.key.headers["Authorization"]) for one in at_urls] == [
        (url, False, "Bearer a-secret") for url in ("http://a:1", "http://b:2")]
    keys = [built(config())[0].key.value for _ in range(2)]
    assert keys[0] != keys[1] and all(len(key) >= 43 for key in keys)
    [(command, environment)] = commands(config())
    assert not any("a-secret" in part for part in command) and environment["VLLM_API_KEY"] == "a-secret"


PLAIN = {
    "model": "/model", "served-model-name": "policy", "host": "127.0.0.1", "port": "8000", "dtype": "float32",
    "max-model-len": "64", "max-num-seqs": "256", "logprobs-mode": "processed_logprobs", "generation-config": "vllm",
    "middleware": "require_key.RequireKey", "worker-extension-cls": "tied_head.TiedHead",
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "gpus", "options"), [
    ([], 0, PLAIN | {"distributed-executor-backend": "uni", "max-num-batched-tokens": "8192"}),
    (of_servers(tensor_parallel_size=2), 2, PLAIN | {"tensor-parallel-size": "2", "gpu-memory-utilization": "0.85"}),
    (["lora.rank=20", "generation.refit.lora=adapter"], 0, {"max-lora-rank": "32"}),
    (["sampling.top_p=0.9"], 0, {"logprobs-mode": "raw_logprobs"}),  # of the distribution before the cut
    (["precision=bf16"], 0, {"dtype": "bfloat16"}), (of_servers(dtype="float16"), 0, {"dtype": "float16"}),
    (["model.seq_length=20000"], 0, {"max-num-batched-tokens": "20000"}),  # on a CPU prompts are read whole
])
def test_options_of_a_server_follow_config_and_machine(overrides: list[str], gpus: int, options: dict):
    [(command, _)] = commands(config(*overrides), gpus)
    assert {name: option(command, name) for name in options} == options


@pytest.mark.parametrize(("backend", "overrides", "named"), [
    ("vllm", ["sampling.top_p=0.9", "sampling.temperature=0.7"], "sampling.temperature is 0.7"),
    ("trtllm", ["evaluation.temperature=[0.7]"], r"evaluation.temperature is \[0.7\]"),
    ("trtllm", of_servers(host="0.0.0.0"), f"{SERVERS}.host"),
    ("vllm", of_servers(urls="[node7:8000]"), f"{SERVERS}.urls.*node7:8000"),
    ("vllm", of_servers(urls="[http://a:1,http://a:1/]"), f"{SERVERS}.urls"),
    *(("vllm", of_servers(urls=f"['{url}']"), f"{SERVERS}.urls is") for url in (
        "http://user:pw@host", "http://host/?key=pw", "http://host#pw", "http://[pw@host", "http://", "http://a:99999")),
    ("vllm", ["rewards.judge.url=http://user:pw@host/v1"], "rewards.judge.url is .*, expected null or a URL"),
    ("vllm", of_servers(api_key_variable="KEY"), f"{SERVERS}.api_key_variable"),
])
def test_impossible_settings_are_refused_when_the_config_is_composed(backend: str, overrides: list[str], named: str):
    with pytest.raises(UserError, match=named) as error:
        config(*overrides, backend=backend)
    assert "pw" not in str(error.value)


def test_a_servers_port_is_free_and_none_that_the_kernel_gives_to_outgoing_connections(monkeypatch):
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < replica.free_port("127.0.0.1") < first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(replica, "PORTS", (taken.getsockname()[1],))
        with pytest.raises(ServerError, match="is free on 127.0.0.1"):
            replica.free_port("127.0.0.1")
