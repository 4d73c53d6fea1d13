"""The API reference: it has every public name, and each docstring has the shapes, errors and source that apply."""

import inspect
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nemo_edo
from nemo_edo import losses, metrics, test_time

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "docs/api").glob("*.md")}
PUBLIC = [(module, name) for module in (losses, metrics, test_time) for name in module.__all__]
FUNCTIONS = [(module, name) for module, name in PUBLIC if inspect.isfunction(getattr(module, name))]
NO_FORMULA = {  # what they compute has no publication: sums, counts, checks, and parts of what others compute
    "each_path", "distinct_answers", "distinct_counts", "reduction_count", "sequence_logprobs", "token_spread",
    "sft_loss", "build_schedule", "floor_share", "preference_metrics", "solved_and_lost", "vote_counts",
    "majority_vote",
    "expected_vote_score", "majority_at_k", "mean_p_value", "redundancy_shares", "novelty_advantages",
    "entropy_from_logits", "distinct_n", "exploration_noise_term", "exploration_per_token",
}  # fmt: skip


def document(module, name: str) -> str:
    return inspect.getdoc(getattr(module, name)) or ""


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


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_docstring_is_written_and_not_made(module, name: str):
    assert document(module, name) and not document(module, name).startswith(f"{name}(")


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_a_functions_docstring_has_what_applies(module, name: str):
    text, parameters = document(module, name), inspect.signature(getattr(module, name)).parameters.values()
    refers = re.search(r"as for ``|as in ``|of those of|are those of|as theirs|of these two|Otherwise ``|See ``", text)
    tensors = [parameter.name for parameter in parameters if "Tensor" in str(parameter.annotation)]
    assert not tensors or refers or re.search(r"\[[A-Z.]|any shape", text), f"no shape of {tensors}"
    raises = re.search(r"raise |require|check|_of\(", inspect.getsource(getattr(module, name)))
    assert not raises or refers or re.search(r"Raises|rrors", text), "no errors"
    sourced = re.search(r"\b(18|19|20)\d\d\b|eq\. \d|the paper", text)
    assert sourced or refers or name in NO_FORMULA, "no source"


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
