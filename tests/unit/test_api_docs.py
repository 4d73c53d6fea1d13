"""The API reference has every public name."""

import re
from pathlib import Path

import pytest

import nemo_edo
from nemo_edo import losses, metrics, test_time

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "docs/api").glob("*.md")}


@pytest.mark.parametrize(("module", "page"), [(losses, "losses"), (metrics, "metrics"), (test_time, "test_time")])
def test_the_reference_has_every_public_name_once(module, page: str):
    shown = re.findall(rf"^::: {module.__name__}\.(\w+)$", PAGES[page], re.MULTILINE)
    named = {name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith("nemo_edo.")}
    assert sorted(shown) == sorted(named)


def test_the_reference_has_the_python_api():
    shown = re.findall(r"^::: (\S+)$", PAGES["runs"], re.MULTILINE)
    assert {name.rpartition(".")[2] for name in shown} == {*nemo_edo.__all__}
