"""What the Tab key completes, by argcomplete: commands and options, configs, and settings of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import get_type_hints

from nemo_edo.config import RunConfig
from nemo_edo.config.shipped import shipped_configs


def complete(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> None:
    """Answers the shell and ends the process, where the shell has asked (``_ARGCOMPLETE``)."""
    import argcomplete  # installed by those who use it

    for command in commands.values():
        for action in command._actions:  # argparse has no public list of them
            if action.dest == "config_name":
                action.completer = lambda prefix, **_: shipped_configs()
            elif action.dest == "overrides":
                action.completer = lambda prefix, **_: settings(prefix)
    argcomplete.autocomplete(parser)


def settings(prefix: str) -> list[str]:
    """The keys below the prefix, a level at a time: ``grpo.`` for a section, ``grpo.beta=`` for a setting."""
    return [key for key in _keys(RunConfig) if key.startswith(prefix) and "." not in key[len(prefix) :].rstrip(".")]


def _keys(schema: type, section: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            yield f"{section}{name}."
            yield from _keys(hint, f"{section}{name}.")
        else:
            yield f"{section}{name}="
