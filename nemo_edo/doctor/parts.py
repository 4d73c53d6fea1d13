"""Which parts of the package are installed: the functions, the trainer, and what goes with them.

Reads the package's own metadata with the standard library alone, so that an installation without the trainer can say
what it lacks.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import nemo_edo

TRAINER, BRIDGE = "trainer", "bridge"
FUNCTIONS = "losses, metrics, test_time, adapters"
TRAINER_PYTHONS = ((3, 11), (3, 12))
ADAPTED = ("trl", "verl", "nemo-rl", "slime", "prime-rl")
"""Trainers that ``adapters`` is for, as pip knows them."""


@dataclass(frozen=True)
class Part:
    """An extra of the package (pyproject.toml); "" for what it needs without any."""

    extra: str
    missing: tuple[str, ...]
    """Requirements that are not installed in any version, as pip takes them."""

    @property
    def remedy(self) -> str:
        """The command that installs what is missing."""
        if self.extra == BRIDGE:  # its declared dependencies need a GPU machine's compilers
            return " ".join(["pip install --no-deps", *(f"'{need}'" for need in self.missing)])
        return f'pip install "nemo-edo[{self.extra}]"' if self.extra else 'pip install "nemo-edo"'

    @property
    def lacks(self) -> str:
        """In words, for a part that lacks something."""
        first, *others = (re.split(r"[^\w.-]", need)[0] for need in self.missing)
        return f"{first} and {len(others)} more are missing" if others else f"{first} is missing"


def parts(distribution: str = "nemo-edo") -> list[Part]:
    """What the package declares: first what it needs without an extra, then the trainer. None of a package that is run
    from its sources without having been installed."""
    missing: dict[str, list[str]] = {}
    for line in _requirements(distribution):
        need, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        lacking = missing.setdefault(extra[1] if extra else "", [])
        if installed(re.split(r"[^\w.-]", need)[0]) is None:
            lacking.append(need)
    order = sorted(missing, key=lambda extra: (("", TRAINER, BRIDGE, extra).index(extra), extra))
    return [Part(extra, tuple(missing[extra])) for extra in order]


def installed(name: str) -> str | None:
    """The version of a package; None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def what_trainer_lacks() -> str | None:
    """One sentence with the commands that install it; None where nothing is missing."""
    lacking = [part for part in parts() if part.extra in (TRAINER, BRIDGE) and part.missing]
    if not lacking:
        return None
    remedies = " and ".join(part.remedy for part in lacking)
    return f"the trainer is not installed here ({lacking[0].lacks}): {remedies}{_on_its_python()}"


def light_report() -> str:
    """What ``nemo-edo doctor`` prints where the trainer is missing."""
    return "\n".join([f"nemo-edo     {nemo_edo.__version__}, Python {sys.version.split()[0]}", *part_lines()])


def part_lines() -> list[str]:
    """Lines that say which parts are installed, and what installs the others."""
    versions = f"torch {installed('torch') or 'absent'}, numpy {installed('numpy') or 'absent'}"
    lines = [f"functions    {FUNCTIONS}: {versions}"]
    for part in parts():
        if part.extra:
            state = f"not installed ({part.lacks}): {part.remedy}" if part.missing else "installed"
            lines.append(f"{part.extra:12} {state}{_on_its_python() if part.extra == TRAINER else ''}")
    return [*lines, f"adapted      {', '.join(adapted()) or 'none installed'} (of {', '.join(ADAPTED)})"]


def adapted() -> list[str]:
    """The installed trainers that have an adapter, with their versions."""
    return [f"{name} {found}" for name in ADAPTED if (found := installed(name)) is not None]


def _on_its_python() -> str:
    if sys.version_info[:2] in TRAINER_PYTHONS:
        return ""
    pythons = " or ".join(".".join(map(str, python)) for python in TRAINER_PYTHONS)
    return f" on Python {pythons}"


def _requirements(distribution: str) -> list[str]:
    try:
        return requires(distribution) or []
    except PackageNotFoundError:
        return []
