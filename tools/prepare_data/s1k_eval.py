"""Samples s1K's evaluation split: 1,000 questions of the 59K pool that s1K was selected from, none of them in s1K.

python tools/prepare_data/s1k_eval.py --pool POOL.parquet --s1k S1K.parquet --out data/s1k_eval.jsonl

Only the seed matters, not the order of the pool's rows: each question's rank is a hash of the seed and its text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from prepare import checksum

from nemo_edo.data.benchmarks import BENCHMARKS, TEXT
from nemo_edo.data.problems import normal_question, read_benchmark, write_problems
from nemo_edo.data.rows import read_rows
from nemo_edo.errors import UserError
from nemo_edo.types import Problem

QUESTIONS = BENCHMARKS["s1k_eval"].splits["test"]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        manifest = sample(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(manifest, indent=2))
    return 0


def sample(options: argparse.Namespace) -> dict:
    """Writes the split and returns its manifest. Raises UserError where a file is not s1K's, or the pool too small."""
    pool, s1k = (
        read_benchmark(BENCHMARKS["s1k"], path, read_rows(path), split="train", on_bad_rows="skip", check_rows=is_s1k)
        for path, is_s1k in ((options.pool, False), (options.s1k, not options.any_rows))
    )
    taken = {normal_question(problem.question) for problem in s1k.problems}
    left: dict[str, Problem] = {}
    for problem in pool.problems:
        question = normal_question(problem.question)
        if question not in taken and not (options.verifiable and problem.answer_kind == TEXT):
            left.setdefault(question, problem)
    if len(left) < options.questions:
        asked = f"fewer than the {options.questions} asked"
        raise UserError(f"{options.pool}: has {len(left)} questions that are not s1K's, {asked}")
    order = sorted(left, key=lambda question: _place(options.seed, question))
    sampled = [replace(left[question], id=f"s1k_eval-{n}") for n, question in enumerate(order[: options.questions], 1)]
    source = {
        "pool": str(options.pool), "pool_sha256": checksum(options.pool), "pool_rows": str(len(pool.problems)),
        "s1k": str(options.s1k), "s1k_sha256": checksum(options.s1k), "seed": str(options.seed),
    }  # fmt: skip
    return write_problems(
        options.out, sampled, benchmark="s1k_eval", split="test", source=source, skipped=len(pool.skipped)
    )


def _place(seed: int, question: str) -> bytes:
    return hashlib.sha256(f"s1k_eval {seed} {question}".encode()).digest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pool", type=Path, required=True, help="simplescaling/data_ablation_full59K: file or folder")
    parser.add_argument("--s1k", type=Path, required=True, help="simplescaling/s1K: file or folder")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--any-rows", action="store_true", help="accept a part or another version of the s1K file")
    parser.add_argument("--verifiable", action="store_true", help="only questions whose answers rules can compare")
    return parser


if __name__ == "__main__":
    sys.exit(main())
