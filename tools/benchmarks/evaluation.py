"""``nemo-edo evaluate RUN --stored`` on synthetic responses: time from Parquet to the table, and memory.

Problems vary in difficulty, wrong answers have a long tail as with real models, and two reward models score six steps
of each response. A separate process writes the responses first, untimed.

    OMP_NUM_THREADS=1 python tools/benchmarks/evaluation.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from nemo_edo.config import EvaluationConfig, ModelConfig, RunConfig, SFTConfig
from nemo_edo.config.compose import resolved_yaml
from nemo_edo.evaluation.evaluator import read_samples
from nemo_edo.evaluation.results import START, Evaluation
from nemo_edo.rollouts.store import RolloutStore, ScoreStore, StepScores
from nemo_edo.run.policy_evaluation import evaluate_stored
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Rollout, ScoredRollout

PARTS, STEPS, VOCABULARY = 16, 6, 152_000


def response(rng: np.random.Generator, problem: int, sample: int, chance: float) -> ScoredRollout:
    length = int(rng.integers(300, 601))
    ids, logprobs = rng.integers(VOCABULARY, size=length), -rng.exponential(0.3, size=length)
    right = bool(rng.random() < chance)
    answer = "42" if right else f"wrong {rng.zipf(1.5)}"
    rollout = Rollout(
        f"test-{problem}", sample, tuple(range(200)), tuple(ids.tolist()), tuple(logprobs.tolist()),
        f"The answer is {answer}.", True, 0, 7,
    )  # fmt: skip
    return ScoredRollout(rollout, float(right), answer, True, "correct" if right else "wrong")


def write(folder: Path, problems: int, samples: int) -> None:
    cfg = RunConfig(
        algorithm="sft", sft=SFTConfig(steps=1), evaluation=EvaluationConfig(samples=samples, rollouts=1),
        model=ModelConfig(architecture={"model_type": "qwen2"}),
    )  # fmt: skip
    run, rng = RunFolder(folder), np.random.default_rng(0)
    (folder / "config.yaml").write_text(resolved_yaml(cfg), encoding="utf-8")
    run.write_evaluation(Evaluation(START, ("test-0",), {"accuracy": (np.ones(1), np.ones(1))}))
    chances = rng.beta(0.7, 0.7, size=problems)
    greedy = [response(rng, problem, 0, chance) for problem, chance in enumerate(chances)]
    RolloutStore(run.evaluated(START, "greedy")).write(0, greedy)
    store = RolloutStore(run.evaluated(START, "sampled"))
    for part in range(PARTS):  # Python's numbers take sixteen times the arrays' memory
        first, last = part * problems // PARTS, (part + 1) * problems // PARTS
        part_of = [response(rng, p, sample, chances[p]) for p in range(first, last) for sample in range(samples)]
        path = store.write(0, part_of)
        path.rename(path.with_name(f"rank_{part}_of_{PARTS}.parquet"))  # as several ranks once did
    checksum = read_samples(store, 0).checksum
    for name in ("first", "second"):
        steps = rng.random((problems, samples, STEPS))
        scores = {
            (f"test-{p}", sample): StepScores(tuple(steps[p, sample].tolist()))
            for p in range(problems)
            for sample in range(samples)
        }
        ScoreStore(run.scores(START, name)).write("sampled", scores, rollouts=checksum, made_by="made up")


def evaluate(folder: Path) -> tuple[float, float, float, list[str]]:
    wall, cpu = time.perf_counter(), time.process_time()
    lines = evaluate_stored([folder], None, [])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    return time.perf_counter() - wall, time.process_time() - cpu, peak, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, spawned = Path(scratch), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as processes:
            processes.submit(write, folder, args.problems, args.samples).result()
            print(f"{args.problems} problems x {args.samples} responses written", flush=True)
            wall, cpu, peak, lines = processes.submit(evaluate, folder).result()
    print("\n".join(lines))
    print(f"{wall:.1f} s ({cpu:.1f} s of CPU time), peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
