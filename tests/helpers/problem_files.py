"""Problem files of rows in GSM8K's form, which the built-in task's tokenizer knows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

ROWS = [{"question": f"{i} + {i + 1}", "answer": f"{i} + {i + 1} = {2 * i + 1}\n#### {2 * i + 1}"} for i in range(6)]


def write_rows(path: Path, rows: Sequence[dict | str]) -> Path:
    """Texts as they are, others as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def problem_overrides(folder: Path, **rows: Sequence[dict | str]) -> list[str]:
    """Written as train.jsonl, test.jsonl and so on, and named by the data's settings of these names."""
    return [f"data.{name}={write_rows(folder / f'{name}.jsonl', some)}" for name, some in rows.items()]


def write_sums(folder: Path, is_wrong: Callable[[int, int], bool], *, tested: int = 8) -> list[str]:
    """Overrides for 16 sums: the warm-up sees all, with wrong solutions for some; half of them are trained on."""
    pairs = [(a, b) for a in range(1, 5) for b in range(1, 5)]

    def write(name: str, pairs: list[tuple[int, int]]) -> str:
        rows = [(f"{a} + {b}", a + b + (name == "warmup" and is_wrong(a, b))) for a, b in pairs]
        lines = [json.dumps({"question": q, "answer": f"{q} = {total}\n#### {total}"}) for q, total in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        return f"data.{name}={folder / name}.jsonl"

    return [write("warmup", pairs), write("train", pairs[::2]), write("test", pairs[1 :: 16 // tested])]
