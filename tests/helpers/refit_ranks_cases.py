"""Refits of a scripted server by several ranks, and collecting ahead. Run by a WorkerPool."""

from pathlib import Path
from threading import Event

import torch
from helpers import scripted_server, tiny_models
from safetensors.torch import load_file

from nemo_edo.algorithms.ahead import InBackground
from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError


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


def engine_and_servers():
    """A server on the first rank alone, as in a run."""
    servers = [scripted_server.ScriptedReplica()] if torch.distributed.get_rank() == 0 else []
    return scripted_server.engine_of(*servers), servers


def through_a_folder(policy, folder: Path) -> dict:
    from nemo_edo.refit.disk import DiskSync
    from nemo_edo.refit.export import WeightFolders
    from nemo_edo.refit.server_weights import ReloadedWeights

    engine, servers = engine_and_servers()
    sync = DiskSync(engine, WeightFolders(folder, policy.built, 1), ReloadedWeights(5.0), attempts=1)
    sync.push(1)
    state = everyone((engine.policy_version, str(engine.model_folder), engine.served_model))
    weights = load_file(engine.model_folder / "model.safetensors")
    for replica in servers:
        replica.faults, replica.cannot_start = {"/collective_rpc": 9}, True
    return {"state": state, "weights": weights, "refused": everyone(told(lambda: sync.push(2))),
            "version": everyone(engine.policy_version)}  # fmt: skip


def by_broadcasts(policy) -> dict:
    from nemo_edo.refit.nccl import NCCLSync, exported

    engine, servers = engine_and_servers()
    sync = NCCLSync(engine, exported(policy.built), lambda: scripted_server.Link(servers), name="run", attempts=2,
                    limit_s=60.0)
    for replica in servers:
        replica.faults = {"/update_weights": 1}  # the second attempt goes through
    sync.push(1)
    return {"state": everyone(engine.policy_version), "weights": dict(servers[0].received) if servers else {}}


def ahead() -> dict:
    from nemo_edo.run.on_rank_0 import AheadOnMain

    may_finish = Event()

    def collect(t: int, stop: Event) -> dict[str, float]:
        assert may_finish.wait(60)
        if t == 2:
            raise UserError("no server is left")
        return {"t": float(t)}

    shared, seen = AheadOnMain(InBackground(collect)), []
    for t in (1, 2):
        may_finish.clear()
        shared.begin(t)
        seen.append(everyone(shared.is_done()))
        may_finish.set()
        seen.append(everyone(told(shared.finish)))
    shared.close()
    return {"seen": seen, "speed": everyone(shared.speed)}


def refits(model: Path, folder: Path, sizes: dict) -> dict:
    policy = tiny_models.build_policy(model, ParallelismConfig(**sizes))
    return {"disk": through_a_folder(policy, folder), "nccl": by_broadcasts(policy),
            "expected": tiny_models.exported(policy)}
