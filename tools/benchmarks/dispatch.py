"""What a call from the controller to many workers costs: bytes, seconds, and the controller's memory.

The real controller calls simulated workers, threads that receive over local sockets what a rank would and answer with
tensors of the right size, a log-probability pass over a global batch. From the largest of the sizes and of the numbers
of workers tried, with the exponents of both, it tells what 64k rollouts would take:

    python -m tools.benchmarks.dispatch --workers 8 32 128 --rollouts 4096 --tokens 256 1024
"""

from __future__ import annotations

import argparse
import math
import pickle
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from nemo_edo.data.batching import build_batch
from nemo_edo.data.shares import InputShapes, MicroBatching, Share, cut, joined
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
    peak: int
    """Bytes that the controller's process has had at most since it began."""


def answer_logprobs(worker: Worker, share: Share) -> torch.Tensor:
    """A rank's answer to a log-probability pass, without the pass."""
    return torch.zeros(2, *share.rows.mask.shape)


def simulate(connection: Connection) -> None:
    while True:
        number, work, (share,) = pickle.loads(connection.recv_bytes())
        connection.send_bytes(pack(Answer(number, work(None, share))))


def workers_of(count: int) -> Workers:
    """A controller whose own worker is one of them."""
    others = []
    for rank in range(1, count):
        ours, theirs = Pipe()
        threading.Thread(target=simulate, args=(theirs,), daemon=True).start()
        others.append(dispatch._Rank(rank, "simulated", ours))
    return Workers(others)


def batch_of(rollouts: int, tokens: int) -> TrainingBatch:
    sequences = [((1,) * PROMPT, (2,) * tokens)] * rollouts
    batch = build_batch(sequences, pad_id=0)
    values = torch.zeros_like(batch.mask)
    return batch.with_fields(old_logprobs=values, ref_logprobs=values, advantages=torch.zeros(rollouts))


def measure(workers: Workers, rollouts: int, tokens: int) -> Measured:
    batch, sent = batch_of(rollouts, tokens), []
    begun = time.perf_counter()
    shares = cut(batch, MicroBatching(8), workers.size, InputShapes())
    plain = dispatch.pack

    def counted(message: Any) -> bytes:
        packed = plain(message)
        sent.append(len(packed))
        return packed

    dispatch.pack = counted
    try:
        answers = workers.call(answer_logprobs, each=shares)
    finally:
        dispatch.pack = plain
    joined(shares, answers, batch.mask.shape)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(workers.size, rollouts, tokens, sum(sent), seconds, peak)


def exponent(found: Sequence[tuple[float, float]]) -> float:
    """The slope between the first and the last point in logarithms."""
    (x, y), (other_x, other_y) = found[0], found[-1]
    return math.log(other_y / y) / math.log(other_x / x) if other_x != x else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    found = []
    for count in args.workers:
        workers = workers_of(count)
        for tokens in args.tokens:
            found.append(one := measure(workers, args.rollouts, tokens))
            print(
                f"{one.workers:5} workers, {one.rollouts} rollouts of {one.tokens} tokens: {one.sent / 2**20:,.0f} MiB "
                f"sent, {one.seconds:.2f} s, {one.peak / 2**30:.2f} GiB at most",
                flush=True,
            )
    largest = found[-1]
    by_tokens = [one for one in found if one.workers == largest.workers]
    by_workers = [one for one in found if one.tokens == largest.tokens]
    for name in ("sent", "seconds"):
        tokens = exponent([(one.tokens, getattr(one, name)) for one in by_tokens])
        workers = exponent([(one.workers, getattr(one, name)) for one in by_workers])
        print(f"{name}: grows with tokens^{tokens:.2f}, with workers^{workers:.2f}")
        for length in (1024, 32768):
            scale = ROLLOUTS / largest.rollouts * (length / largest.tokens) ** (1 if math.isnan(tokens) else tokens)
            print(f"  {ROLLOUTS} rollouts of {length} tokens: {getattr(largest, name) * scale:,.4g}")


if __name__ == "__main__":
    main()
