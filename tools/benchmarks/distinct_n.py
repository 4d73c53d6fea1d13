"""Distinct-4 of a whole evaluation: time and memory, for texts and for token ids.

Tokens are sampled uniformly, so that nearly every n-gram is distinct: the worst case. A generator creates the samples;
its time is measured first and printed separately. Each kind runs in a fresh process to measure its peak memory, which
includes Python and the imports.

    OMP_NUM_THREADS=1 taskset -c 0 python tools/benchmarks/distinct_n.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from nemo_edo.metrics import distinct_counts


def token_ids(responses: int, tokens: int, vocabulary: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(responses):
        yield rng.integers(vocabulary, size=tokens)


def texts(responses: int, tokens: int, vocabulary: int) -> Iterator[str]:
    words = np.array([f"word{i}" for i in range(vocabulary)], dtype=object)
    for ids in token_ids(responses, tokens, vocabulary):
        yield " ".join(words[ids])


def lists(responses: int, tokens: int, vocabulary: int) -> Iterator[list[int]]:
    for ids in token_ids(responses, tokens, vocabulary):
        yield ids.tolist()


KINDS = {"texts": texts, "ids, lists": lists, "ids, arrays": token_ids}


def seconds(work: Callable[[], object]) -> tuple[float, float, object]:
    """Wall-clock time, this process's CPU time, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(kind: str, args: argparse.Namespace) -> str:
    def samples() -> Iterator:
        return KINDS[kind](args.responses, args.tokens, args.vocabulary)

    _, generating, _ = seconds(lambda: sum(1 for _ in samples()))
    wall, cpu, (distinct, total) = seconds(lambda: distinct_counts(samples(), args.n))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    return (
        f"{kind:12} {wall:6.1f} s ({cpu:.1f} s of CPU time, {generating:.1f} s of it the generator's), "
        f"peak memory {peak:.2f} GiB; {distinct:,} distinct of {total:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each response")
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--n", type=int, default=4)
    args = parser.parse_args()
    print(f"{args.responses:,} responses of {args.tokens} tokens, vocabulary {args.vocabulary:,}, n = {args.n}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for line in processes.map(measure, KINDS, [args] * len(KINDS)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
