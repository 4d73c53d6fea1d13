"""Writes the tables of every setting into docs/configuration.md: keys, defaults and docstrings of nemo_edo/config/.

First a run's, then those of reward models' training and scoring.

python tools/docs/config_table.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from generated import between_markers

from nemo_edo import config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- settings: written by tools/docs/config_table.py -->"
END = "<!-- end of settings -->"
REWARD_MODELS = (
    "<!-- reward model settings: written by tools/docs/config_table.py -->",
    "<!-- end of reward model settings -->",
)


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """The page with new tables; raises ValueError as ``between_markers`` does."""
    page = between_markers(page, BEGIN, END, settings_tables())
    return between_markers(page, *REWARD_MODELS, reward_model_tables())


def reward_model_tables() -> str:
    """The settings of ``train --config-name reward_model``, then those of ``score``, whose servers are those of a
    run."""
    documents = _docstrings()
    tables = [_section(name, section, documents) for name, section in _sections("", config.RewardModelRunConfig)]
    tables[0] = tables[0].replace("### The run", "### Settings of the training")
    scoring = _section("", config.ScoreConfig, documents).replace("### The run", "### Settings of `nemo-edo score`")
    return "\n".join([*tables, scoring.replace("a section, below", "as `generation.servers`")])


def settings_tables() -> str:
    """A heading and a table for each section of a run, in the order of the dataclasses."""
    documents = _docstrings()
    return "\n".join(_section(name, section, documents) for name, section in _sections("", config.RunConfig))


def _sections(name: str, section: Any) -> Iterator[tuple[str, Any]]:
    """A section and those below it by full key. The run itself stays a class: a model has to be named to make one."""
    yield name, section
    for field in fields(section):
        value = _default(section, field)
        if is_dataclass(value):
            yield from _sections(f"{name}.{field.name}".lstrip("."), value)


def _default(section: Any, field: Any) -> Any:
    if not isinstance(section, type):
        return getattr(section, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _section(name: str, section: Any, documents: dict[str, str]) -> str:
    kind = section if isinstance(section, type) else type(section)
    lines = [f"### `{name}`" if name else "### The run", ""]
    if kind.__name__ in documents:
        lines += [documents[kind.__name__], ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    for field in fields(section):
        value = _default(section, field)
        key = f"{name}.{field.name}".lstrip(".")
        shown = "a section, below" if is_dataclass(value) else f"`{_written(value)}`"
        owners = [owner.__name__ for owner in kind.__mro__]
        meaning = next((documents[f"{o}.{field.name}"] for o in owners if f"{o}.{field.name}" in documents), "")
        lines.append(f"| `{key}` | {shown} | {meaning} |")
    return "\n".join([*lines, ""])


def _written(value: Any) -> str:
    """As written in a config file."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w.-]+", value) else '"' + value.replace("\n", "\\n") + '"'
    return yaml.safe_dump(value, default_flow_style=True, explicit_end=False).removesuffix("...\n").strip()


def _docstrings() -> dict[str, str]:
    """The docstrings of the config's classes (``GRPOConfig``) and of their fields (``GRPOConfig.iterations``), where a
    short one is a comment beside the field."""
    found = {}
    for text in (file.read_text(encoding="utf-8") for file in sorted(Path(config.__file__).parent.glob("*.py"))):
        lines = text.splitlines()
        for node in (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)):
            found[node.name] = ast.get_docstring(node)
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                        found[f"{node.name}.{name}"] = inspect.cleandoc(doc)
                    case ast.AnnAssign(target=ast.Name(id=name)), _:
                        code = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode()
                        found[f"{node.name}.{name}"] = code.partition("# ")[2]
    return {name: _markdown(text) for name, text in found.items() if text}


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    main()
