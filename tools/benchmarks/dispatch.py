"""What a call from the controller to many workers costs: bytes, seconds, and the controller's memory.

The real controller calls simulated workers, threads that receive over local sockets what a rank would and answer with
tensors of the right size, a log-probability pass over a global batch. Each measurement runs in a separate process, so
that its peak of memory is not another one's. The exponents are slopes between the smallest and the largest size tried:

    python -m tools.benchmarks.dispatch --workers 8 64 256 1024 --rollouts 1024 4096 --tokens 256 1024 4096
"""

from __future__ import annotations

import argparse
import itertools
import math
import pickle
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe

import torch

from nemo_edo.config import MicroBatchConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.data.shares import InputShapes, Share, cut, joined
from nemo_edo.types import TrainingBatch
from nemo_edo.worker import dispatch
from nemo_edo.worker.dispatch import Answer, Workers, pack
from nemo_edo.worker.worker import Worker

ROLLOUTS = 65536
PROMPT = 128


@dataclass(frozen=True)
class Measured:
    workers: int
    rollouts: int
    tokens: int
    sent: int
    """Bytes to all workers."""
    seconds: float
    memory: int
    """Bytes by which the process's peak grew: the batch, its shares, messages and answers."""


def answer_logprobs(worker: Worker, share: Share) -> torch.Tensor:
    """A rank's answer to a log-probability pass, without the pass."""
    return torch.zeros(2, *share.rows.mask.shape)


def simulate(connection: Connection, sent: list[int]) -> None:
    while True:
        received = connection.recv_bytes()
        sent.append(len(received))
        number, work, (share,) = pickle.loads(received)
        connection.send_bytes(pack(Answer(number, work(None, share))))


def workers_of(count: int, sent: list[int]) -> Workers:
    """A controller whose own worker is one of them. sent: gets the bytes of each message."""
    others = []
    for rank in range(1, count):
        ours, theirs = Pipe()
        threading.Thread(target=simulate, args=(theirs, sent), daemon=True).start()
        others.append(dispatch._Rank(rank, "simulated", ours))
    return Workers(others)


def batch_of(rollouts: int, tokens: int) -> TrainingBatch:
    batch = build_batch([((1,) * PROMPT, (2,) * tokens)] * rollouts, pad_id=0)
    values = torch.zeros_like(batch.mask)
    return batch.with_fields(old_logprobs=values, ref_logprobs=values, advantages=torch.zeros(rollouts))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(workers: int, rollouts: int, tokens: int) -> Measured:
    sent: list[int] = []
    called, before = workers_of(workers, sent), peak()
    batch = batch_of(rollouts, tokens)
    begun = time.perf_counter()
    shares = cut(batch, MicroBatchConfig(8), called.size, InputShapes())
    joined(shares, called.call(answer_logprobs, each=shares), batch.mask.shape)
    return Measured(workers, rollouts, tokens, sum(sent), time.perf_counter() - begun, peak() - before)


def exponent(size: Callable[[Measured], float], value: Callable[[Measured], float], found: list[Measured]) -> float:
    """The slope in logarithms between the first and the last of the measurements; NaN where they have one size."""
    first, last = found[0], found[-1]
    ratio = size(last) / size(first)
    return math.log(value(last) / value(first)) / math.log(ratio) if ratio != 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    found: list[Measured] = []
    print("workers  rollouts  tokens  MiB sent  seconds  GiB of memory")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for sizes in itertools.product(args.workers, args.rollouts, args.tokens):
            found.append(one := pool.submit(measure, *sizes).result())
            print(
                f"{one.workers:7}  {one.rollouts:8}  {one.tokens:6}  {one.sent / 2**20:8,.0f}  {one.seconds:7.2f}"
                f"  {one.memory / 2**30:13.2f}",
                flush=True,
            )
    largest = found[-1]
    names = ("workers", "rollouts", "tokens")
    for value in ("sent", "seconds", "memory"):
        slopes = {}
        for name in names:
            same = [one for one in found if all(getattr(one, n) == getattr(largest, n) for n in names if n != name)]
            slopes[name] = exponent(lambda one, n=name: getattr(one, n), lambda one, v=value: getattr(one, v), same)
        told = ", ".join(f"{name}^{slope:.2f}" for name, slope in slopes.items())
        whole = getattr(largest, value) * (ROLLOUTS / largest.rollouts) ** slopes["rollouts"]
        print(f"{value} grows with {told}; at {largest.workers} workers, {ROLLOUTS} rollouts would take")
        for length in (1024, 32768):
            print(f"  of {length} tokens: {whole * (length / largest.tokens) ** slopes['tokens']:,.4g}")


if __name__ == "__main__":
    main()
