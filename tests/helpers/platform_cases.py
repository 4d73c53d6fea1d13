"""Run as a script: what ``platform.enter`` changes, as one JSON object.

Importing Megatron takes seconds, so one process imports it and then forks a process for each case, in which nothing has
been adapted yet but the import of Megatron-Bridge.
"""

import json
import multiprocessing
import os
import sys
from types import ModuleType

import torch


def state_of_torch() -> dict[str, int]:
    """What the adaptations could change, by identity: no submodules, which any import adds."""
    own = {name: value for name, value in vars(torch.cuda).items() if not isinstance(value, ModuleType)}
    found = {f"torch.cuda.{name}": id(value) for name, value in own.items()}
    for owner, names in ((torch, ("empty", "tensor", "zeros")), (torch.Tensor, ("cuda", "type"))):
        found |= {f"{owner.__name__}.{name}": id(getattr(owner, name)) for name in names}
    if "megatron.core.tensor_parallel.random" in sys.modules:
        random = sys.modules["megatron.core.tensor_parallel.random"]
        found["get_state"], found["set_state"] = id(random._get_cuda_rng_state), id(random._set_cuda_rng_state)
    return found


def changes(before: dict[str, int]) -> list[str]:
    after = state_of_torch()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def enter_with_cuda() -> dict:
    """``enter`` of a node's fourth process, which sees eight GPUs."""
    chosen = []
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
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


def forked(case) -> dict:
    """The result of a case in a separate process: adaptations cannot be taken back."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(case()))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


CASES = (enter_with_cuda, make_tensors)

if __name__ == "__main__":
    untouched = state_of_torch()
    from nemo_edo.megatron import platform

    results = {
        "by_import": changes(untouched),
        "imported": sorted(name for name in sys.modules if name.startswith(("megatron", "nemo.", "transformers"))),
    }
    import nemo_edo.megatron.checkpoint  # noqa: F401

    results |= {case.__name__: forked(case) for case in CASES}
    print(json.dumps(results))
