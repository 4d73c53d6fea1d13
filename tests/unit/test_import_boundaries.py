"""How the package's rooms (top-level modules and packages) may depend on each other, read from their imports, and what
they may load, read from fresh interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import nemo_edo

PACKAGE = Path(nemo_edo.__file__).parent
HEAVY = {"megatron", "nemo", "lightning", "pytorch_lightning", "vllm", "tensorrt_llm", "hydra",
         "httpx", "requests", "aiohttp"}


def module_name(file: Path) -> str:
    return ".".join(["nemo_edo", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(source: str) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of each import, wherever it is in the file, be it for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.module, alias.name) for alias in node.names)


IMPORTS = {module: list(imports_of(file.read_text(encoding="utf-8"))) for module, file in MODULES.items()}


def own_imports(module: str) -> set[str]:
    """The package's modules that a module imports."""
    targets = [f"{target}.{name}" if f"{target}.{name}" in MODULES else target for target, name in IMPORTS[module]]
    return {target for target in targets if target in MODULES}


def is_in(module: str, *places: str) -> bool:
    """Whether a module is one of these, or in one of these packages; places are named below ``nemo_edo``."""
    return any(f"{module}.".startswith(f"nemo_edo.{place}.") for place in places)


def room(module: str) -> str:
    return f"{module}.__init__".split(".")[1]


def users_of(place: str) -> set[str]:
    """Modules outside a place that import from it; named below ``nemo_edo``."""
    return {module.removeprefix("nemo_edo.") for module in MODULES if not is_in(module, place)
            and any(is_in(target, place) for target in own_imports(module))}


def test_rooms_and_modules_import_each_other_without_a_circle():
    rooms = {}
    for module in MODULES:
        rooms.setdefault(room(module), set()).update(map(room, own_imports(module)))
    for graph in (rooms, {module: own_imports(module) for module in MODULES}):
        without_itself = {name: targets - {name} for name, targets in graph.items()}
        TopologicalSorter(without_itself).prepare()  # raises CycleError, which names them


def test_a_place_is_imported_by_its_few_users_only_or_not_by_another_place():
    assert users_of("cluster") <= {"cli.commands"}
    assert users_of("adapters") == set()
    assert users_of("megatron.cpu") <= {"megatron.layer_spec", "megatron.platform"}
    assert {user.partition(".")[0] for user in users_of("parallel.main_rank")} <= {"megatron"}
    for place, never in {"experiments": {"run", "algorithms", "data", "report", "evaluation"}, "report": {"run_folder"},
                         "checks": {"run", "algorithms", "data"}, "algorithms": {"evaluation"}}.items():
        assert never.isdisjoint(user.partition(".")[0] for user in users_of(place))
    whole = {room(module) for module, found in IMPORTS.items() if "RunConfig" in {name for _, name in found}}
    assert whole <= {"api", "checks", "cli", "cluster", "config", "experiments", "run", "search"}


@pytest.mark.parametrize(("name", "rooms"), {
    "metrics": {"parallel"},
    "losses": {"config"},
    "parallel": {"errors", "utils"},
    "test_time": {"config", "metrics"},
    "adapters": {"losses"},
    "rollouts": {"config", "data", "errors", "interfaces", "types", "utils"},
    # It sees engines, scorers and policies as the Protocols of interfaces.py.
    "algorithms": {"builtin_task", "config", "data", "errors", "interfaces", "losses", "metrics", "rollouts", "types",
                   "utils"},
}.items())
def test_a_room_imports_these_rooms_only(name: str, rooms: set[str]):
    inside = [module for module in MODULES if room(module) == name]
    assert {room(target) for module in inside for target in own_imports(module)} - {name} <= rooms


WITHOUT_TORCH = HEAVY | {"torch"}
CHAINS = {  # the places of a chain share an interpreter, so their rules go from the strictest to the loosest
    "no torch": [
        (["errors", "utils.files", "utils.processes"], WITHOUT_TORCH | {"numpy"}),
        (["config", "cli"], WITHOUT_TORCH),
        (["config.compose", "config.hydra", "checks.doctor", "checks.preflight", "types", "data.problems"],
         WITHOUT_TORCH - {"hydra"}),
        (["utils.http"], {"torch"}),
    ],
    "inside a server": [(["generation.inside_server"], WITHOUT_TORCH | {"numpy", "transformers", "starlette"})],
    "torch": [
        (["losses", "metrics", "test_time"],
         HEAVY | {"transformers", "omegaconf", "datasets", "pyarrow", "pandas", "nltk"}),
        (["types", "interfaces", "parallel", "algorithms"], HEAVY | {"transformers"}),
        (["data", "run_folder", "run.inputs", "run.build", "evaluation", "megatron.platform"], HEAVY),
        (["run.stored_run"], HEAVY - {"hydra"}),
        (["rewards"], {"megatron", "nemo", "vllm", "tensorrt_llm"}),
    ],
}
NOT_INSTALLED = () if find_spec("reasoning_gym") else ("nemo_edo.data.reasoning_gym",)
OWN_RULE = ["config.compose", "config.hydra"]
"""Modules with another rule than their package's."""

PROBE = """
import importlib, json, sys
for names, forbidden in json.loads(sys.argv[1]):
    for name in names:
        importlib.import_module(name)
        found = [heavy for heavy in forbidden if heavy in sys.modules]
        if found:
            sys.exit(f"importing {name} loads {', '.join(found)}")
"""


def modules_of(places: list[str]) -> list[str]:
    """Every module of these places; of a package, without those that have their own rule."""
    found = [module for module in MODULES if is_in(module, *places) and module not in NOT_INSTALLED]
    return [module for module in found if module.removeprefix("nemo_edo.") in places or not is_in(module, *OWN_RULE)]


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_importing_a_place_loads_nothing_that_its_rule_forbids(chain: list[tuple[list[str], set[str]]]):
    assert all(modules_of([place]) for places, _ in chain for place in places), "the places exist"
    rules = json.dumps([(modules_of(places), sorted(forbidden)) for places, forbidden in chain])
    command = [sys.executable, "-c", PROBE, rules]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    assert result.returncode == 0, result.stderr
