"""How long commands take to start: help, mistakes, and the first training step of the quickstart's model.

CPU seconds of the command and all that it starts, and seconds of the clock; the median of rounds.

    OMP_NUM_THREADS=1 python tools/benchmarks/start.py
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "nemo_edo"]
TRAIN = ["train", "--config-name", "quickstart"]
ENDING = {
    "nemo-edo --help": ["--help"],
    "a misspelled key": [*TRAIN, "sft.stepz=2"],
    "a path that is not there": [*TRAIN, "data.train=/not/there.jsonl", "data.test=/not/there.jsonl"],
}
"""Commands that end by themselves."""
SMALL = ["data.arithmetic.train_problems=64", "data.arithmetic.test_problems=8", "threads=1"]
POLL_S = 0.01


def until_its_end(arguments: Sequence[str]) -> tuple[float, float]:
    """(CPU seconds, seconds) of a command."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - begun


def until_the_first_step() -> tuple[float, float]:
    """(CPU seconds, seconds) until a run has logged a training step."""
    with tempfile.TemporaryDirectory() as folder:
        begun, log = time.perf_counter(), Path(folder) / "run" / "metrics.jsonl"
        own = ["name=run", f"output_dir={folder}", *SMALL]
        run = subprocess.Popen([*COMMAND, *TRAIN, *own], stdout=subprocess.DEVNULL)
        while not log.exists() or not log.stat().st_size:
            if run.poll() is not None:
                raise SystemExit(f"the run ended before its first step, with status {run.returncode}")
            time.sleep(POLL_S)
        seconds, process = time.perf_counter() - begun, psutil.Process(run.pid)
        cpu = sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
        run.kill()
        run.wait()
    return cpu, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    works = {name: lambda arguments=arguments: until_its_end(arguments) for name, arguments in ENDING.items()}
    works["the first training step"] = until_the_first_step
    for name, work in works.items():
        cpu, seconds = (statistics.median(found) for found in zip(*(work() for _ in range(args.rounds)), strict=True))
        print(f"{name:26} {cpu:6.2f} CPU s {seconds:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
