"""A real vLLM server on the CPU that receives weights through the stub of NCCL, on the quickstart's model. Writes
FOLDER/results.json for tests/servers/test_nccl_refit.py."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import nccl_stub
import psutil
from refit_worker import GREEDY, SAMPLED, largest_gap, move, prepared

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.generation import servers as building
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.refit.libnccl import Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.run import build

INSIDE = Path(__file__).parent / "inside_stub_server"
LIMIT_S = 120.0


class StubVLLM(VLLM):
    """vLLM with the worker extension of ``inside_stub_server``."""

    def environment(self, launch, key):
        found = super().environment(launch, key)
        return {**found, "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(INSIDE)])}


def pushed(model, in_process, servers, sync, data, version: int) -> dict:
    """Both engines' responses after a push."""
    sync.push(version)
    greedy = sampling_requests(data.train[:40], data.prompts, 1, 1, "greedy")
    texts = [[r.text for r in engine.generate(greedy, GREEDY)] for engine in (in_process, servers)]
    rollouts = servers.generate(sampling_requests(data.train[:32], data.prompts, 2, 1, "sampled"), SAMPLED)
    [replica] = servers.replicas
    return {
        "greedy_same": sum(one == other for one, other in zip(*texts, strict=True)),
        "greedy": texts[1],
        "versions": sorted({r.policy_version for r in rollouts}),
        "largest_gap": largest_gap(model, rollouts, data),
        "name": replica.request("GET", "/weight_info")["weight_version"],
        "starts": replica.starts,
    }


def killing_once(workers, replica, after: int) -> SimpleNamespace:
    """Workers whose stream of weights kills the server's processes in the middle."""
    seen = []

    def call(work, own):
        def taken(name, weight) -> None:
            if len(seen) == after:
                for child in psutil.Process(replica.process.pid).children():
                    child.kill()
            seen.append(name)
            own(name, weight)

        workers.call(work, own=taken)

    return SimpleNamespace(call=call)


def main(folder: Path) -> None:
    library = Library(nccl_stub.build(folder))
    cfg, run, data, model, in_process = prepared(
        folder,
        "generation.refit.transport=nccl",
        f"generation.refit.nccl_library={library.path}",
        "generation.servers.arguments=[--worker-extension-cls,stub_worker.StubWorker]",
    )
    building.APIS["vllm"] = StubVLLM
    servers = build.start_servers(cfg, run, data)
    try:
        sync = NCCLSync(servers, model.workers, lambda: nccl_stub.communicator(library, LIMIT_S), name="run",
                        attempts=2, limit_s=LIMIT_S)  # fmt: skip
        results = []
        for version in range(2):
            move(model, version)
            results.append(pushed(model, in_process, servers, sync, data, version))
        move(model, 2)
        sync._workers = killing_once(model.workers, servers.replicas[0], after=3)
        results.append(pushed(model, in_process, servers, sync, data, 2))
    finally:
        servers.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
