"""A controller and its workers on two ranks. Run by a WorkerPool."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers.controller import controlled
from helpers.layout_cases import rows
from helpers.training_settings import ED_GRPO, SFT, TEMPERATURE

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError, WorkerFailed
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemoteEngine, RemotePolicy
from nemo_edo.worker.worker import Worker


def requests() -> list[GenerationRequest]:
    prompts = [(20, 21, 22), (30,), (20, 21, 40, 41, 42), (50, 51), (60, 61, 62, 63)]
    return [GenerationRequest(f"p{i}", s, prompt, 10 * i + s) for i, prompt in enumerate(prompts) for s in range(3)]


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
    arrived: list = []
    rollouts = engine.generate(requests(), SamplingParams(TEMPERATURE, 0.9, 8), SimpleNamespace(add=arrived.extend))
    found = {"arrived": as_values(arrived) == as_values(rollouts),
             "responses": [tuple(r.response_ids) for r in rollouts], "texts": [r.text for r in rollouts],
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


def as_values(rollouts) -> list[tuple]:
    return sorted((one.problem_id, one.sample_index, tuple(one.response_ids), tuple(one.response_logprobs), one.text)
                  for one in rollouts)  # fmt: skip


def own_places(worker: Worker, share) -> list[int]:
    return share.places


def run(folder: Path, out: Path, sizes: dict) -> dict | None:
    """The second tensor-parallel rank chooses other tokens, as rounding may make it do."""
    if "tensor_model_parallel_size" in sizes and os.environ["RANK"] == "1":
        from nemo_edo.megatron import platform

        platform.enter(1)
        from nemo_edo.generation import megatron_engine

        choose = megatron_engine.choose_tokens
        megatron_engine.choose_tokens = lambda *a: (choose(*a)[0] + 1, choose(*a)[1])  # the process ends with the case
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
