"""Every comparison of docs/performance.md that needs an idle machine, one after the other: an hour on two cores for
those up to ``servers``, the cheapest and most important first, and half an hour for the rest.

Each command's output goes to OUT/NAME.txt, and its last lines to the terminal. A second start continues: a command
whose file is complete is not run again. One that takes three times as long as expected is ended, and like one that
fails does not keep the others from running; the exit status is then 1.

    python tools/benchmarks/idle.py OUT
    python tools/benchmarks/idle.py OUT trl_real_fp32 scaling
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    minutes: float
    """Expected on two idle cores."""
    command: str
    threads: int = 1
    """OMP_NUM_THREADS, of processes that do not set their own."""


def trl(minutes: float, job: str, precision: str, more: str, old: str = "trainer") -> Benchmark:
    """TRL computes log pi_old anew, and so does nemo_edo unless ``old`` is another setting."""
    command = f"against_trl.py --threads 2 --job {job} --precision {precision} --old-logprobs {old} {more}"
    return Benchmark(minutes, command, threads=2)


def transformers(minutes: float, part: str, more: str) -> Benchmark:
    return Benchmark(minutes, f"against_transformers.py {part} --rounds 2 {more}")


ONE_THREAD = "against_trl.py --job real --old-logprobs trainer --ours-only --cold --rounds 1 --threads 1"
BENCHMARKS = {
    "start": Benchmark(1, "start.py"),
    "transformers_train_fp32": transformers(3, "train", "--precision fp32"),
    "transformers_train_bf16": transformers(3, "train", "--precision bf16"),
    "transformers_generate_fp32": transformers(4, "generate", "--precision fp32"),
    "trl_even_fp32": trl(3, "even", "fp32", "--rounds 6"),
    "trl_even_fp32_auto": trl(2, "even", "fp32", "--rounds 6", old="auto"),
    "trl_even_bf16": trl(3, "even", "bf16", "--rounds 6"),
    "trl_real_fp32": trl(12, "real", "fp32", "--rounds 1 --cold"),
    "trl_real_bf16": trl(10, "real", "bf16", "--rounds 1 --cold"),
    "trl_uneven_fp32": trl(5, "uneven", "fp32", "--rounds 2"),
    "one_process": Benchmark(3, ONE_THREAD),
    "two_processes": Benchmark(2, f"{ONE_THREAD} --processes 2"),
    "checkpoint": Benchmark(3, "checkpoint.py --threads 2 --steps 6 --rounds 3", threads=2),
    "scaling": Benchmark(6, "scaling.py --threads 1"),
    "servers": Benchmark(4, "servers.py --model 100m --threads 2 --sequences 128 --max-new-tokens 64 --repeats 2", 2),
    # Not of the first hour:
    "trl_uneven_bf16": trl(4, "uneven", "bf16", "--rounds 2"),
    "transformers_generate_bf16": transformers(4, "generate", "--precision bf16"),
    "transformers_train_without_sharing": transformers(4, "train", "--without-sharing"),
    "real_auto": Benchmark(2, "against_trl.py --job real --old-logprobs auto --ours-only --cold --rounds 1", threads=2),
    "trl_real_fp32_again": trl(18, "real", "fp32", "--rounds 2 --cold"),
}
LATE = 3
"""Times the expected minutes after which a command is ended."""
LAST = 6
"""Lines of each output that are shown."""
COMPLETE = "complete\n"


def run(one: Benchmark) -> tuple[str, str]:
    """What the command printed, and how it ended: COMPLETE, or what went wrong."""
    program, *arguments = one.command.split()
    process = subprocess.Popen(
        [sys.executable, HERE / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(one.threads)},
        start_new_session=True,  # so that its own processes can end with it
    )
    try:
        printed, said = process.communicate(timeout=60 * LATE * one.minutes)
        return printed, COMPLETE if process.returncode == 0 else f"failed with status {process.returncode}\n{said}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, said = process.communicate()
        return printed, f"ended after {LATE * one.minutes:.0f} minutes\n{said}"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def main() -> None:
    known = "\n".join(f"{one.minutes:4.0f} min  {name}: {one.command}" for name, one in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=known, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the outputs' folder")
    # [] is what argparse checks where no name is given
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME", help="all unless given")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = {name: args.out / f"{name}.txt" for name in args.names or BENCHMARKS}
    for name, path in files.items():
        one, begun = BENCHMARKS[name], time.monotonic()
        if not is_complete(path):
            printed, end = run(one)
            took = f"{(time.monotonic() - begun) / 60:.1f} minutes, expected {one.minutes}"
            path.write_text(f"{one.command}\n{took}\n{printed}{end}", encoding="utf-8")
        lines = path.read_text(encoding="utf-8").splitlines()
        print(f"{name}: {lines[0]}", *lines[1:][-LAST:], sep="\n  ", flush=True)
    sys.exit(0 if all(map(is_complete, files.values())) else 1)


def is_complete(path: Path) -> bool:
    return path.exists() and path.read_text(encoding="utf-8").endswith(COMPLETE)


if __name__ == "__main__":
    main()
