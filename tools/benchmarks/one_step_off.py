"""One-step-off compared with synchronous collection: the built-in task with vLLM servers and one config for both.

Each layout and seed is a run with its own warm-up, identical for the same seed. Wall time is from the end of the first
collection, which both layouts generate before training, to the last optimizer step. The layouts alternate in order, so
that a drift in the machine's speed favours neither.

    python tools/benchmarks/one_step_off.py --seeds 42,84,126 grpo.iterations=10
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LAYOUTS = {"synchronous": [], "one step off": ["generation.one_step_off=true"]}
COMMON = ["generation=vllm", "~arms", "grpo.sampler_correction=tis"]
ARM = "policy"


def train(folder: Path, overrides: list[str], threads: int) -> Path:
    """Runs the quickstart and returns its metrics."""
    command = [sys.executable, "-m", "nemo_edo", "train", "--config-name", "quickstart", f"output_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    own = [f"threads={threads}"]
    subprocess.run([*command, *COMMON, *own, *overrides], check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder / "quickstart" / "metrics.jsonl"


def about(metrics: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line["arm"] == ARM]
    collections, steps = ([line for line in lines if line["kind"] == kind] for kind in ("collection", "train_step"))
    [final] = [line for line in lines if line["kind"] == "evaluation" and line["final"]]
    later = collections[1:]
    wall = steps[-1]["time"]["elapsed_s"] - collections[0]["time"]["elapsed_s"]
    training = sum(line["time"]["step_s"] for line in steps)
    generation = sum(line["time"].get("sampling_s", 0.0) for line in later)
    return {
        "wall s": wall,
        "training s": training,
        "generation s": generation,
        "wall of their sum": wall / (training + generation),  # of one run: other work slows both sides of it
        "staleness": sum(line["staleness"] for line in later) / len(later),
        "mean gap": sum(line["sampler_gap"] for line in later) / len(later),
        "largest mean gap": max(line["sampler_gap"] for line in later),
        **{name: final["metrics"][name]["mean"] for name in ("greedy_accuracy", "accuracy")},
    }


def table(found: dict[int, dict[str, dict[str, float]]]) -> str:
    """found: by seed and layout. Each quantity's mean over the seeds, with its range; of the walls the ratios, too."""
    rows = [f"{'':18}" + "".join(f"{name:>32}" for name in LAYOUTS)]
    for quantity in next(iter(found.values()))["synchronous"]:
        cells = []
        for name in LAYOUTS:
            values = [of_seed[name][quantity] for of_seed in found.values()]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        rows.append(f"{quantity:18}" + "".join(f"{cell:>32}" for cell in cells))
    ratios = [of_seed["one step off"]["wall s"] / of_seed["synchronous"]["wall s"] for of_seed in found.values()]
    rows.append(
        f"wall, one step off of synchronous, seed by seed: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; "
        f"median {statistics.median(ratios):.2f}"
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of the trainer")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[42, 84, 126])
    parser.add_argument("overrides", nargs="*", help="config overrides for all runs")
    args = parser.parse_args()
    found: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, seed in enumerate(args.seeds):
            order = list(LAYOUTS) if place % 2 == 0 else list(LAYOUTS)[::-1]
            found[seed] = {}
            for name in order:
                run = Path(folder) / f"{name.replace(' ', '_')}_{seed}"
                metrics = train(run, [*LAYOUTS[name], f"seed={seed}", *args.overrides], args.threads)
                found[seed][name] = about(metrics)
                print(f"seed {seed}, {name}: {json.dumps(found[seed][name])}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
