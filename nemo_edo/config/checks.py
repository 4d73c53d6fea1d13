"""Checks that name the key as a user writes it. No files, weights or devices: they run while a config is composed."""

from __future__ import annotations


def require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}, expected {expected}")


def one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, key, value, "one of " + ", ".join(allowed))


def positive(owner: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value > 0, f"{section}.{name}", value, "a number above 0")


def share(owner: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(0 <= value <= 1, f"{section}.{name}", value, "a number in [0, 1]")
