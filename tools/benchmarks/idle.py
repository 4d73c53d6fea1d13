"""Every comparison of docs/performance.md that needs an idle machine, one after the other: some hours on two cores.

Each command's output goes to OUT/NAME.txt, and its last lines to the terminal. A command whose file is complete is not
run again, so that a second start continues.

    python tools/benchmarks/idle.py OUT
    python tools/benchmarks/idle.py OUT trl_real_fp32 scaling
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TRL = "against_trl.py --threads 2 --job"
COMMANDS = {
    **{
        f"trl_{job}_{precision}": f"{TRL} {job} --precision {precision} --old-logprobs trainer --rounds {rounds}"
        for job, rounds in (("even", 6), ("uneven", 3), ("real", 3))
        for precision in ("fp32", "bf16")
    },
    "trl_real_auto": f"{TRL} real --precision fp32 --old-logprobs auto --rounds 3",
    "one_process": "against_trl.py --threads 1 --job real --old-logprobs trainer --rounds 2",
    "two_processes": "against_trl.py --threads 1 --processes 2 --job real --old-logprobs trainer --rounds 2",
    **{
        f"transformers_{part}_{precision}": f"against_transformers.py {part} --precision {precision}"
        for part in ("generate", "train")
        for precision in ("fp32", "bf16")
    },
    "transformers_train_without_sharing": "against_transformers.py train --without-sharing",
    "scaling": "scaling.py --threads 1",
    "checkpoint": "checkpoint.py",
}
LAST = 5
"""Lines of each output that are shown."""
COMPLETE = "complete\n"


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[2:] or list(COMMANDS)
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        path, command = folder / f"{name}.txt", COMMANDS[name]
        if not path.exists() or not path.read_text(encoding="utf-8").endswith(COMPLETE):
            threads = "1" if "--threads 2" not in command else "2"
            environment = {**os.environ, "OMP_NUM_THREADS": threads}
            program, *arguments = command.split()
            run = subprocess.run(
                [sys.executable, HERE / program, *arguments], capture_output=True, text=True, env=environment
            )
            end = COMPLETE if run.returncode == 0 else f"failed with status {run.returncode}\n{run.stderr[-2000:]}"
            path.write_text(f"{command}\n{run.stdout}{end}", encoding="utf-8")
        lines = path.read_text(encoding="utf-8").splitlines()
        print(f"{name}: {command}", *lines[1:][-LAST:], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
