"""Run by torchrun on two processes: refits of a scripted server, and drawing ahead, in every layout. Rank 0 writes OUT.

    torchrun --nproc-per-node 2 refit_ranks_worker.py MODEL OUT '{"tensor": {"tensor_model_parallel_size": 2}}'
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from threading import Event

import scripted_server
import tiny_models
import torch
from safetensors.torch import load_file

from nemo_edo.algorithms.ahead import InBackground
from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron import platform


class Group:
    """A link to one server of one worker."""

    unique_id = bytes(128)

    def __init__(self) -> None:
        self.tensors: queue.Queue = queue.Queue()

    def meet(self, ranks: range, world_size: int) -> None:
        pass

    def join(self, world_size: int) -> None:
        pass

    def broadcast(self, tensor) -> None:
        self.tensors.put(tensor.clone())

    def receive(self, server):
        return self.tensors.get(timeout=60)


def everyone(value) -> list:
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def told(work) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "nothing"


def servers(**settings) -> list:
    """On the first rank alone, as in a run."""
    return [scripted_server.ScriptedReplica(**settings)] if torch.distributed.get_rank() == 0 else []


def through_a_folder(policy, folder: Path) -> dict:
    from nemo_edo.refit.disk import DiskSync
    from nemo_edo.refit.export import WeightFolders
    from nemo_edo.refit.server_weights import ReloadedWeights

    engine = scripted_server.engine_of(*servers())
    sync = DiskSync(engine, WeightFolders(folder, policy.built, 1), ReloadedWeights(5.0), attempts=1)
    sync.push(1)
    state = everyone((engine.policy_version, str(engine.model_folder), engine.served_model))
    weights = load_file(engine.model_folder / "model.safetensors")
    for replica in engine.replicas:
        replica.faults, replica.cannot_start = {"/collective_rpc": 9}, True
    return {"state": state, "weights": weights, "refused": everyone(told(lambda: sync.push(2))),
            "version": everyone(engine.policy_version)}  # fmt: skip


def by_broadcasts(policy) -> dict:
    from nemo_edo.refit.nccl import NCCLSync, exported

    engine, group = scripted_server.engine_of(*servers()), Group()
    for replica in engine.replicas:
        replica.link = group
    settings = {"name": "run", "attempts": 2, "limit_s": 60.0}
    sync = NCCLSync(engine, exported(policy.built), lambda: group, **settings)
    for replica in engine.replicas:
        replica.faults = {"/update_weights": 1}  # the second attempt goes through
    sync.push(1)
    received = dict(engine.replicas[0].received) if engine.replicas else {}
    return {"state": everyone(engine.policy_version), "weights": received}


def ahead() -> dict:
    from nemo_edo.progress import AheadOnMain

    go_on = Event()

    def draw(t: int, stop: Event) -> dict[str, float]:
        assert go_on.wait(60)
        if t == 2:
            raise UserError("no server is left")
        return {"t": float(t)}

    shared, seen = AheadOnMain(InBackground(draw)), []
    for t in (1, 2):
        go_on.clear()
        shared.begin(t)
        seen.append(everyone(shared.is_done()))
        go_on.set()
        seen.append(everyone(told(shared.finish)))
    shared.stop()
    return {"seen": seen, "speed": everyone(shared.speed)}


def main(model: str, out: str, layouts: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    results = {}
    for name, sizes in json.loads(layouts).items():
        policy = tiny_models.build_policy(Path(model), ParallelismConfig(**sizes))
        results[name] = {
            "disk": through_a_folder(policy, Path(out).parent / name),
            "nccl": by_broadcasts(policy),
            "expected": tiny_models.exported(policy),
        }
    results["ahead"] = ahead()
    tiny_models.leave(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
