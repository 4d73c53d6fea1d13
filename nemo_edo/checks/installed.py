"""Which parts of the package are installed: the functions, the trainer, and what goes with them.

Reads package metadata with the standard library alone, so that an installation without the trainer can say what it
lacks.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import nemo_edo

TRAINER, BRIDGE = "trainer", "bridge"
TRAINER_PYTHON = (3, 12)
WITHOUT_DEPENDENCIES = "megatron-bridge"  # its declared dependencies need a GPU machine's compilers
ABOUT = ("torch", "megatron-core", WITHOUT_DEPENDENCIES, "nemo-toolkit", "transformers")
"""Packages whose versions every report of a machine has."""
ADAPTED = ("trl", "verl", "nemo-rl", "slime", "prime-rl", "rllm", "skyrl")
"""Trainers that ``adapters`` is for, as pip knows them."""


def installed(name: str) -> str | None:
    """The version of a package; None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: installed(name) or "absent" for name in ABOUT}}


def requirements() -> list[str]:
    """The package's declared requirements; none where it runs from its sources without having been installed."""
    try:
        return requires("nemo-edo") or []
    except PackageNotFoundError:
        return []


def missing() -> dict[str, list[str]]:
    """The requirements that are not installed in any version, by extra, the trainer first; "": those without one."""
    found: dict[str, list[str]] = {"": [], TRAINER: [], BRIDGE: []}
    for line in requirements():
        need, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        lacking = found.setdefault(extra[1] if extra else "", [])
        if installed(_name(need)) is None:
            lacking.append(need)
    return found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def _lacks(needs: list[str]) -> str:
    first, *others = map(_name, needs)
    return f"{first} and {len(others)} more are missing" if others else f"{first} is missing"


def _remedy(extra: str, needs: list[str]) -> str:
    """The command that installs what is missing; the package is on no index."""
    if extra == BRIDGE:
        return " ".join(["pip install --no-deps", *(f"'{need}'" for need in needs)])
    hosts = [name for name in ADAPTED if installed(name) is not None] if extra == TRAINER else []
    apart = f", in a separate environment: here it would change what {' and '.join(hosts)} needs" if hosts else ""
    return f'pip install ".[{extra}]" in a checkout{apart}'


def _on_its_python() -> str:
    return "" if sys.version_info[:2] == TRAINER_PYTHON else f" on Python {'.'.join(map(str, TRAINER_PYTHON))}"


def what_trainer_lacks() -> str | None:
    """One sentence with the commands that install it; None where nothing is missing."""
    lacking = {extra: needs for extra, needs in missing().items() if extra in (TRAINER, BRIDGE) and needs}
    if not lacking:
        return None
    remedies = " and ".join(_remedy(extra, needs) for extra, needs in lacking.items())
    first = next(iter(lacking.values()))
    return f"the trainer is not installed here ({_lacks(first)}): {remedies}{_on_its_python()}"


def about() -> dict[str, str]:
    """The installed parts of the package and the trainers that it adapts, by the names that the doctor prints."""
    found = {
        "nemo-edo": f"{nemo_edo.__version__}, Python {sys.version.split()[0]}",
        "functions": "losses, metrics, test_time, adapters: "
        f"torch {installed('torch') or 'absent'}, numpy {installed('numpy') or 'absent'}",
    }
    for extra, needs in missing().items():
        if extra:
            state = f"not installed ({_lacks(needs)}): {_remedy(extra, needs)}" if needs else "installed"
            found[extra] = state + (_on_its_python() if extra == TRAINER else "")
    adapted = [f"{name} {installed(name)}" for name in ADAPTED if installed(name) is not None]
    return {**found, "adapted": f"{', '.join(adapted) or 'none installed'} (of {', '.join(ADAPTED)})"}
