"""Writes docs/cli.md: the help of the command line and of each of its commands.

python tools/docs/cli_page.py
"""

from __future__ import annotations

from pathlib import Path

from nemo_edo.cli.arguments import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
HEAD = """# Command line

What `nemo-edo --help` and `nemo-edo COMMAND --help` print. `python -m nemo_edo` is the same program.
[Reliability](reliability.md#exit-statuses) has the exit statuses.
"""


def page() -> str:
    parser, commands = build_parser()
    helps = {"nemo-edo": parser, **{f"nemo-edo {name}": command for name, command in commands.items()}}
    sections = (f"\n## {name}\n\n```text\n{shown.format_help().rstrip()}\n```\n" for name, shown in helps.items())
    return HEAD + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
