"""Real vLLM servers on the quickstart's model with OVERRIDES: compared with the in-process engine, and given other
weights again and again, by disk or through the stub of NCCL. Writes FOLDER/results.json for tests/servers/test_vllm.py.

    python vllm_worker.py FOLDER disk|nccl OVERRIDES
"""

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

import psutil
import requests
import torch
from helpers import nccl_stub

from nemo_edo.algorithms.plan import sampling_requests
from nemo_edo.config.compose import compose_run
from nemo_edo.data.batching import build_batch
from nemo_edo.errors import UserError
from nemo_edo.generation import servers as building
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.megatron.platform import device_and_groups
from nemo_edo.refit.libnccl import Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.run import inputs
from nemo_edo.run.build import Builder
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Rollout, SamplingParams

SAMPLED, GREEDY = SamplingParams(1.0, 1.0, 32), SamplingParams(0.0, 1.0, 32)
STOPS = ("1", "\n", "21")
"""Many tokens, one separate token, and a token or the end of one and the beginning of the next."""
LIMIT_S = 120.0


class StubVLLM(VLLM):
    """vLLM with the worker extension of ``inside_stub_server``."""

    def environment(self, key):
        found = super().environment(key)
        own = Path(__file__).parent / "inside_stub_server"
        return {**found, "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(own)])}


class Trial:
    """The quickstart's data and model, the engine in this process, and the servers with their refit."""

    def __init__(self, folder: Path, transport: str, overrides: list[str]) -> None:
        if transport == "nccl":
            library = Library(nccl_stub.build(folder))
            building.APIS["vllm"] = StubVLLM
            extension = "generation.servers.arguments=[--worker-extension-cls,stub_worker.StubWorker]"
            overrides = [f"generation.refit.nccl_library={library.path}", extension, *overrides]
        cfg = compose_run("quickstart", [f"output_dir={folder}", "name=run", "generation=vllm", "~arms",
                                         "replicate_baseline=false", f"generation.refit.transport={transport}",
                                         *overrides])  # fmt: skip
        self.run = RunFolder(folder / "run")
        self.run.data.mkdir(parents=True)
        device_and_groups(cfg.parallelism, cfg.seed, 1)
        inputs.write_builtin_files(cfg, self.run)
        self.data = data = inputs.load_data(cfg, self.run)
        builder = Builder(cfg, self.run, data)
        self.model = model = builder.model(cfg.grpo)
        self.in_process = builder.engine(model)
        builder.check_servers()
        builder.start_servers()
        self.servers = builder.servers
        if transport == "nccl":
            self.sync = NCCLSync(self.servers, model.workers, lambda: nccl_stub.communicator(library, LIMIT_S),
                                 name="run", attempts=2, limit_s=LIMIT_S, bucket_bytes=2**18)  # fmt: skip
        else:
            self.sync = builder.weight_sync(model, self.servers)
        self.greedy = sampling_requests(data.train[:200], data.prompts, 1, 1, "greedy")
        self.sampled = sampling_requests(data.train[:64], data.prompts, 4, 1, "sampled")

    @property
    def replica(self) -> Replica:
        return self.servers.replicas[0]

    def asked(self, problems: int, samples: int, purpose: str) -> list:
        return sampling_requests(self.data.train[:problems], self.data.prompts, samples, 2, purpose)

    # --- after the first push -----------------------------------------------------------------------------------------

    def seeds(self) -> dict:
        """Whether a request has the same response in another order."""
        rollouts = self.servers.generate(self.sampled, SAMPLED)
        again = self.servers.generate(self.sampled[::-1], SAMPLED)
        same = sum(a.response_ids == b.response_ids for a, b in zip(rollouts, again[::-1], strict=True))
        return {"same": same, "distinct": len({tuple(rollout.response_ids) for rollout in rollouts})}

    def exposure(self) -> dict:
        """Statuses without the key, and what of it can be seen of the process."""
        replica, key = self.replica, self.replica.key.value
        [process] = psutil.Process(replica.process.pid).children()  # the server itself, below its keeper
        paths = {"/health": "GET", "/v1/models": "GET", "/collective_rpc": "POST", "/sleep": "POST", "/metrics": "GET"}
        listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        return {
            "statuses": {path: requests.request(how, replica.url + path).status_code for path, how in paths.items()},
            "wrong_key": requests.get(f"{replica.url}/v1/models", headers={"Authorization": "Bearer no"}).status_code,
            "listening": sorted(listening),
            "key_in_arguments": any(key in part for p in [process, *process.children(True)] for part in p.cmdline()),
            "key_in_log": key in replica.api.log.read_text(errors="replace"),
            "key_length": len(key),
            "insecure_serialization": process.environ()["VLLM_ALLOW_INSECURE_SERIALIZATION"],
        }

    def stopped(self, stop: str) -> dict:
        """Responses with a stop string, compared with those of the same seeds without one."""
        asked, decode = self.asked(40, 4, "stop"), self.data.decode
        whole, cut = (self.servers.generate(asked, how) for how in (SAMPLED, replace(SAMPLED, stop=(stop,))))
        pairs, met = list(zip(cut, whole, strict=True)), [rollout for rollout in cut if rollout.stop]
        gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.response_logprobs, b.response_logprobs, strict=False)]
        return {
            "asked": len(asked),
            "met": len(met),
            "beginnings": sum(a.response_ids == b.response_ids[: len(a.response_ids)] for a, b in pairs),
            "contained": sum(r.stop in r.text and r.stop not in decode(list(r.response_ids[:-1])) for r in met),
            "largest_gap": max(gaps),
        }

    # --- with other weights -------------------------------------------------------------------------------------------

    def largest_gap(self, rollouts: list[Rollout]) -> float:
        """Of the servers' log-probabilities to the trainer's."""
        batch = build_batch([(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=self.data.pad_id,
                            sampler_logprobs=[r.response_logprobs for r in rollouts])
        logprobs, _ = self.model.logprobs(batch)
        return float((logprobs - batch.sampler_logprobs).abs()[batch.mask != 0].max())

    def push(self, version: int) -> dict:
        """Both engines' responses after a push of weights that answer otherwise."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.workers.local.model.built.chunks[0].parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.sync.push(version)
        texts = [[r.text for r in engine.generate(self.greedy, GREEDY)] for engine in (self.in_process, self.servers)]
        rollouts = self.servers.generate(self.sampled, SAMPLED)
        return {
            "greedy_same": sum(one == other for one, other in zip(*texts, strict=True)),
            "greedy": texts[1],
            "versions": sorted({r.policy_version for r in rollouts}),
            "largest_gap": self.largest_gap(rollouts),
            "folders": sorted(path.name for path in self.replica.model_folder.parent.iterdir()),
            "name": self.replica.request("GET", "/weight_info")["weight_version"],
            "starts": self.replica.starts,
        }

    def kill(self) -> None:
        for process in psutil.Process(self.replica.process.pid).children():
            process.kill()

    def killed(self) -> dict:
        """The only server dies while it answers, and comes back with the weights of the last push."""
        for other in self.servers.replicas[1:]:
            other.stop()
        del self.servers.replicas[1:]
        starts = self.replica.starts
        threading.Timer(0.3, self.kill).start()
        asked = self.asked(100, 10, "killed")
        rollouts = self.servers.generate(asked, SAMPLED)
        later = self.servers.generate(asked[:200], SAMPLED)  # by the new process, if the first all answered before
        answered = [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts]
        return {
            "starts": self.replica.starts - starts,
            "whole": answered == [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in asked],
            "with_every_logprob": sum(len(r.response_logprobs) == len(r.response_ids) > 0 for r in rollouts),
            "largest_gap": self.largest_gap(rollouts + later),
        }

    def tampered(self) -> str:
        """Somebody gives the server other weights: what the next responses are met with."""
        body = {"method": "reload_policy", "kwargs": {"weights_path": str(self.run.base)}}
        self.replica.request("POST", "/collective_rpc", json=body)
        self.replica.request("POST", "/update_weight_version", json={"new_version": "somebody's"})
        try:
            self.servers.generate(self.greedy[:4], SAMPLED)
        except UserError as error:
            return str(error)
        return "nothing"

    def push_killed_in_the_middle(self, version: int) -> dict:
        seen, workers = [], self.model.workers

        def call(work, own):
            def taken(name, weight) -> None:
                if len(seen) == 3:
                    self.kill()
                seen.append(name)
                own(name, weight)

            workers.call(work, own=taken)

        self.sync.workers = SimpleNamespace(call=call)
        return self.push(version)


def main(folder: Path, transport: str, overrides: list[str]) -> None:
    trial, results = Trial(folder, transport, overrides), {}
    processes = [p for replica in trial.servers.replicas for p in psutil.Process(replica.process.pid).children(True)]
    try:
        pushes = results["pushes"] = [trial.push(0)]
        if len(trial.servers.replicas) > 1:
            results |= {"seeds": trial.seeds(), "exposure": trial.exposure(),
                        "stopped": [trial.stopped(stop) for stop in STOPS]}
        pushes.append(trial.push(1))
        if len(trial.servers.replicas) > 1:
            results |= {"killed": trial.killed(), "tampered": trial.tampered()}
        if transport == "nccl":
            pushes.append(trial.push_killed_in_the_middle(2))
        begun = time.monotonic()
        trial.sync.push(len(pushes) - 1)
        results["again_s"] = time.monotonic() - begun
        processes += psutil.Process(trial.replica.process.pid).children(True)
    finally:
        trial.servers.close()
    psutil.wait_procs(processes, timeout=10)
    results["left_running"] = sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
