"""Checks of arguments that several metrics share. An error names the argument and what was found."""

from __future__ import annotations

import operator


def whole_number(name: str, value: int, *, least: int | None = None) -> int:
    """``value`` as a Python int; NumPy's integers are welcome.

    Raises ValueError for a bool or a float, which are not counts even where their value is whole, and below ``least``.
    """
    expected = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected {expected}") from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise ValueError(f"{name} is {value!r}, expected {expected}")
    return number
