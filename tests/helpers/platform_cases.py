"""Run as a script: shows on fresh processes what each of ``platform.ADAPTATIONS`` is needed for.

    python platform_cases.py MODEL_FOLDER      each case's outcome
    python platform_cases.py < MODULES.json    these modules' flags where nothing stood in for Transformer Engine

Each prints one JSON object. Importing Megatron takes seconds, so one process imports it and then forks a process for
each case, in which nothing has been adapted yet but the import of Megatron-Bridge.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch


def state_of_torch() -> dict[str, int]:
    """What the adaptations could change, by identity."""
    found = {f"torch.cuda.{name}": id(value) for name, value in vars(torch.cuda).items()}
    found["torch.distributed.scatter"] = id(torch.distributed.scatter)
    for owner, names in ((torch, ("empty", "tensor", "zeros")), (torch.Tensor, ("cuda", "type"))):
        found |= {f"{owner.__name__}.{name}": id(getattr(owner, name)) for name in names}
    if "megatron.core.tensor_parallel.random" in sys.modules:
        random = sys.modules["megatron.core.tensor_parallel.random"]
        found["get_state"], found["set_state"] = id(random._get_cuda_rng_state), id(random._set_cuda_rng_state)
    return found


def changes(before: dict[str, int]) -> list[str]:
    after = state_of_torch()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def train_and_save(model: Path, without: list[str], distributed_optimizer: bool) -> None:
    """What a run does: build, a training step, sampling, a checkpoint with the optimizer."""
    import tiny_models

    from nemo_edo.config import OptimizerConfig, ParallelismConfig
    from nemo_edo.losses import sft_loss
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.forward_backward import MicroBatching
    from nemo_edo.types import GenerationRequest, SamplingParams

    platform.enter(1, without=without)
    policy = tiny_models.build_policy(model, ParallelismConfig(use_distributed_optimizer=distributed_optimizer))
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
    batch = tiny_models.random_batch(rows=2)
    policy.train_step(
        batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
        loss_counts={"sft": float(batch.mask.sum())}, micro_batching=MicroBatching(1), temperature=1.0,
    )
    request = GenerationRequest("problem", 0, (3, 4, 5), seed=7)
    tiny_models.build_engine(policy).generate([request], SamplingParams(1.0, 1.0, 2))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(policy, Path(folder) / "checkpoint", with_optimizer=True)
        checkpoint.load(policy, Path(folder) / "checkpoint", with_optimizer=True)


def enter_twice() -> dict:
    """What the second of two calls changes; the first is known to change something."""
    start = state_of_torch()
    first = platform.enter(1)
    between = state_of_torch()
    second = platform.enter(2, without=["streams"])
    return {"first": changes(start), "second": changes(between), "devices": [str(first), str(second)],
            "threads": torch.get_num_threads()}


def enter_with_cuda() -> dict:
    """``enter`` where torch says that there is CUDA, on the node's fourth GPU."""
    chosen = []
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = chosen.append
    os.environ["LOCAL_RANK"] = "3"
    before = state_of_torch()
    device = platform.enter(1)
    return {"device": str(device), "chosen": [str(item) for item in chosen], "changes": changes(before)}


def make_tensors() -> dict:
    """Where tensors are made that are asked for on "cuda", and within a block that names another device."""
    platform.enter(1)
    plain = torch.ones(2)
    asked = [torch.zeros(2, device="cuda"), torch.tensor(2.0, device="cuda:0"), torch.empty(2, device="meta"), plain]
    with torch.device("meta"):
        within = [torch.zeros(2), torch.tensor(2.0), torch.empty_like(torch.ones(2)), torch.ones(2, device="cpu")]
    return {"asked": [str(one.device) for one in asked], "within": [str(one.device) for one in within],
            "moved": plain.cuda() is plain, "named": plain.type()}


def outcome(case, *arguments) -> dict:
    try:
        return {"result": case(*arguments)}
    except Exception as error:  # whatever it is: it is the case's outcome, and its test knows which one it expects
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        within = [file.partition("site-packages/")[2] for file in files if "site-packages/megatron/" in file]
        return {"error": f"{type(error).__name__}: {error}", "raised_in": within[-1] if within else None,
                "traceback": traceback.format_exc()}


def forked(case, *arguments) -> dict:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(outcome(case, *arguments)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return {"error": "the process died", "raised_in": None, "traceback": None}
    finally:
        process.join()


def transformer_engine_flags() -> dict[str, bool]:
    """HAVE_TE of every module of megatron-core that is loaded and has it."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron.core")}
    return {name: module.HAVE_TE for name, module in sorted(modules.items()) if "HAVE_TE" in vars(module)}


def with_stand_ins(model: Path) -> dict:
    platform.ADAPTATIONS["bridge_import"]()
    import nemo_edo.generation.megatron_engine
    import nemo_edo.megatron.checkpoint  # noqa: F401

    cases = {
        "everything": (train_and_save, model, [], False),
        "everything, distributed": (train_and_save, model, [], True),
        "twice": (enter_twice,),
        "cuda": (enter_with_cuda,),
        "tensors": (make_tensors,),
    }
    for name in platform.ADAPTATIONS.keys() - {"contiguous_scatter", "bridge_import"}:  # these have tests of their own
        cases[name] = (train_and_save, model, [name], False)
    return {"flags": transformer_engine_flags(), **{name: forked(*case) for name, case in cases.items()}}


def without_stand_ins(modules: list[str]) -> dict:
    """The modules' flags in a process in which nothing has stood in for Transformer Engine."""
    imported = sorted(name for name in sys.modules if name.startswith(("megatron", "nemo.", "transformers")))
    platform.enter(1, without=["bridge_import"])
    bridge = outcome(importlib.import_module, "megatron.bridge")
    for name in modules:
        importlib.import_module(name)
    return {"imported": imported, "bridge": bridge, "flags": transformer_engine_flags()}


if __name__ == "__main__":
    untouched = state_of_torch()
    from nemo_edo.megatron import platform

    by_import = changes(untouched)
    results = with_stand_ins(Path(sys.argv[1])) if len(sys.argv) == 2 else without_stand_ins(json.load(sys.stdin))
    print(json.dumps({"by_import": by_import, **results}))
