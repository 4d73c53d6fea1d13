"""Random faults in tiny runs, for as many rounds as wanted; run it in the repository's root.

    python -m tests.chaos --seed 3 --rounds 1000
    python -m tests.chaos --seed 3 --round 17

Each round prints what happened to which run, and what became of it. A run may end with the undisturbed run's numbers
and weights, or stop with one message that names a file and what to do; the round does that and asks again. The status
is 1 where a run broke that promise, and the command to repeat the round is printed.
"""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read as torch is imported, and so is the next, which nemo_edo.cli.entry explains
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
sys.path.insert(1, str(Path(__file__).parents[1]))  # helpers

import argparse  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterable  # noqa: E402

from .rounds import Round, Undisturbed, Wrong, play, undisturbed  # noqa: E402
from .running import warm_up  # noqa: E402

DIED = 255
"""The status of a process that has not played all of its rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--round", type=int, help="only this one, of the seed's rounds")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent rounds; default: %(default)s")
    args = parser.parse_args()
    numbers = range(args.rounds) if args.round is None else [args.round]
    rounds = {number: Round.of(args.seed, number) for number in numbers}
    warm_up()
    # Without letters that could spell the servers' key: messages hide it wherever it occurs.
    folder = Path(tempfile.gettempdir()) / f"chaos_{os.getpid()}"
    folder.mkdir()
    try:
        jobs = list({this.job.name: this.job for this in rounds.values()}.values())
        expected: dict[str, Undisturbed] = {}
        for job in jobs:
            expected[job.name] = undisturbed(job, folder / job.name)
        workers = min(args.jobs, len(rounds))
        children = [fork(rounds, list(rounds)[place::workers], args.seed, expected, folder) for place in range(workers)]
        counts = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if DIED in counts:
        print("not all rounds were played", flush=True)
    print(f"{sum(counts)} of {len(rounds)} rounds failed" if any(counts) else f"{len(rounds)} rounds, as promised")
    return int(any(counts))


def fork(
    rounds: dict[int, Round], numbers: Iterable[int], seed: int, expected: dict[str, Undisturbed], folder: Path
) -> int:
    child = os.fork()
    if child:
        return child
    failed = DIED
    try:
        failed = sum(not passes(number, rounds[number], seed, expected, folder) for number in numbers)
    except BaseException:  # a bug of the suite
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(failed)


def passes(number: int, this: Round, seed: int, expected: dict[str, Undisturbed], folder: Path) -> bool:
    try:
        end = play(this, expected[this.job.name], folder / f"round_{number}")
    except Wrong as wrong:
        again = f"python -m tests.chaos --seed {seed} --round {number}"
        print(f"FAILED: round {number}, {this.job.name}: {wrong}\nrepeat: {again}", flush=True)
        return False
    print(f"round {number}, {this.job.name}: {end}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
