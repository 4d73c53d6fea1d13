"""A collection of long responses on servers that take the time of real ones: the shipped 32k config's 16 servers, with
lengths of a long tail, at 100 times the speed."""

import asyncio
import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.completions_server import KEY, STOP_ID, CompletionsServer

from nemo_edo.checks import doctor, iteration_time
from nemo_edo.cluster.launch import launch, plan
from nemo_edo.config import ServersConfig
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.types import GenerationRequest, SamplingParams

FASTER, TICK_S, SHOWN = 100.0, 0.02, 1000
"""Simulated seconds a second; real seconds between two looks; tokens that one token of an answer stands for."""
GIVEN = ["model.path=/nodes/m", "data.train=/nodes/a", "data.test=/nodes/b"]  # not on this machine


class Simulated(CompletionsServer):
    """A step of decoding reads the weights and every running response's keys and values."""

    def __init__(self, iteration, lengths) -> None:
        super().__init__(Path("no state"))
        shape = iteration.shape
        self.weights_bytes, self.lengths = 2 * shape.parameters, lengths
        self.cached = 4 * shape.num_layers * shape.key_width
        self.room = iteration_time.CACHE_SHARE * iteration_time.GPU_BYTES - self.weights_bytes
        self.prompt, self.bandwidth = iteration.prompt, iteration_time.GPU_BANDWIDTH * iteration_time.DECODING_BANDWIDTH
        self.queue, self.running, self.busy = [], [], 0.0

    async def answer(self, path, body, has_key):
        if path != "/v1/completions":
            return await super().answer(path, body, has_key)
        length = self.lengths[json.loads(body)["seed"]]
        entry = [0.0, length, asyncio.get_running_loop().create_future()]
        self.queue.append(entry)
        await entry[2]
        ids = [2] * max(1, length // SHOWN) + [STOP_ID]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        return 200, {"model": "policy", "choices": [choice], "usage": {"completion_tokens": length}}

    async def decode(self) -> None:
        clock, before = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(TICK_S)
            now = clock()
            left, before = (now - before) * FASTER, now
            self.busy += left if self.running else 0.0
            while left > 0 and (self.running or self.queue):
                while self.queue and self.used() + self.size(self.queue[0]) < 0.97 * self.room:
                    self.running.append(self.queue.pop(0))
                step = (self.weights_bytes + self.used()) / self.bandwidth
                nearest = min(length - done for done, length, _ in self.running)
                steps = max(1.0, min(nearest, left / step, 100.0))
                left -= steps * step
                for entry in list(self.running):
                    entry[0] += steps
                    if entry[0] >= entry[1]:
                        self.running.remove(entry)
                        entry[2].set_result(None)
                while self.used() > self.room and len(self.running) > 1:  # the newest waits again, as vLLM's does
                    self.queue.insert(0, self.running.pop())

    def size(self, entry) -> float:
        return (self.prompt + entry[0]) * self.cached

    def used(self) -> float:
        return sum(map(self.size, self.running))


async def begin(servers: list[Simulated]) -> tuple[list[int], list[asyncio.Task]]:
    """Their ports, and what they do."""
    listening = [await asyncio.start_server(one.serve, "127.0.0.1", 0, backlog=1024) for one in servers]
    ports = [one.sockets[0].getsockname()[1] for one in listening]
    return ports, [asyncio.create_task(one.decode()) for one in servers]


@pytest.fixture
def loop():
    """It runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.mark.slow
def test_the_shipped_long_config_takes_its_planned_time(loop, tmp_path, monkeypatch):
    asked_for = [*GIVEN, f"output_dir={tmp_path}"]
    assert "--nodes=4" in launch(plan("grpo_32k", asked_for, None, multirun=False), dry_run=True)
    cfg, missing = compose_incomplete("grpo_32k", asked_for, None)
    estimated = []  # what the doctor's line of time is about
    times = iteration_time.iteration_times
    monkeypatch.setattr(doctor, "iteration_times", lambda one: estimated.append(one) or times(one))
    gpus = doctor.Devices(False, 16, int(iteration_time.GPU_BYTES))
    assert "iteration" in doctor.time(doctor.Case(cfg, missing, gpus))
    iteration = estimated[0]
    assert (iteration.server_gpus, iteration.samples, iteration.longest) == (16, 1024, 32768)
    drawn = random.Random(0)
    lengths = {seed: min(iteration.longest, int(drawn.lognormvariate(9.0, 0.9))) for seed in range(iteration.samples)}
    planned = iteration_time.generation_seconds(replace(iteration, response=sum(lengths.values()) // len(lengths)))
    servers = [Simulated(iteration, lengths) for _ in range(iteration.server_gpus)]
    ports, tasks = asyncio.run_coroutine_threadsafe(begin(servers), loop).result()
    replicas = [Replica(f"port {port}", f"http://127.0.0.1:{port}", KEY, ready_limit_s=30.0) for port in ports]
    for replica in replicas:
        replica.wait_until_ready()
    settings = ServersConfig(max_in_flight=cfg.generation.servers.max_in_flight)
    engine = ServerEngine(replicas, VLLM, settings, stop_ids=[STOP_ID], vocab_size=10, decode=str)
    asked = [GenerationRequest(f"p-{seed // 16}", seed % 16, (5, 6), seed) for seed in lengths]
    found = engine.generate(asked, SamplingParams(1.0, 1.0, iteration.longest))
    assert [one.seed for one in found] == list(lengths) and not any(task.done() for task in tasks)
    took = max(one.busy for one in servers)
    assert took == pytest.approx(planned, rel=0.2)
    assert min(one.busy for one in servers) > 0.5 * took, "no server is idle for long"
