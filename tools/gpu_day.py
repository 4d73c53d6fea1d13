"""The first hour with a GPU: the selftest, tests/gpu and the GPU benchmarks, each with a time limit, and a small folder
of results to send back. Needs the checkout and its environment, no network; Transformer Engine is optional.

    python tools/gpu_day.py [--out gpu_day] [--only NAME ...]

A part that fails or exceeds its limit ends only itself. About half an hour on one H100.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-rs"]
BENCHMARK = [sys.executable, "tools/benchmarks/gpu.py", "--sections"]
SELFTEST = [sys.executable, "-m", "nemo_edo", "selftest", "--folder", "{out}/selftest", "--only"]
PARTS: dict[str, tuple[float, list[str]]] = {
    "driver": (30, ["nvidia-smi"]),
    "selftest_numbers": (420, [*SELFTEST, "machine", "precision", "attention"]),
    "selftest_training": (300, [*SELFTEST, "split", "training"]),
    "selftest_servers": (480, [*SELFTEST, "server"]),
    "tests_kernels": (240, [*TESTS, "tests/gpu/test_kernels_cuda.py"]),
    "tests_platform": (240, [*TESTS, "tests/gpu/test_platform_cuda.py"]),
    "loss_layers": (240, [*BENCHMARK, "loss_layers"]),
    "training_steps": (240, [*BENCHMARK, "training_steps"]),
}
"""Seconds, and the command, of each part. The selftest comes first: what it finds explains the rest."""
KEPT = (".json", ".jsonl", ".log", ".txt", ".yaml")
"""The selftest's files that are sent back."""
MOST_BYTES = 400_000
"""Of a part's output that is kept: its end."""


def carried_out(name: str, out: Path) -> dict[str, object]:
    """Runs a part with its output in ``out/NAME.txt``."""
    limit_s, command = PARTS[name]
    command, path, begun = [word.format(out=out) for word in command], out / f"{name}.txt", time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    try:
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        outcome = "passed" if process.wait(limit_s) == 0 else f"failed with status {process.returncode}"
    except FileNotFoundError:
        outcome = f"skipped: no {command[0]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        outcome = f"ended after its limit of {limit_s:g} s"
    text = path.read_bytes()
    path.write_bytes(text[-MOST_BYTES:])
    lines = text.decode(errors="replace").splitlines()
    if lines[-1:] == ["no CUDA device"]:
        outcome = "skipped: no CUDA device"
    elif outcome == "passed" and command[: len(TESTS)] == TESTS and " passed" not in lines[-1]:
        outcome = f"skipped: {lines[-1]}"
    for written in (out / "selftest").rglob("*"):  # checkpoints, weights and rollouts of the selftest's runs
        if written.is_file() and written.suffix not in KEPT:
            written.unlink()
    skipped = [line for line in lines if line.startswith(("SKIPPED", "not possible"))]
    return {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "skipped": skipped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in args.only:
        found[name] = part = carried_out(name, out)
        print(f"{name:18} {part['outcome']} in {part['seconds']} s; {len(part['skipped'])} skipped", flush=True)
        (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")  # what is there if the rest is killed
    left_out = [name for name in PARTS if name not in args.only]
    print(f"results: {out}" + (f"; not asked for: {', '.join(left_out)}" if left_out else ""))
    return int(any(str(part["outcome"]).startswith(("failed", "ended")) for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
