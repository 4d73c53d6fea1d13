"""Workers without a run: in this process alone, or on the ranks of a WorkerPool."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from helpers import tiny_models

from nemo_edo.config import ParallelismConfig
from nemo_edo.worker import dispatch
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.serve import serve
from nemo_edo.worker.worker import Place, Worker

T = TypeVar("T")


def workers_of(policy) -> Workers:
    """The workers of one process, whose model is no model class but has the policy."""
    workers = Workers()
    give(workers.local, policy)
    return workers


def remote(policy) -> RemotePolicy:
    return RemotePolicy(workers_of(policy), [Place(share=0, answers=True, layers=1, kernels={})])


def give(worker: Worker, policy) -> None:
    worker.model = SimpleNamespace(policy=policy, built=policy.built, reference=None)


def build_tiny(worker: Worker, folder: Path, sizes: dict) -> None:
    """A call: every rank's part of a tiny model."""
    give(worker, tiny_models.build_policy(folder, ParallelismConfig(**sizes)))


def controlled(work: Callable[[Workers], T]) -> T | None:
    """What ``work`` returns on rank 0, which it is the controller on; the other ranks of a pool serve."""
    import torch

    default = torch.distributed.distributed_c10d._get_default_store()
    dispatch._store = lambda *_: torch.distributed.PrefixStore("controller", default)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    if torch.distributed.get_rank():
        assert serve() == 0
        return None
    try:
        return work(dispatch.workers())
    finally:
        dispatch.dismiss()
