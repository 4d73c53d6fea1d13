"""Random faults in tiny runs, for as many rounds as wanted; run it in the repository's root.

    python -m tests.chaos --seed 3 --rounds 1000
    python -m tests.chaos --seed 3 --round 17

Each round prints what happened to which run, and what became of it. A run may end with the undisturbed run's numbers
and weights, or stop with one message that names a file and what to do; the round does that and asks again. The status
is 1 where a run broke that promise, and the command to repeat the round is printed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).parents[1]
    sys.path.insert(1, str(TESTS))  # helpers
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}

from .faults import FAULTS, TURN
from .rounds import Round, Undisturbed, Wrong, play, undisturbed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    every = f"default: %(default)s; {len(FAULTS)} have every fault once"
    parser.add_argument("--rounds", type=int, default=TURN, help=every)
    parser.add_argument("--round", type=int, help="only this one, of the seed's rounds")
    parser.add_argument("--fault", choices=FAULTS, help="only rounds with this one")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent rounds; default: %(default)s")
    args = parser.parse_args(arguments)
    numbers = range(args.rounds) if args.round is None else [args.round]
    rounds = [Round.of(args.seed, number) for number in numbers]
    rounds = [this for this in rounds if args.fault in (None, this.fault)]
    # Without letters that could spell the servers' key: messages hide it wherever it occurs.
    folder = Path(tempfile.gettempdir()) / f"chaos_{os.getpid()}"
    folder.mkdir()
    try:
        with ThreadPoolExecutor(args.jobs) as threads:
            jobs = list({this.job.name: this.job for this in rounds}.values())
            ends = threads.map(lambda job: undisturbed(job, folder / job.name), jobs)
            expected = dict(zip((job.name for job in jobs), ends, strict=True))
            failed = sum(not passed for passed in threads.map(lambda this: passes(this, expected, folder), rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for what, played in (("faults", (this.fault for this in rounds)), ("runs", (this.job.name for this in rounds))):
        print(f"{what}: {', '.join(f'{name} {count}' for name, count in sorted(Counter(played).items()))}")
    print(f"{failed} of {len(rounds)} rounds failed" if failed else f"{len(rounds)} rounds, as promised")
    return int(failed > 0)


def passes(this: Round, expected: dict[str, Undisturbed], folder: Path) -> bool:
    name = f"round {this.number}, {this.job.name}"
    try:
        end = play(this, expected[this.job.name], folder / f"round_{this.number}")
    except Wrong as wrong:
        again = f"python -m tests.chaos --seed {this.seed} --round {this.number}"
        print(f"FAILED: {name}: {wrong}\nrepeat: {again}", flush=True)
        return False
    print(f"{name}, {this.fault}: {end}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
