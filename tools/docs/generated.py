"""What the tools of this folder share: the part of a page between two markers, and the shipped models."""

from __future__ import annotations

import functools
from typing import Any

from omegaconf import OmegaConf

from nemo_edo.config.hydra import compose_values
from nemo_edo.config.shipped import shipped_config_dir


@functools.cache
def model_section(name: str) -> dict[str, Any]:
    """The section ``model`` of a config with ``model=NAME``, without a path."""
    folder = shipped_config_dir()
    values, _ = compose_values(f"model/{name}", [], [folder, folder])
    return {**OmegaConf.to_container(values.model), "path": "(not given)"}


def between_markers(page: str, begin: str, end: str, content: str) -> str:
    """The page with ``content`` between its two markers. Raises ValueError unless it has one of each, in order."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the page needs one line {begin!r} and, below it, one line {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"
