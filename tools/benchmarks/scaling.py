"""How the time of each phase grows with samples, response length, model size and arms: runs of the built-in task, and
the exponent e of time ~ size^e by least squares over the logarithms.

Nothing is warmed up, so most responses of the random policy have the full length. A run's first iteration is left out,
since libraries load and memory grows there. Seconds of wall time by the run's own clock (``phases`` in metrics.jsonl):
run it on an idle machine.

    python tools/benchmarks/scaling.py --threads 1
    python tools/benchmarks/scaling.py --threads 1 samples length
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

AXES: dict[str, dict[float, list[str]]] = {
    "samples": {size: [f"grpo.problems_per_iteration={32 * size}"] for size in (1, 4, 16)},
    "length": {size: [f"sampling.max_new_tokens={32 * size}"] for size in (1, 2, 4)},
    "model": {
        1: [],
        8: [f"model.architecture.{name}" for name in ("hidden_size=128", "intermediate_size=384",
                                                      "num_attention_heads=4", "num_hidden_layers=4")],
    },
    "arms": {size: ["+arms={" + ", ".join(f"arm_{n}: {{}}" for n in range(size)) + "}"] for size in (1, 2, 4)},
}  # fmt: skip
"""Factor -> settings, by axis."""
COMMON = [
    *("replicate_baseline=false", "~arms", "sft.steps=0", "grpo.iterations=4", "grpo.problems_per_iteration=64"),
    *("sampling.samples_per_prompt=8", "grpo.minibatch_size=128", "grpo.micro_batch_size=32"),
    *("data.arithmetic.train_problems=512", "data.arithmetic.test_problems=8", "evaluation.rollouts=1"),
    *("model.seq_length=256", "model.architecture.max_position_embeddings=256", "evaluation.samples=2"),
    *("guards.truncated.ceiling=null", "guards.reward.floor=null"),
]
SHOWN = 0.02
"""Share of an iteration below which a phase's exponent is noise."""


def seconds(folder: Path, name: str, settings: list[str], threads: int) -> dict[str, float]:
    """Seconds of each phase in the iterations after an arm's first, over all arms."""
    command = [sys.executable, "-m", "nemo_edo", "train", "--config-name", "quickstart", f"output_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    own = [f"name={name}", f"threads={threads}", *settings]
    subprocess.run([*command, *COMMON, *own], check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    spent: Counter[str] = Counter()
    for line in lines:
        if line["kind"] == "phases" and line.get("iteration", 0) > 0:
            spent.update({key.removesuffix("_s"): value for key, value in line["time"].items() if key != "elapsed_s"})
    return spent


def exponent(sizes: list[float], times: list[float]) -> float:
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(one) for one in times]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*AXES, []], help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for axis in args.axes or AXES:
            sizes = AXES[axis]
            found = [
                seconds(Path(scratch), f"{axis}_{size}", settings, args.threads) for size, settings in sizes.items()
            ]
            print(f"{axis}: x{', x'.join(map(str, sizes))}")
            for phase in found[-1]:
                times = [one[phase] for one in found]
                if times[-1] >= SHOWN * found[-1]["wall"] and min(times) > 0:
                    shown = " ".join(f"{one:8.2f}" for one in times)
                    print(f"  {phase:12} {shown} s, exponent {exponent(list(sizes), times):.2f}", flush=True)


if __name__ == "__main__":
    main()
