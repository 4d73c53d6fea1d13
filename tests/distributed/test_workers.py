"""A controller and two workers find what one process finds, and a rank that fails is named."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.controller import controlled
from helpers.layout_cases import rows
from helpers.training_settings import ED_GRPO, SFT, TEMPERATURE
from helpers.worker_pool import CaseFailed

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError, WorkerFailed
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.worker import dispatch
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemoteEngine, RemotePolicy
from nemo_edo.worker.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


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
        dispatch.GRACE_S = 3.0
        workers.call(Worker.enter, 1)
        try:
            workers.call(fail_on_rank_1, how)
        except (WorkerFailed, UserError) as error:
            print(error, flush=True)
            return str(error)
        return "nothing"

    return controlled(call)


LAYOUTS = {"data": {}, "tensor": {"tensor_model_parallel_size": 2}}


@pytest.fixture(scope="module")
def alone(one, tiny_model, tmp_path_factory) -> dict:
    return one.run("distributed.test_workers:run", folder=tiny_model, out=tmp_path_factory.mktemp("one"), sizes={})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_workers_find_what_one_finds_and_each_gets_its_rows_alone(two, alone, tiny_model, tmp_path, layout):
    sizes = LAYOUTS[layout]
    found, of_the_other = two.run("distributed.test_workers:run", folder=tiny_model, out=tmp_path, sizes=sizes)
    assert of_the_other is None
    assert found["arrived"] and alone["arrived"], "each response as it ended, from every rank"
    for name in ("responses", "texts", "versions"):
        assert found[name] == alone[name]
    for step, expected in zip(found["metrics"], alone["metrics"], strict=True):
        expected = {**expected, "padding_share": step["padding_share"]}  # which is the layout's
        assert step == pytest.approx(expected, rel=2e-4, abs=2e-5)
    for name in ("logprobs", "loaded"):
        torch.testing.assert_close(found[name], alone["logprobs"], rtol=1e-4, atol=1e-4)
    first, second = found["rows"]
    assert sorted(first + second) == list(range(5)) if layout == "data" else first == second == list(range(5))
    assert found["finite"] == [True, True]


def test_a_rank_that_raises_is_named_with_its_error_though_rank_0_waits_for_it(two):
    with pytest.raises(CaseFailed, match="rank 1 on .* failed in fail_on_rank_1: MemoryError: no room for the grad"):
        two.run("distributed.test_workers:failure", how="raises")


def test_a_rank_that_is_killed_is_named(two):
    with pytest.raises(CaseFailed, match="(?s)rank 1: died with status -9.*rank 1 on .* during fail_on_rank_1"):
        two.run("distributed.test_workers:failure", how="killed")
