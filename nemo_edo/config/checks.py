"""What a setting may be: constraints in its type, rules of its section; both are checked where the section is made.

    lr: Positive = 1e-6
    schedule: Annotated[str, one_of("constant", "linear", "cosine")] = "constant"

Errors name the key as a user writes it. No check reads files, weights or devices: they run while a config is composed.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache, partial
from numbers import Integral, Real
from operator import attrgetter
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from nemo_edo.utils.import_path import is_import_path

Rules = Iterable[tuple[bool, str, str]]  # (whether it is kept, the setting, what would be right) of each
_OF_PASSWORDS = re.compile(r"(?<=://)[^\s'\",\]]*[@?#][^\s'\",\]]*")


def without_passwords(text: str) -> str:
    """The text without what may be a password in a URL."""
    return _OF_PASSWORDS.sub("***", text)


class SettingError(ValueError):
    """A value that a setting may not have. ``key``: the setting, from the section that was checked on."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(without_passwords(f"{key} is {value!r}, expected {expected}"))
        self.key = key


def require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise SettingError(key, value, expected)


@dataclass(frozen=True)
class Constraint:
    """A rule for a value that is not null."""

    holds: Callable[[Any], bool]
    expected: str


def above(bound: float) -> Constraint:
    return Constraint(lambda value: bound < value < math.inf, f"a number above {bound:g}")


def at_least(bound: float, why: str = "") -> Constraint:
    return Constraint(lambda value: bound <= value < math.inf, f"a number of at least {bound:g}{why}")


def below(bound: float) -> Constraint:
    return Constraint(lambda value: -math.inf < value < bound, f"a number below {bound:g}")


def within(low: float, high: float, ends: str = "[]") -> Constraint:
    """ends: brackets of the interval; a round one leaves out its end."""

    def holds(value: float) -> bool:
        return low <= value <= high and (ends[0] == "[" or value > low) and (ends[1] == "]" or value < high)

    return Constraint(holds, f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}")


def matching(pattern: str, expected: str) -> Constraint:
    return Constraint(lambda text: re.fullmatch(pattern, text) is not None, expected)


def one_of(*allowed: str) -> Constraint:
    return Constraint(lambda value: value in allowed, "one of " + ", ".join(allowed))


def _is_folder_name(text: str) -> bool:
    plain = text.isprintable() and text.strip() == text and not set("/\\") & set(text)
    return 0 < len(text.encode()) <= 200 and plain and not text.startswith(".")


Positive = Annotated[float, above(0)]
PositiveInt = Annotated[int, above(0)]
NonNegative = Annotated[float, at_least(0)]
NonNegativeInt = Annotated[int, at_least(0)]
Share = Annotated[float, within(0, 1)]
NotEmpty = Annotated[str, Constraint(bool, "a text")]
_FOLDER = "a folder name: on one line, without / and \\, no . at its beginning, at most 200 bytes"
FolderName = Annotated[str, Constraint(_is_folder_name, _FOLDER)]
"""Shells, Slurm and people read it as it is."""
OneLine = Annotated[str, Constraint(str.isprintable, "printable characters on one line")]
"""It becomes a line of a job's script."""
IMPORT_PATH = "an import path such as my_package.my_module:my_function"
ImportPath = Annotated[str, Constraint(is_import_path, IMPORT_PATH)]  # of a user's function


def _is_server_url(value: str) -> bool:
    """Configs are written to files, so that an address has no password."""
    try:
        parts = urlsplit(value)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address
        return False
    return fits and not set("@?#") & set(value) and value.isprintable() and " " not in value


_URL = "a URL such as http://node7:8000, without user, password, query and fragment; api_key_variable gives a key"
ServerUrl = Annotated[str, Constraint(_is_server_url, _URL)]
MAY_BE_INFINITE = Constraint(lambda value: not math.isnan(value), "a number")  # infinity switches a bound off
_NUMBERS = {int: Integral, float: Real}
_SHOWN = {"None": "null", "False": "false", "True": "true", "[]": "none", "{}": "none"}
"""Defaults as a user writes them."""


class Section:
    """A section of the config, checked when it is made: constraints in its fields' types, then the rules of its
    class and of those that it is derived from. Raises SettingError."""

    def __post_init__(self) -> None:
        for name, hint in _types(type(self)).items():
            value = getattr(self, name)
            expected = _expected(hint, value)
            require(expected is None, name, value, expected or "")
        for schema in reversed(type(self).__mro__):
            for fits, name, expected in vars(schema).get("rules", lambda _: ())(self):
                require(fits, name, attrgetter(name)(self), expected)

    def rules(self) -> Rules:
        """What settings ask of each other."""
        return ()

    def only_if(self, used: bool, otherwise: str, *names: str) -> Rules:
        """Rules for settings that have their default unless they are ``used``. otherwise: why, after the default."""
        for name in () if used else names:
            parent, _, leaf = name.rpartition(".")
            section = attrgetter(parent)(self) if parent else self
            field = type(section).__dataclass_fields__[leaf]
            default = field.default_factory() if field.default is MISSING else field.default
            shown = f"{default:g}" if isinstance(default, float) else _SHOWN.get(str(default), default)
            yield getattr(section, leaf) == default, name, f"{shown} {otherwise}"


@cache
def setting_types(schema: type, prefix: str = "") -> dict[str, Any]:
    """The type of every setting and section of a dataclass by its full key; a section's type is its dataclass."""
    types = {}
    for name, hint in get_type_hints(schema).items():
        types[prefix + name] = hint
        if is_dataclass(hint):
            types |= setting_types(hint, f"{prefix}{name}.")
    return types


_types = cache(partial(get_type_hints, include_extras=True))


def _expected(hint: Any, value: Any) -> str | None:
    """What would be right in place of the value; None where it fits."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        if MAY_BE_INFINITE not in parts and (expected := _expected(parts[0], value)):
            return expected
        return next((one.expected for one in parts[1:] if not one.holds(value)), None)
    if get_origin(hint) is Union:
        others = [part for part in parts if part is not type(None)]
        broken = [None if value is None else _expected(part, value) for part in others]
        return f"null or {broken[0]}" if all(broken) else None
    if get_origin(hint) is list:
        if any(isinstance(one, list | dict) for one in value):
            return "plain values in the list"
        return next(filter(None, (_expected(parts[0], one) for one in value)), None)
    if hint in (int, float) and (isinstance(value, bool) or not isinstance(value, _NUMBERS[hint])):
        return "a whole number" if hint is int else "a number"
    return "a finite number" if isinstance(value, float) and not math.isfinite(value) else None
