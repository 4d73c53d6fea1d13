"""A real vLLM server that is given other weights again and again, on the quickstart's model with OVERRIDES: by disk, or
through the stub of NCCL. Writes FOLDER/results.json for tests/servers/test_refit.py.

    python refit_worker.py FOLDER disk|nccl OVERRIDES
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

import psutil
import torch
from helpers import nccl_stub

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.config.compose import compose_run
from nemo_edo.data.batching import build_batch
from nemo_edo.errors import UserError
from nemo_edo.generation import servers as building
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.megatron.process_groups import device_and_groups
from nemo_edo.refit.libnccl import Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.run import build, inputs
from nemo_edo.run.folder import RunFolder
from nemo_edo.types import SamplingParams

SAMPLED, GREEDY = SamplingParams(1.0, 1.0, 32), SamplingParams(0.0, 1.0, 32)
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
        self.model = model = build.build_model(cfg, self.run, cfg.grpo)
        self.in_process = build.build_engine(compose_run("quickstart", ["~arms"]), model, data, None)
        self.servers = build.start_servers(cfg, self.run, data)
        if transport == "nccl":
            self.sync = NCCLSync(self.servers, model.workers, lambda: nccl_stub.communicator(library, LIMIT_S),
                                 name="run", attempts=2, limit_s=LIMIT_S)  # fmt: skip
        else:
            self.sync = build.build_weight_sync(cfg, self.run, model, self.servers)
        self.greedy = sampling_requests(data.train[:200], data.prompts, 1, 1, "greedy")
        self.sampled = sampling_requests(data.train[:64], data.prompts, 4, 1, "sampled")

    @property
    def replica(self):
        return self.servers.replicas[0]

    def largest_gap(self, rollouts) -> float:
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
        folder = self.replica.model_folder.parent
        return {
            "greedy_same": sum(one == other for one, other in zip(*texts, strict=True)),
            "greedy": texts[1],
            "versions": sorted({r.policy_version for r in rollouts}),
            "largest_gap": self.largest_gap(rollouts),
            "folders": sorted(path.name for path in folder.iterdir()),
            "name": self.replica.request("GET", "/weight_info")["weight_version"],
            "starts": self.replica.starts,
        }

    def kill(self) -> None:
        for process in psutil.Process(self.replica.process.pid).children():
            process.kill()

    def killed(self) -> dict:
        """A server that dies while it answers comes back with the weights of the last push."""
        starts = self.replica.starts
        threading.Timer(0.3, self.kill).start()
        asked = sampling_requests(self.data.train[:100], self.data.prompts, 10, 2, "killed")
        rollouts = self.servers.generate(asked, SAMPLED)
        rollouts += self.servers.generate(asked[:200], SAMPLED)  # by the new process, if the first all answered before
        return {"starts": self.replica.starts - starts, "samples": len(rollouts),
                "largest_gap": self.largest_gap(rollouts)}

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

        self.sync._workers = SimpleNamespace(call=call)
        return self.push(version)


def main(folder: Path, transport: str, overrides: list[str]) -> None:
    trial = Trial(folder, transport, overrides)
    try:
        results: dict = {"pushes": [trial.push(version) for version in range(3)]}
        if transport == "nccl":
            results["pushes"].append(trial.push_killed_in_the_middle(3))
        else:
            results |= {"killed": trial.killed(), "tampered": trial.tampered()}
        begun = time.monotonic()
        trial.sync.push(len(results["pushes"]) - 1)
        results["again_s"] = time.monotonic() - begun
    finally:
        trial.servers.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
