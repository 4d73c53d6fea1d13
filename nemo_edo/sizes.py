"""Sizes as people write them."""

from __future__ import annotations

import re

from nemo_edo.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(name: str, text: str) -> int:
    """The bytes of 5GB, 500MB or 2GiB, as ``transformers`` reads them. Raises UserError, which begins with ``name``,
    for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Z]*)", text.strip().upper())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise UserError(f"{name} is {text}, expected a size such as 5GB, 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])
