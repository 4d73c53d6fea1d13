"""What the pretended device is asked, in a process that has it."""

import torch
import torch.nn.functional as F


def answers() -> dict[str, str]:
    """"done", or the error, by what is tried."""
    from nemo_edo.parallel import kernels
    from nemo_edo.parallel.softmax_state import RunningSoftmax

    torch.cuda.set_device(0)
    here, there = torch.ones(4), torch.ones(4, device="cuda")
    index, index_there = torch.tensor([1]), torch.tensor([1], device="cuda")
    matrix = torch.ones(4, 4, device="cuda")
    softmax = RunningSoftmax.start(matrix, 4)

    def put(target, where, value):
        target = target.clone()
        target[where] = value

    refused = {
        "add": lambda: here + there,
        "a number changed in place": lambda: torch.tensor(2.0).add_(torch.tensor(2.0, device="cuda")),
        "cat": lambda: torch.cat([there, here]),
        "index of the host by the device": lambda: here[index_there],
        "values of the host": lambda: put(there, torch.tensor([0, 1], device="cuda"), torch.ones(2)),
        "embedding": lambda: F.embedding(index, matrix),
        "a generator of the host": lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        "numpy": lambda: there.numpy(),
        "gradient": lambda: (there.requires_grad_() * 2).backward(here),
        "all_reduce": lambda: torch.distributed.all_reduce(here.clone()),
        "another GPU": lambda: torch.cuda.set_device(1),
        "a kernel of Triton": lambda: kernels.add_columns(softmax, matrix, index.expand(4), 1.0),
    }

    def tried(call) -> str:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"error: {error}"
        return "done"

    return {name: tried(call) for name, call in refused.items()}


def late_copy() -> tuple[list[float], list[float], list[float]]:
    """Pinned memory before and after the synchronisation, and memory that is not pinned."""
    there = torch.tensor([1.0, 2.0], device="cuda")
    pinned, plain = torch.zeros(2, pin_memory=True), torch.zeros(2)
    plain.copy_(there, non_blocking=True)
    pinned.copy_(there, non_blocking=True)
    there.zero_()
    before = pinned.tolist()
    torch.cuda.synchronize()
    return before, pinned.tolist(), plain.tolist()


def counted() -> dict[str, tuple[int, int]]:
    """Launches and synchronisations, by what is done."""
    import pretended_cuda

    torch.cuda.set_device(0)
    there, pinned = torch.ones(4, 4, device="cuda"), torch.zeros(4, 4, pin_memory=True)
    mask, index = there > 2, torch.tensor([1, 2])

    def fetch() -> None:
        there.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()

    done = {
        "view": lambda: there.view(16).t(), "slice": lambda: there[1:, 0], "empty": lambda: torch.empty_like(there),
        "add": lambda: there + there, "add in place": lambda: there.add_(1), "number": lambda: there * 2.0,
        "item": lambda: there[0, 0].item(), "to the host": lambda: there.cpu(), "to the device": lambda: index.cuda(),
        "from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "to pinned memory, then waited for": fetch, "nonzero": lambda: mask.nonzero(),
        "by a mask": lambda: there[mask], "by an index of the host": lambda: there[index],
        "a number put at a mask": lambda: there.masked_fill_(mask, 1.0),
        "compiled": lambda: torch.compile(lambda x: x * 2 + 1)(there),
        "collective": lambda: torch.distributed.all_reduce(there),
    }  # fmt: skip
    found = {}
    for name, what in done.items():
        before = pretended_cuda.counts()
        what()
        now = pretended_cuda.counts()
        found[name] = (now.launches - before.launches, now.synchronizations - before.synchronizations)
    return found
