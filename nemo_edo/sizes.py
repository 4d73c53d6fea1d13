"""Sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Collection

from nemo_edo.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str, units: Collection[str] = _UNITS.keys()) -> float | None:
    """The bytes that a number and one of the units (in capitals) make; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    return float(found[1]) * _UNITS[found[2]] if found and found[2] in units else None


def parse_size(name: str, text: str) -> int:
    """The bytes of 5GB, 500MB or 2GiB, as ``transformers`` reads them. Raises UserError, which begins with ``name``,
    for anything else."""
    size = bytes_of(text)
    if not size:
        raise UserError(f"{name} is {text}, expected a size such as 5GB, 500MB or 2GiB")
    return int(size)
