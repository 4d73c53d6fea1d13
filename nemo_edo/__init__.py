"""Exploration-driven optimisation (EDO) for LLM post-training on the Megatron/NeMo stack."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "Sweep", "load", "sweep", "train"]


def __getattr__(name: str) -> Any:
    """The names of ``__all__``, looked up when they are used: importing the package loads nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("nemo_edo.api"), name)
    except ModuleNotFoundError as error:
        lacking = importlib.import_module("nemo_edo.checks.installed").what_trainer_lacks()
        if lacking is None:  # not for want of an installation
            raise
        raise ImportError(f"nemo_edo.{name} needs {error.name}, and {lacking}") from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
