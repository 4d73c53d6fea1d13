"""Checks that name the key as a user writes it. No files, weights or devices: they run while a config is composed."""

from __future__ import annotations

from urllib.parse import urlsplit

from nemo_edo.utils.import_path import is_import_path


def require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}, expected {expected}")


def folder_name(key: str, value: str) -> None:
    """A folder's name that shells, Slurm and people read as it is."""
    plain = value.isprintable() and value.strip() == value and not set("/\\") & set(value)
    fits = bool(value) and plain and not value.startswith(".")
    require(fits, key, value, "a folder name: on one line, without / and \\, and no . at its beginning")


def one_line(key: str, value: object) -> None:
    """What becomes a line of a job's script."""
    require(value is None or str(value).isprintable(), key, value, "printable characters on one line")


def server_url(key: str, value: str, example: str) -> None:
    """A server's address without a password: configs are written to files. What may be one is not shown."""
    expected = f"a URL such as {example}, without user, password, query and fragment; api_key_variable gives a key"
    secretive = set("@?#") & set(value)
    try:
        parts = urlsplit(value)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address
        fits = False
    if secretive:
        raise ValueError(f"{key} has a {', a '.join(sorted(secretive))}, expected {expected}")
    require(fits and value.isprintable() and " " not in value, key, value, expected)


def import_path(key: str, value: str | None) -> None:
    """Of a user's function."""
    fits = value is None or is_import_path(value)
    require(fits, key, value, "an import path such as my_package.my_module:my_function")


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
