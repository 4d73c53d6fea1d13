"""The API reference: it has every public name, and each docstring has the shapes, errors and source that apply."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nemo_edo
from nemo_edo import losses, metrics, test_time

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "docs/api").glob("*.md")}


@pytest.mark.parametrize(("module", "page"), [(losses, "losses"), (metrics, "metrics"), (test_time, "test_time")])
def test_the_reference_has_every_public_name_once(module, page: str):
    shown = re.findall(rf"^::: {module.__name__}\.(\w+)$", PAGES[page], re.MULTILINE)
    assert sorted(shown) == sorted(module.__all__)


def test_the_reference_has_the_python_api():
    shown = re.findall(r"^::: (\S+)$", PAGES["runs"], re.MULTILINE)
    assert {name.rpartition(".")[2] for name in shown} == {*nemo_edo.__all__}


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_reference_has_a_docstring(page: str):
    root = Path(nemo_edo.__file__).parent.parent
    for name in re.findall(r"^::: (\S+)$", PAGES[page], re.MULTILINE):
        module, _, member = name.rpartition(".")
        if (path := root / Path(*module.split("."))).is_dir():
            continue  # a name of a package, whose docstring the tests below read
        source = path.with_suffix(".py").read_text(encoding="utf-8")
        found = re.search(rf"^(?:class|def) {member}\b.*?:\n +\"\"\"", source, re.MULTILINE | re.DOTALL)
        assert found and found[0].count("\ndef ") + found[0].count("\nclass ") == 0, f"{name} has no docstring"


def test_arguments_become_items_and_errors_a_paragraph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))  # of the site's environment
    tool = Path(__file__).parents[2] / "tools" / "docs" / "docstring_lists.py"
    as_markdown = runpy.run_path(str(tool))["as_markdown"]
    wide = f"z: {'so many words that ' * 5}nothing more fits"
    text = f"What.\n\nx, y: [B] values\n    of two lines.\n{wide}\nbehind them.\nThe rest.\nRaises ValueError for z."
    assert as_markdown(text, {"x", "y", "z"}).splitlines() == [
        "What.", "", "", "- `x`, `y`: [B] values", "    of two lines.", f"- `z`{wide[1:]}", "    behind them.", "",
        "The rest.", "", "Raises ValueError for z.",
    ]  # fmt: skip
