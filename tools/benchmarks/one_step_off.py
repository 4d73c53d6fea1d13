"""One-step-off collection beside synchronous collection: the built-in task with vLLM servers, and one config for both.

Each layout is a run with a warm-up of its own, which the same seed makes the same. Wall time is from the end
of the first collection, which both draw before anything trains, to the last optimizer step.

    python tools/benchmarks/one_step_off.py grpo.iterations=10
"""

from __future__ import annotations

import argparse
import json
import os
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
    subprocess.run([*command, *COMMON, *overrides], check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder / "quickstart" / "metrics.jsonl"


def about(metrics: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line["arm"] == ARM]
    collections, steps = ([line for line in lines if line["kind"] == kind] for kind in ("collection", "train_step"))
    [final] = [line for line in lines if line["kind"] == "evaluation" and line["final"]]
    later = collections[1:]
    return {
        "wall s": steps[-1]["time"]["elapsed_s"] - collections[0]["time"]["elapsed_s"],
        "training s": sum(line["time"]["step_s"] for line in steps),
        "drawing s": sum(line["time"].get("sampling_s", 0.0) for line in later),
        "staleness": sum(line["staleness"] for line in later) / len(later),
        "mean gap": sum(line["sampler_gap"] for line in later) / len(later),
        "largest mean gap": max(line["sampler_gap"] for line in later),
        **{name: final["metrics"][name]["mean"] for name in ("greedy_accuracy", "accuracy")},
        "accuracy low": final["metrics"]["accuracy"]["low"],
        "accuracy high": final["metrics"]["accuracy"]["high"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of the trainer; the server takes all cores")
    parser.add_argument("overrides", nargs="*", help="of both runs' config")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, own in LAYOUTS.items():
            metrics = train(Path(folder) / name.replace(" ", "_"), [*own, *args.overrides], args.threads)
            found[name] = about(metrics)
            print(f"{name}: done", flush=True)
    print(f"{'':18}" + "".join(f"{name:>14}" for name in found))
    for quantity in found["synchronous"]:
        print(f"{quantity:18}" + "".join(f"{values[quantity]:14.3f}" for values in found.values()))


if __name__ == "__main__":
    main()
