"""What this machine cannot run is skipped with a reason, and the last lines of a run list it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def _suite(path: str | Path) -> str:
    """``gpu`` for tests/gpu/test_x.py."""
    return Path(path).resolve().relative_to(TESTS).parts[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if _suite(item.path) == "gpu"]
    if not on_gpu:
        return
    import torch  # only now: without GPU tests nobody need wait for it here

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        path, _, reason = report.longrepr
        skipped[_suite(config.rootpath / path), reason.removeprefix("Skipped: ")] += 1
    terminalreporter.section("not run on this machine")
    for (suite, reason), count in sorted(skipped.items()):
        terminalreporter.line(f"{suite}: {reason} ({count} {'test' if count == 1 else 'tests'})")
    if not skipped:
        terminalreporter.line("nothing: every collected test ran")
