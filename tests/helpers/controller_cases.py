"""A controller and its workers on two ranks. Run by a WorkerPool."""

import os
import signal
import time
from pathlib import Path

import torch
from helpers.controller import controlled
from helpers.layout_cases import requests, rows
from helpers.training_settings import ED_GRPO, SFT, TEMPERATURE

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError, WorkerFailed
from nemo_edo.types import SamplingParams
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemoteEngine, RemotePolicy
from nemo_edo.worker.worker import Worker


def decode(ids) -> str:
    return " ".join(map(str, ids))


def policy_of(workers: Workers, folder: Path, training, sizes: dict, weights: Path | None = None) -> RemotePolicy:
    settings = {"folder": folder, "parallelism": ParallelismConfig(**sizes), "precision": PrecisionConfig(), "seed": 0,
                "lora": LoRAConfig(), "temperature": TEMPERATURE, "threads": 1, "attention": "auto",
                "loss_head": "auto"}  # fmt: skip
    return RemotePolicy(workers, workers.call(Worker.build, training, weights, settings))


def steps(workers: Workers, folder: Path, out: Path, sizes: dict) -> dict:
    """Two steps of ED-GRPO with all that an iteration asks of a policy, and a checkpoint that another model loads."""
    policy = policy_of(workers, folder, ED_GRPO, sizes)
    policy.freeze_reference()
    policy.start_training(8)
    workers.call(Worker.build_engine, list(range(1, 12)), decode, 4)
    engine = RemoteEngine(policy)
    engine.policy_version = 3
    rollouts = engine.generate(requests(), SamplingParams(TEMPERATURE, 0.9, 8))
    found = {"responses": [tuple(r.response_ids) for r in rollouts], "texts": [r.text for r in rollouts],
             "versions": {r.policy_version for r in rollouts}, "metrics": []}  # fmt: skip
    for seed in range(2):
        batch = rows(seed).with_fields(ref_logprobs=policy.reference_logprobs(rows(seed)))
        ratio = policy.exploration_gradient_ratio(batch)
        metrics = policy.train_step(batch, exploration_weight=0.3)
        found["metrics"].append({**metrics, "ratio": ratio})
    found["logprobs"] = policy.logprobs(rows(7))[0]
    found["rows"] = workers.call(own_places, each=policy.for_each_rank(policy.model.loss_shares(rows(0))))
    workers.call(Worker.save, out / "trained", {"step": 2})
    again = policy_of(workers, folder, SFT, sizes, out / "trained")
    return {**found, "loaded": again.logprobs(rows(7))[0], "finite": workers.call(Worker.is_finite)}


def own_places(worker: Worker, share) -> list[int]:
    return share.places


def run(folder: Path, out: Path, sizes: dict) -> dict | None:
    return controlled(lambda workers: steps(workers, folder, out, sizes))


# --- ranks that fail ----------------------------------------------------------------------------------------------


def fail_on_rank_1(worker: Worker, how: str) -> None:
    if torch.distributed.get_rank() == 1:
        if how == "raises":
            time.sleep(2)  # rank 0 waits for it in the barrier by then, and ends the run after its grace
            raise MemoryError("no room for the gradients")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def failure(how: str) -> str | None:
    def call(workers: Workers) -> str:
        workers.call(Worker.enter, 1)
        try:
            workers.call(fail_on_rank_1, how)
        except (WorkerFailed, UserError) as error:
            print(error, flush=True)
            return str(error)
        return "nothing"

    return controlled(call)
