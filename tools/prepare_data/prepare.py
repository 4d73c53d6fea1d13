"""Converts a benchmark's official files to problem files: JSON lines, and a manifest with counts and checksums.

python tools/prepare_data/prepare.py math train --input MATH/train --out data/math-train.jsonl
python tools/prepare_data/prepare.py aime24 test --hub --out data/aime24.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.data.problems import read_benchmark, write_problems
from nemo_edo.data.rows import ProblemFileError, Row, read_rows
from nemo_edo.errors import UserError
from nemo_edo.rewards.verifier import MathVerifier
from nemo_edo.utils.worker_pool import Limits


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        manifest = prepare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(manifest, indent=2))
    return 0


def prepare(options: argparse.Namespace) -> dict:
    """Writes the problems and returns the manifest. Raises UserError for files that are not the benchmark's."""
    benchmark = BENCHMARKS[options.benchmark]
    split = options.split
    if split not in benchmark.splits:
        raise UserError(f"{benchmark.title} has no split {split}; it has {', '.join(benchmark.splits)}")
    if options.hub:
        there = benchmark.hub_splits.get(split, split)
        rows, path = list(hub_rows(benchmark.hub, benchmark.hub_configs, there)), Path(f"{options.benchmark}-{split}")
        source = {"hub": f"{benchmark.hub} {there}"}
    else:
        rows, path = read_rows(options.input), options.input
        source = {"path": str(path), "sha256": checksum(path)}
    loaded = read_benchmark(
        benchmark, path, rows, split=split, on_bad_rows=options.on_bad_rows, check_rows=not options.any_rows
    )
    if options.verifiable:
        verifier = MathVerifier(Limits(seconds=10, memory_mb=1024, workers=2))
        loaded = verifier.verifiable(path, loaded, "skip")
    return write_problems(
        options.out, loaded.problems, benchmark=benchmark.name, split=split, source=source, skipped=len(loaded.skipped)
    )


def hub_rows(name: str, configs: tuple[str, ...], split: str) -> Iterator[Row]:
    """The rows of a data set of the Hugging Face hub, its configs one after another.

    Raises ProblemFileError where the hub cannot be reached or has no such data set.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    number = 0
    for config in configs:
        try:
            dataset = load_dataset(name, config, split=split)
        except (DatasetNotFoundError, OSError, ValueError) as error:
            raise ProblemFileError(
                f"{name}: {config} ({split}) cannot be loaded from the hub ({error}); give the file itself"
            ) from error
        for row in dataset:
            number += 1
            yield Row(number, f"{name}:{config}/{split}:{number}", row)


def checksum(path: Path) -> str:
    """SHA-256 of a file; of a folder, that of its files' names and contents, in order."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            if path.is_dir():
                digest.update(str(file.relative_to(path)).encode() + b"\0")
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("split", choices=("train", "test"))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--input", type=Path, help="official file (.jsonl, .json, .parquet), or a folder of them")
    where.add_argument("--hub", action="store_true", help="load it from the Hugging Face hub")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--any-rows", action="store_true", help="accept a part of the split or another version")
    parser.add_argument("--on-bad-rows", choices=("error", "skip"), default="error")
    parser.add_argument(
        "--verifiable", action="store_true", help="leave out problems whose answers rules cannot verify (s1K's prose)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
