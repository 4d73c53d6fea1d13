"""What the run sends to vLLM, as our code sends it, against the installed vLLM's own routes, models and command line.

Also for what cannot run here: the options of GPU servers, sleep, and the transfer of weights."""

import contextlib
import json
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import nccl_stub
from helpers.scripted_server import ScriptedReplica, engine_of

from nemo_edo.config import ServersConfig
from nemo_edo.generation.server_api import COMPLETIONS, HEALTH, MODELS, VLLM, completion_body
from nemo_edo.megatron import platform
from nemo_edo.refit.disk import AdapterSync, DiskSync
from nemo_edo.refit.libnccl import Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.refit.servers import SleepOnTrainersGPUs
from nemo_edo.reward_models import vllm_pooling
from nemo_edo.reward_models.formats import Encoded
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.processes import package_file

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]
HELPER = Path(__file__).parents[1] / "helpers" / "vllm_contract.py"
ON_GPUS = {
    "gpus": (0, 1), "logprobs_after_temperature": True, "nccl_library": "/nccl", "adapter_rank": 20, "sleeps": True,
    "arguments": ("--weight-transfer-config", json.dumps({"backend": "nccl"})),
}  # fmt: skip
ON_CPU = {"nccl_library": "/nccl", "adapter_rank": 20, "sleeps": True}
APIS = [kind(ServersConfig(), "bfloat16", Path("log"), max_length=64, **settings)
        for kind in (VLLM, vllm_pooling.VLLMPooling) for settings in (ON_GPUS, ON_CPU)]  # fmt: skip


def calls_of_refits(folder: Path) -> list[tuple]:
    """The requests of every kind of refit, also after a failure, and of sleep."""
    platform.init_process_group(torch.device("cpu"))
    adapter = folder / "of_run" / "version_00001"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").touch()
    (adapter / "model.safetensors").touch()
    external = ScriptedReplica("external", is_managed=False)
    servers = [ScriptedReplica(f"server {place}") for place in range(3)]
    folders = SimpleNamespace(write=lambda version: adapter, base=folder / "base", keep_only=lambda folder: None)
    folders.base.mkdir()
    (folders.base / "model.safetensors").touch()
    DiskSync(engine_of(external), folders, attempts=1, limit_s=5.0).push(1)
    for _ in range(2):  # the second time its first adapter is unloaded
        AdapterSync(engine_of(servers[0]), folders, attempts=1, limit_s=5.0).push(1)
        servers[0].adapters = {"another": "adapter"}
    sleep = SleepOnTrainersGPUs(0, SimpleNamespace(call=lambda work: [[0]]))
    sleep.begin(servers[1:2])
    sleep.wake(servers[1], "weights")
    sleep.wake(servers[1], "kv_cache")
    servers[2].faults = {"/start_weight_update": 1}
    library = Library(nccl_stub.build(folder))
    servers[2].link = nccl_stub.Workers(library, 60.0)
    workers = SimpleNamespace(call=lambda work, own: own("weight", torch.ones(2, 3).bfloat16()))
    sync = NCCLSync(engine_of(servers[2]), workers, lambda: nccl_stub.communicator(library, 60.0), name="run",
                    attempts=2, limit_s=60.0, bucket_bytes=2**20)  # fmt: skip
    sync.push(1)
    servers[2].starts += 1
    sync.push(2)
    return [call for server in [external, *servers] for call in server.asked]


def calls_of_requests(monkeypatch) -> list[tuple]:
    request = GenerationRequest("1", 0, (5, 6), seed=7)
    samplings = SamplingParams(1.0, 1.0, 8), SamplingParams(0.0, 0.9, 8, stop=("\n",))
    bodies = [completion_body(VLLM, "policy", request, sampling, [2]) for sampling in samplings]
    pooled: list[dict] = []

    def post_all(self, path, bodies, read, stop=None):
        pooled.extend(bodies)
        read(0, {"data": [{"data": [0.0] if bodies[0]["task"] == vllm_pooling.SEQUENCE else [[0.0]]}]})

    monkeypatch.setattr(vllm_pooling.Dispatcher, "post_all", post_all)
    for task in (vllm_pooling.TOKENS, vllm_pooling.SEQUENCE):
        model = object.__new__(vllm_pooling.ServedRewardModel)
        model._task, model._replicas, model._settings = task, [ScriptedReplica()], None
        model.score_encoded([[Encoded((5, 6), (1,))]])
    sent = [("POST", COMPLETIONS, body, None) for body in bodies]
    sent += [("POST", vllm_pooling.POOLING, body, None) for body in pooled]
    return [*sent, ("GET", MODELS, None, None), ("GET", HEALTH, None, None)]


def test_vllm_knows_every_call_option_and_variable_of_ours(vllm_environment: Path, tmp_path, monkeypatch):
    calls = calls_of_refits(tmp_path) + calls_of_requests(monkeypatch)
    assert len({path for _, path, _, _ in calls}) >= 18
    commands = [api.command(Path("/model"), 8000)[3:] for api in APIS]
    variables = {name for api in APIS for name in api.environment("key") if name.startswith("VLLM_")}
    given = {"calls": calls, "commands": commands, "variables": sorted(variables)}

    def violations(given: dict) -> list[str]:
        done = subprocess.run([str(vllm_environment), str(HELPER)], input=json.dumps(given), capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert violations(given) == []
    wrong = {
        "calls": [("POST", "/sleeep", None, None), ("POST", "/sleep", None, {"level": 7}),
                  ("POST", "/update_weights", {"update": {}}, None),
                  ("POST", COMPLETIONS, {"prompt": [1], "seeds": 1}, None)],
        "commands": [["--max-num-sequences", "8"]], "variables": ["VLLM_NCCL_LIBRARY"],
    }  # fmt: skip
    assert len(violations(wrong)) == 6


@pytest.mark.parametrize("most", [1, 24, 32, 10_000])
def test_vllms_own_consumer_finds_the_bits_of_every_weight_in_our_buckets(vllm_environment: Path, monkeypatch, most):
    """But for a GPU's streams. Weights larger than a bucket, as large as one, of one number, and not contiguous."""
    path = package_file(str(vllm_environment), "vllm", "distributed/weight_transfer/packed_tensor.py")
    consumer = module_from_spec(spec := spec_from_file_location("packed_tensor", path))
    spec.loader.exec_module(consumer)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(consumer, "_get_streams", lambda device, count: (stream,) * count)
    weights = {
        "bf16": torch.randn(3, 4).bfloat16(), "fp32": torch.randn(2, 4), "turned": torch.randn(4, 3).t(),
        "number": torch.tensor(0.5), "large": torch.randn(9, 9), "odd": torch.randn(5).bfloat16(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    trainer = SimpleNamespace(call=lambda work, own: [own(name, weight) for name, weight in weights.items()])
    sync = NCCLSync(engine_of(), trainer, None, name="run", attempts=1, limit_s=1.0, bucket_bytes=most)
    sync._sizes = [weight.nbytes for weight in weights.values()]
    buckets = []
    sync._group = SimpleNamespace(broadcast=lambda bucket, check: buckets.append(bucket.clone()))
    assert sync._broadcast_all(lambda: None) == len(buckets)
    sent = iter(buckets)
    received: dict[str, torch.Tensor] = {}

    def broadcast(bucket: torch.Tensor, src: int) -> None:
        ours = next(sent)
        assert ours.shape == bucket.shape and src == 0
        bucket.copy_(ours)

    consumer.packed_nccl_broadcast_consumer(
        ((name, (list(weight.shape), weight.dtype)) for name, weight in weights.items()),
        SimpleNamespace(broadcast=broadcast), 0, lambda pairs: received.update((n, w.clone()) for n, w in pairs),
        buffer_size_bytes=most, device="cpu",
    )  # fmt: skip
    assert next(sent, None) is None and [*received] == [*weights]
    for name, weight in weights.items():
        assert (received[name].dtype, received[name].shape) == (weight.dtype, weight.shape)
        bits = (one.reshape(-1).view(torch.uint8) for one in (received[name], weight))
        assert torch.equal(*bits), name
