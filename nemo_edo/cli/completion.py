"""What the Tab key completes, by argcomplete: commands and options, configs, and settings of a run."""

from __future__ import annotations

import argparse
from dataclasses import is_dataclass

from nemo_edo.config import RunConfig
from nemo_edo.config.checks import setting_types
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
    keys = [f"{key}{'.' if is_dataclass(hint) else '='}" for key, hint in setting_types(RunConfig).items()]
    return [key for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :].rstrip(".")]
