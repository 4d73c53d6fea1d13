"""Writes the table of the verifier's errors into docs/data_and_rewards.md, next to those of math-verify alone: on the
pairs of tests/data/answer_pairs.tsv, or of another file with the columns kind, gold, answer and right.

python tools/docs/answers_table.py [PAIRS.tsv]    # with a file: prints the table and the pairs that are wrong
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from generated import between_markers

from nemo_edo.data.answers import answer_format
from nemo_edo.rewards.verifier import MathVerifier
from nemo_edo.utils.worker_pool import Limits, WorkerPool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data_and_rewards.md"
PAIRS = ROOT / "tests" / "data" / "answer_pairs.tsv"
BEGIN, END = "<!-- answers: written by tools/docs/answers_table.py -->", "<!-- end of answers -->"
LIMITS = Limits(seconds=5, memory_mb=2048, workers=2)
OURS, THEIRS = "ours", "math-verify"


def by_math_verify(gold: str, answer: str) -> bool:
    """With the options that its README shows, on answers in boxes."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    parsed = [parse(rf"\boxed{{{one}}}", parsing_timeout=None) for one in (gold, answer)]
    return bool(verify(*parsed, timeout_seconds=None))


def errors(rows: list[list[str]]) -> dict[str, list[list[str]]]:
    """The rows that each verifier gets wrong. Answers are what a response with a box states."""
    boxed = answer_format("boxed").extract
    loaded = [(gold, boxed(rf"\boxed{{{answer}}}") or "") for _, gold, answer, _ in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of answers that cannot be verified, which count as wrong
        ours = [verdict.correct for verdict in MathVerifier(LIMITS).verify(loaded)]
    pool = WorkerPool(LIMITS, prepare="nemo_edo.rewards.equivalence:warm_up")
    theirs = [
        answer is True for answer in pool.run(f"{Path(__file__).stem}:by_math_verify", [row[1:3] for row in rows])
    ]
    pool.close()
    return {
        name: [row for row, is_right in zip(rows, verdicts, strict=True) if is_right != (row[3] == "1")]
        for name, verdicts in ((OURS, ours), (THEIRS, theirs))
    }


def table(rows: list[list[str]], wrong: dict[str, list[list[str]]]) -> str:
    counts = {name: Counter((row[0], row[3]) for row in of_name) for name, of_name in wrong.items()}
    lines = [
        f"Errors of {len(rows)} pairs, with math-verify {version('math-verify')} in its default settings.", "",
        f"| kind | pairs | right | accepted though wrong: {OURS} | {THEIRS} | "
        f"refused though right: {OURS} | {THEIRS} |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in [*dict.fromkeys(row[0] for row in rows), "all"]:
        own = [row for row in rows if kind in (row[0], "all")]
        cells = [
            sum(count for (of, right), count in counts[name].items() if kind in (of, "all") and right == label)
            for label in "01" for name in (OURS, THEIRS)
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, [kind, len(own), sum(row[3] == "1" for row in own), *cells])) + " |")
    return "\n".join(lines) + "\n"


def main(path: str | None) -> None:
    lines = Path(path or PAIRS).read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    wrong = errors(rows)
    shown = table(rows, wrong)
    if path is None:
        PAGE.write_text(between_markers(PAGE.read_text(encoding="utf-8"), BEGIN, END, shown), encoding="utf-8")
    print(shown, *("\t".join(row) for row in wrong[OURS]), sep="\n")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))
