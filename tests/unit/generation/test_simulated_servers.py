"""A collection of long responses on servers that take the time of real ones: the shipped 32k config's 16 servers, with
lengths of a long tail, at 100 times the speed."""

import asyncio
import json
import random
import threading
import time
from dataclasses import replace

import pytest
from helpers.completions_server import KEY, STOP_ID, CompletionsServer

from nemo_edo.checks import doctor
from nemo_edo.checks.iteration_time import (
    CACHE_SHARE,
    DECODING_BANDWIDTH,
    GPU_BANDWIDTH,
    GPU_BYTES,
    generation_seconds,
    iteration_times,
)
from nemo_edo.cluster.launch import launch, plan
from nemo_edo.config import ServersConfig
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.errors import RunStopped
from nemo_edo.generation import dispatch
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.interfaces import PartWatch
from nemo_edo.rollouts import resumable
from nemo_edo.rollouts.resumable import Parts
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, SamplingParams, ScoredRollout

FASTER, TICK_S, SHOWN = 100.0, 0.02, 1000
"""Simulated seconds a second; real seconds between two looks; tokens that one token of an answer stands for."""
GIVEN = ["model.path=/nodes/m", "data.train=/nodes/a", "data.test=/nodes/b", "output_dir=runs"]  # not on this machine


class Simulated(CompletionsServer):
    """A step of decoding reads the weights and every running response's keys and values."""

    def __init__(self, iteration, lengths, state) -> None:
        super().__init__(state)
        shape = iteration.shape
        self.weights_bytes, self.lengths = 2 * shape.parameters, lengths
        self.cached = 4 * shape.num_layers * shape.key_width
        self.room, self.prompt = CACHE_SHARE * GPU_BYTES - self.weights_bytes, iteration.prompt
        self.queue, self.running, self.ended, self.busy = [], [], 0, 0.0
        self.aborts = False

    async def answer(self, path, body, has_key):
        if path != "/v1/completions":
            return await super().answer(path, body, has_key)
        request = json.loads(body)
        length = self.lengths[request["seed"]]
        entry = [0.0, length, asyncio.get_running_loop().create_future()]
        self.queue.append(entry)
        try:
            await entry[2]
        finally:
            for place in (self.queue, self.running):
                if entry in place:
                    place.remove(entry)
        self.ended += 1
        ids = [2] * max(1, length // SHOWN) + [STOP_ID]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        return 200, {"model": "policy", "choices": [choice], "usage": {"completion_tokens": length}}

    async def decode(self) -> None:
        clock, before = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(TICK_S)
            now = clock()
            if self.aborts:  # as vLLM ends requests whose connections are closed
                self.queue, self.running, self.aborts = [], [], False
            left, before = (now - before) * FASTER, now
            self.busy += left if self.running else 0.0
            while left > 0 and (self.running or self.queue):
                while self.queue and self.used() + self.size(self.queue[0]) < 0.97 * self.room:
                    self.running.append(self.queue.pop(0))
                step = (self.weights_bytes + self.used()) / (GPU_BANDWIDTH * DECODING_BANDWIDTH)
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


@pytest.fixture
def cluster(tmp_path):
    """cluster(iteration, lengths): servers in a thread, and replicas that reach them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def build(iteration, lengths, number):
        async def begin():
            servers = [Simulated(iteration, lengths, tmp_path / "none") for _ in range(number)]
            listening = [await asyncio.start_server(one.serve, "127.0.0.1", 0, backlog=1024) for one in servers]
            tasks.extend(asyncio.ensure_future(one.decode()) for one in servers)
            return servers, [one.sockets[0].getsockname()[1] for one in listening]

        tasks = []
        servers, ports = asyncio.run_coroutine_threadsafe(begin(), loop).result()
        replicas = [Replica(f"server {n}", f"http://127.0.0.1:{port}", KEY, ready_limit_s=30.0)
                    for n, port in enumerate(ports)]  # fmt: skip
        for replica in replicas:
            replica.wait_until_ready()
        return servers, replicas

    yield build
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_the_shipped_long_config_takes_its_planned_time_and_resumes_in_the_middle(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "HAND_OVER_EVERY_S", 20.0 / FASTER)
    monkeypatch.setattr(resumable, "WRITTEN_EVERY_S", 60.0 / FASTER)
    script = launch(plan("grpo_32k", [*GIVEN[:3], f"output_dir={tmp_path}"], None, multirun=False), dry_run=True)
    assert "--nodes=4" in script
    cfg, missing = compose_incomplete("grpo_32k", GIVEN, None)
    estimated = []  # what the doctor's line of time is about
    monkeypatch.setattr(doctor, "iteration_times", lambda one: estimated.append(one) or iteration_times(one))
    assert "iteration" in doctor.time(doctor.Case(cfg, missing, doctor.Devices(False, 16, int(GPU_BYTES))))
    iteration = estimated[0]
    number = iteration.server_gpus
    assert (number, iteration.samples, iteration.longest) == (16, 1024, 32768)
    drawn = random.Random(0)
    lengths = {seed: min(iteration.longest, int(drawn.lognormvariate(9.0, 0.9))) for seed in range(iteration.samples)}
    planned = generation_seconds(replace(iteration, response=sum(lengths.values()) // len(lengths)))
    servers, replicas = cluster(iteration, lengths, number)
    settings = ServersConfig(max_in_flight=cfg.generation.servers.max_in_flight)
    engine = ServerEngine(replicas, VLLM, settings, stop_ids=[STOP_ID], vocab_size=10, decode=str)
    asked = [GenerationRequest(f"p-{seed // 16}", seed % 16, (5, 6), seed) for seed in lengths]
    sampling = SamplingParams(1.0, 1.0, iteration.longest)
    store, signs = RolloutStore(tmp_path / "rollouts"), []

    class Scorer:
        def score(self, rollouts, problems):
            return [ScoredRollout(one, 1.0, "2", True, "correct") for one in rollouts]

    class Silent(PartWatch):
        """Tells nobody."""

    class StopsHalfWay(PartWatch):
        def alive(self) -> None:
            signs.append(1)

        def stop_if_asked(self) -> None:
            if sum(one.ended for one in servers) > len(asked) / 2:
                raise RunStopped("asked")

    def ask(watch: PartWatch):
        return Parts(store, 0, part_size=2048, watch=watch).responses(asked, engine, Scorer(), sampling, [])

    with pytest.raises(RunStopped):
        ask(StopsHalfWay())
    for one in servers:
        one.aborts = True
    while any(one.aborts for one in servers):
        time.sleep(TICK_S)
    kept, before = len(store.stored(0)), sum(one.ended for one in servers)
    # A busy machine has a few on the way, which ended at the servers and are not stored.
    assert kept > 0.4 * len(asked) and len(signs) > 5, "signs of life, and responses on disk, long before the end"
    found = ask(Silent())
    assert [item.rollout.seed for item in found] == list(lengths)
    assert sum(one.ended for one in servers) - before == len(asked) - kept
    again = RolloutStore(tmp_path / "again")
    for one in servers:
        one.busy = 0.0
    Parts(again, 0, watch=Silent()).responses(asked, engine, Scorer(), sampling, [])
    took = max(one.busy for one in servers)
    assert took == pytest.approx(planned, rel=0.2)
    assert min(one.busy for one in servers) > 0.5 * took, "no server is idle for long"
