"""The ``nemo-edo`` command: its arguments, what each command calls, and how it ends."""

from nemo_edo.cli.commands import main
