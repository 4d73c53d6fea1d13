"""Memory and time of the loss layer, hidden states to log-probabilities and back, for each method.

    plain   log_softmax(linear(x)).gather in torch
    logits  linear(x), then vocab_parallel_logprobs_and_entropy, which reuses the logits' memory
    fused   linear_logprobs_and_entropy, which never stores the logits

Each pass runs in a separate process (two with --tensor-parallel 2, which share the vocabulary) to measure its peak: the
growth of resident memory, gradients included, beyond inputs and weights. Rounds alternate, so that a drift in the
machine's speed affects all methods equally. Ratios and gradient differences are relative to the first method named,
within a round; every figure is a median over the rounds.

    python tools/benchmarks/loss_layer.py --tokens 4096 --vocabulary 151936 --hidden 1024 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_edo.parallel import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy

STATUS = Path("/proc/self/status")


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, **_) -> tuple[Tensor, Tensor | None]:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1) if entropy else None


def logits(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, **split) -> tuple[Tensor, Tensor | None]:
    return vocab_parallel_logprobs_and_entropy(F.linear(hidden, weight), targets, overwrite_logits=True, **split)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, **split) -> tuple[Tensor, Tensor | None]:
    return linear_logprobs_and_entropy(hidden, weight, targets, **split)


HEADS = {"plain": plain, "logits": logits, "fused": fused}


def inputs(args: argparse.Namespace, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Hidden states and a whole weight that make logits of the size of a trained model's; the same for every head."""
    generator = torch.Generator(device).manual_seed(0)
    make = {"generator": generator, "device": device}
    return {
        "hidden": torch.randn(args.tokens, args.hidden, **make).to(dtype),
        "weight": torch.randn(args.vocabulary, args.hidden, **make).mul_(3 * args.hidden**-0.5).to(dtype),
        "targets": torch.randint(args.vocabulary, (args.tokens,), **make),
        "of_log_prob": torch.randn(args.tokens, **make),
        "of_entropy": 0.1 * torch.randn(args.tokens, **make),
    }


def forward_backward(head, hidden: Tensor, weight: Tensor, data: dict[str, Tensor], entropy: bool, **split) -> None:
    """One pass, which leaves the gradients of ``hidden`` and ``weight`` in them."""
    hidden.grad = weight.grad = None
    logprobs, entropies = head(hidden, weight, data["targets"], entropy, **split)
    loss = (data["of_log_prob"] * logprobs).sum()
    if entropy:
        loss = loss + (data["of_entropy"] * entropies).sum()
    loss.backward()


def measure(args: argparse.Namespace) -> None:
    """What a process of one variant does: writes results and gradients into ``args.out``."""
    torch.set_num_threads(args.threads)
    data = inputs(args)
    columns = args.vocabulary // args.processes
    start = args.process * columns
    weight, hidden = data["weight"][start : start + columns].clone().requires_grad_(), data["hidden"].requires_grad_()
    del data["weight"]
    split = {"vocab_start": start, "group": None}
    if args.processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{args.out}/rendezvous", rank=args.process, world_size=args.processes
        )
        split["group"] = dist.group.WORLD
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, begun = resident("VmRSS"), clocks()
    forward_backward(HEADS[args.measure], hidden, weight, data, args.entropy, **split)
    wall, cpu = (now - then for now, then in zip(clocks(), begun, strict=True))
    result = {"gib": resident("VmHWM") - before, "wall": wall, "cpu": cpu}
    if args.processes > 1:
        dist.all_reduce(hidden.grad)
    torch.save({"hidden": hidden.grad, "weight": weight.grad}, Path(args.out) / f"gradients{args.process}.pt")
    (Path(args.out) / f"result{args.process}.json").write_text(json.dumps(result))


def clocks() -> tuple[float, float]:
    """Wall time and this process's CPU time, which other work on the machine disturbs less."""
    return time.perf_counter(), time.process_time()


def resident(field: str) -> float:
    """GiB of this process's memory: VmRSS now, VmHWM at its peak."""
    return int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1]) / 2**20


def run(args: argparse.Namespace, head: str, processes: int, out: Path) -> dict[str, float]:
    """One pass of a head in separate processes: the larger memory and time of them."""
    out.mkdir(exist_ok=True)
    (out / "rendezvous").unlink(missing_ok=True)
    threads = max(args.threads // processes, 1)
    settings = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocabulary", "hidden")]
    settings += (
        [f"--threads={threads}"]
        + ["--entropy"] * args.entropy
        + [f"--measure={head}", f"--processes={processes}", f"--out={out}"]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    started = [
        subprocess.Popen([sys.executable, __file__, *settings, f"--process={process}"], env=environment)
        for process in range(processes)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"{head} failed")
    results = [json.loads((out / f"result{process}.json").read_text()) for process in range(processes)]
    return {key: max(result[key] for result in results) for key in results[0]}


def gradient_error(out: Path, reference: Path, processes: int) -> float:
    """The largest difference of the gradients, relative to their largest element."""
    expected = torch.load(reference / "gradients0.pt", mmap=True)
    columns = len(expected["weight"]) // processes
    errors = []
    for process in range(processes):
        found = torch.load(out / f"gradients{process}.pt", mmap=True)
        parts = {"hidden": slice(None), "weight": slice(process * columns, (process + 1) * columns)}
        for name, part in parts.items():
            scale = float(expected[name].abs().max())
            errors.append(float((found[name] - expected[name][part]).abs().max()) / scale)
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1, help="threads shared by the processes of a pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--entropy", action="store_true", help="also compute entropies and their gradients")
    parser.add_argument("--heads", nargs="+", choices=sorted(HEADS), default=list(HEADS))
    parser.add_argument("--tensor-parallel", type=int, default=1, help="also split the fused head over N processes")
    for name, kind in (("measure", str), ("processes", int), ("process", int), ("out", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    variants = [(head, 1) for head in args.heads]
    variants += [("fused", args.tensor_parallel)] * (args.tensor_parallel > 1)
    sizes = f"{args.tokens} tokens, {args.vocabulary} entries, {args.hidden} features"
    print(f"{sizes}, fp32, {args.threads} threads, torch {torch.__version__}")
    rounds: list[list[dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            rounds.append([])
            for head, processes in variants:
                out = Path(folder) / f"{head}{processes}"
                found = run(args, head, processes, out)
                found["error"] = gradient_error(out, Path(folder) / f"{args.heads[0]}1", processes)
                rounds[-1].append(found)
                print(f"round {number + 1}, {head} on {processes}: {found}", file=sys.stderr, flush=True)
    for place, (head, processes) in enumerate(variants):
        print_medians(f"{head} on {processes}", [passes[place] for passes in rounds], [passes[0] for passes in rounds])


def print_medians(name: str, passes: list[dict[str, float]], firsts: list[dict[str, float]]) -> None:
    """A head's figures and their ratios to the first head's of the same round."""
    middle = {key: statistics.median(found[key] for found in passes) for key in passes[0]}
    ratio = {
        key: statistics.median(found[key] / first[key] for found, first in zip(passes, firsts, strict=True))
        for key in ("gib", "wall", "cpu")
    }
    print(
        f"{name:12} {middle['gib']:6.3f} GiB ({ratio['gib']:.3f} of the first), {middle['wall']:7.2f} s "
        f"({ratio['wall']:.2f}), {middle['cpu']:7.2f} CPU s ({ratio['cpu']:.2f}), "
        f"gradients within {middle['error']:.1e}"
    )


if __name__ == "__main__":
    main()
