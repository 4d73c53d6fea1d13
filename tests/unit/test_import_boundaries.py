"""The import rules of the folders: what a fresh interpreter has loaded after it imported every module of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nemo_edo

PACKAGE = Path(nemo_edo.__file__).parent
HEAVY = {"megatron", "nemo", "lightning", "pytorch_lightning", "vllm", "tensorrt_llm", "hydra",
         "httpx", "requests", "aiohttp"}

RULES = [  # parts that share a rule share an interpreter: starting one with torch is slow
    (["errors", "processes", "sizes"], HEAVY | {"torch", "numpy"}),
    (["config"], HEAVY | {"torch"}),
    (["cli"], HEAVY | {"torch"}),
    (["model_shape"], HEAVY | {"torch"}),
    (["http_client"], HEAVY - {"httpx"} | {"torch"}),
    (["generation/inside_server"], HEAVY | {"torch", "numpy", "transformers", "starlette"}),
    (["evaluator_run"], HEAVY - {"hydra"}),
    (["configuration", "doctor"], HEAVY - {"hydra"} | {"torch"}),
    (["types", "interfaces", "losses", "metrics", "test_time", "parallel", "algorithms"], HEAVY | {"transformers"}),
    (["data", "run_folder", "factory"], HEAVY),
    (["evaluation"], HEAVY | {"nemo_edo.algorithms"}),
    (["rewards"], {"megatron", "nemo", "vllm", "tensorrt_llm"}),
]

PROBE = """
import importlib, sys
names, forbidden = sys.argv[1].split(","), sys.argv[2].split(",")
for name in names:
    importlib.import_module(name)
    found = [heavy for heavy in forbidden if heavy in sys.modules]
    if found:
        sys.exit(f"importing {name} loads {', '.join(found)}")
"""


def modules_of(part: str) -> list[str]:
    """Every module of a folder below the package, or the one module of that name."""
    files = sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / f"{part}.py"]
    return [".".join(["nemo_edo", *file.relative_to(PACKAGE).with_suffix("").parts]) for file in files]


def probe(names: list[str], forbidden: set[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, ",".join(names), ",".join(sorted(forbidden))]
    return subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)


@pytest.mark.parametrize(("parts", "forbidden"), RULES, ids=["-".join(parts) for parts, _ in RULES])
def test_parts_load_nothing_that_their_import_rule_forbids(parts: list[str], forbidden: set[str]):
    result = probe([name for part in parts for name in modules_of(part)], forbidden)
    assert result.returncode == 0, result.stderr


def test_probe_names_the_module_that_breaks_a_rule():
    result = probe(["nemo_edo.errors", "nemo_edo.configuration"], HEAVY)
    assert (result.returncode, result.stderr.strip()) == (1, "importing nemo_edo.configuration loads hydra")
