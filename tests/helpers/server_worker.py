"""Real vLLM servers compared with the in-process engine, on the quickstart's model with random weights: writes
FOLDER/results.json for tests/servers/test_vllm.py. SAMPLES responses are generated while the server is killed KILLS
times."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import requests
import torch

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.config.compose import compose_run
from nemo_edo.data.batching import build_batch
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.megatron.process_groups import device_and_groups
from nemo_edo.run import build, inputs
from nemo_edo.run.folder import RunFolder
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams

SAMPLED, GREEDY = SamplingParams(1.0, 1.0, 32), SamplingParams(0.0, 1.0, 32)
STOPS = ("1", "\n", "21")
"""Many tokens, one separate token, and a token or the end of one and the beginning of the next."""


class Killer:
    """Kills a replica's server at given counts of answers, of which ``answered`` tells it. Decoding calls that."""

    def __init__(self, replica: Replica, counts: list[int]) -> None:
        self.replica = replica
        self.counts = counts
        self.seen = 0
        self.killed = 0
        self.last = 0
        """The start of the server that was killed last: answers of a dead one still come in."""

    def answered(self) -> None:
        self.seen += 1
        due = self.killed < len(self.counts) and self.seen >= self.counts[self.killed]
        if due and self.replica.starts > self.last and not self.replica.has_ended:
            server_process(self.replica).kill()
            self.killed, self.last = self.killed + 1, self.replica.starts


def server_process(replica: Replica) -> psutil.Process:
    """The server itself, below the keeper that the run has started."""
    [server] = psutil.Process(replica.process.pid).children()
    return server


def engine_over(servers: ServerEngine, replicas: list[Replica], decode) -> ServerEngine:
    """Another engine over some replicas of ``servers``, or over others with the same weights."""
    return ServerEngine(replicas, servers._api, servers._settings, stop_ids=servers._stop_ids,
                        vocab_size=servers._vocab_size, decode=decode, logprobs_after_temperature=True)


def about(rollouts: list[Rollout], asked: list[GenerationRequest]) -> dict:
    answered = [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts]
    whole = answered == [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in asked]
    return {
        "whole": whole,
        "distinct": len({key[:2] for key in answered}),
        "with_every_logprob": sum(len(r.response_logprobs) == len(r.response_ids) > 0 for r in rollouts),
    }


def same(rollouts: list[Rollout], others: list[Rollout]) -> int:
    return sum(one.response_ids == other.response_ids for one, other in zip(rollouts, others, strict=True))


def against_the_trainer(model, in_process, servers: ServerEngine, data) -> dict:
    """Greedy texts of both engines; log-probabilities of the servers' samples compared with the trainer's; seeds."""
    asked = sampling_requests(data.train[:200], data.prompts, 1, 1, "greedy")
    texts = [[r.text for r in engine.generate(asked, GREEDY)] for engine in (in_process, servers)]
    asked = sampling_requests(data.train[:64], data.prompts, 4, 1, "sampled")
    rollouts = servers.generate(asked, SAMPLED)
    batch = build_batch([(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=data.pad_id,
                        sampler_logprobs=[r.response_logprobs for r in rollouts])
    logprobs, _ = model.logprobs(batch)
    again = servers.generate(asked[::-1], SAMPLED)[::-1]
    return {
        "greedy_same": sum(one == other for one, other in zip(*texts, strict=True)),
        "greedy_distinct": len(set(texts[0])),
        "largest_gap": float((logprobs - batch.sampler_logprobs).abs()[batch.mask != 0].max()),
        "repeated_same": same(rollouts, again),
        "sampled_distinct": len({r.response_ids for r in rollouts}),
    }


def exposure(replica: Replica) -> dict:
    """Statuses without the key, and what of it can be seen of the process."""
    process = server_process(replica)
    paths = {"/health": "GET", "/v1/models": "GET", "/collective_rpc": "POST", "/sleep": "POST", "/metrics": "GET"}
    listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    key = replica.key.value
    return {
        "statuses": {path: requests.request(how, replica.url + path).status_code for path, how in paths.items()},
        "wrong_key": requests.get(f"{replica.url}/v1/models", headers={"Authorization": "Bearer no"}).status_code,
        "listening": sorted(listening),
        "key_in_arguments": any(key in part for p in [process, *process.children(True)] for part in p.cmdline()),
        "key_in_log": key in replica.api.log.read_text(errors="replace"),
        "key_length": len(key),
        "insecure_serialization": process.environ()["VLLM_ALLOW_INSECURE_SERIALIZATION"],
    }


def stopped(servers: ServerEngine, data, stop: str) -> dict:
    """Responses with a stop string, compared with those of the same seeds without one."""
    asked = sampling_requests(data.train[:40], data.prompts, 4, 1, "stop")
    whole, cut = servers.generate(asked, SAMPLED), servers.generate(asked, replace(SAMPLED, stop=(stop,)))
    pairs, met = list(zip(cut, whole, strict=True)), [rollout for rollout in cut if rollout.stop]
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.response_logprobs, b.response_logprobs, strict=False)]
    return {
        "asked": len(asked),
        "met": len(met),
        "beginnings": sum(a.response_ids == b.response_ids[: len(a.response_ids)] for a, b in pairs),
        "contained": sum(r.stop in r.text and r.stop not in data.decode(list(r.response_ids[:-1])) for r in met),
        "largest_gap": max(gaps),
    }


def killed(servers: ServerEngine, data, samples: int, kills: int) -> dict:
    asked = sampling_requests(data.train[: samples // 10], data.prompts, 10, 2, "killed")
    # Soon after a share of them has begun: most responses end in the same steps of the server, and then it is idle.
    killer = Killer(servers.replicas[0], [5 + k * samples // kills for k in range(kills)])

    def decode(ids) -> str:
        killer.answered()
        return data.decode(ids)

    begun = time.monotonic()
    rollouts = engine_over(servers, servers.replicas[:1], decode).generate(asked, SAMPLED)
    seconds = time.monotonic() - begun
    return {**about(rollouts, asked), "samples": samples, "kills": killer.killed,
            "starts": servers.replicas[0].starts, "seconds": seconds}


def spread(servers: ServerEngine, data) -> dict:
    asked = sampling_requests(data.train[:40], data.prompts, 10, 4, "spread")
    before = [served(replica) for replica in servers.replicas]
    rollouts = servers.generate(asked, SAMPLED)
    after = [served(replica) for replica in servers.replicas]
    return {**about(rollouts, asked), "answers": [b - a for a, b in zip(before, after, strict=True)]}


def served(replica: Replica) -> int:
    """Completions that a server counts."""
    text = requests.get(f"{replica.url}/metrics", headers=replica.key.headers).text
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if line.startswith("vllm:request_success_total")))


def main(folder: Path, samples: int, kills: int) -> None:
    torch.manual_seed(0)
    cfg = compose_run("quickstart", ["generation=vllm", "generation.servers.replicas=2"])
    run, results = RunFolder(folder / "run"), {}
    device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
    inputs.write_builtin_files(cfg, run)
    data = inputs.load_data(cfg, run)
    model = build.build_model(cfg, run, cfg.grpo)
    build.check_servers(cfg)
    begun = time.monotonic()
    servers = build.start_servers(cfg, run, data)
    results["start_s"] = time.monotonic() - begun
    processes = [p for replica in servers.replicas for p in psutil.Process(replica.process.pid).children(True)]
    try:
        in_process = build.build_engine(cfg, model, data, None)
        results["trainer"] = against_the_trainer(model, in_process, servers, data)
        results["exposure"] = exposure(servers.replicas[0])
        results["spread"] = spread(servers, data)
        results["stopped"] = [stopped(servers, data, stop) for stop in STOPS]
        servers.replicas[1].stop()
        results["killed"] = killed(servers, data, samples, kills)
        processes += psutil.Process(servers.replicas[0].process.pid).children(True)
    finally:
        servers.close()
    psutil.wait_procs(processes, timeout=10)
    results["left_running"] = sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
