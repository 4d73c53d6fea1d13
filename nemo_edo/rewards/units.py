"""What follows a number in an answer: a unit, what is counted, or a multiplier such as million."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from nemo_edo.data.answers import simple_fraction

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{(?P<words>[^{}]*)\}")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi max min gcd lcm mod choose det "
    "and or".split()
)
"""Words that are mathematics."""
_MULTIPLIERS = {"k": 10**3, "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
                "trillion": 10**12, "mn": 10**6, "mio": 10**6, "mil": 10**6, "bn": 10**9, "lakh": 10**5,
                "crore": 10**7, "score": 20, "gross": 144}  # fmt: skip
_NO_UNIT = frozenset(
    "is are was were be not no nor never wrong incorrect false invalid nope or and but if unless than more less fewer "
    "plus minus over mod modulo factorial root power inverse reciprocal negative percent permille basis bc bce halves "
    "third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths "
    "hundredth hundredths thousandth thousandths half maybe perhaps except without instead so because nothing "
    "none doubled tripled quadrupled halved bps".split()
)
_FIRST_MARK = "\x01"
"""Stands where a text or a degree sign began."""
_FORMULA_THEN_TEXT = re.compile(rf"(?P<value>[^{_FIRST_MARK}]*\S)\s*{_FIRST_MARK}(?P<unit>.+)")
_NUMBER_THEN_WORDS = re.compile(r"(?P<value>[^a-zA-Z\\]*\d|.*\\[dt]?frac\s*\{\d+\}\s*\{\d+\}) (?P<unit>[a-zA-Z].*)")
_TOKENS = re.compile(r"[a-z]+|\^\{?-?\d+\}?|/")
_SECOND, _METRE, _GRAM = Fraction(1), Fraction(1), Fraction(1)
_INCH = Fraction(254, 10000)


def _units() -> dict[str, tuple[Counter[str], Fraction]]:
    """Of each name its dimensions, and its size in the dimension's first unit."""
    names = {
        "length": {
            "m meter metre": _METRE, "cm centimeter centimetre": _METRE / 100,
            "mm millimeter millimetre": _METRE / 1000, "km kilometer kilometre": _METRE * 1000,
            "in inch inche": _INCH, "ft foot feet": 12 * _INCH, "yd yard": 36 * _INCH, "mi mile": 63360 * _INCH,
        },
        "time": {
            "s sec second": _SECOND, "ms millisecond": _SECOND / 1000, "min minute": 60 * _SECOND,
            "h hr hour": 3600 * _SECOND, "day": 86400 * _SECOND, "wk week": 604800 * _SECOND,
        },
        "months": {"month": Fraction(1), "yr year": Fraction(12), "decade": Fraction(120)},
        "mass": {"g gram": _GRAM, "kg kilogram kilo": 1000 * _GRAM, "mg milligram": _GRAM / 1000},
        "weight": {"oz ounce": Fraction(1), "lb pound": Fraction(16), "ton": Fraction(32000)},
        "volume": {"cup": Fraction(1), "pt pint": Fraction(2), "qt quart": Fraction(4), "gal gallon": Fraction(16)},
        "litres": {"l liter litre": Fraction(1), "ml milliliter millilitre": Fraction(1, 1000)},
        "dollars": {"dollar usd": Fraction(1), "cent": Fraction(1, 100)},
        "euros": {"euro eur": Fraction(1)},
        "degrees": {"degree deg": Fraction(1)},
        "radians": {"radian rad": Fraction(1)},
    }  # fmt: skip
    found = {
        name: (Counter({dimension: 1}), size)
        for dimension, sizes in names.items()
        for spellings, size in sizes.items()
        for name in spellings.split()
    }
    found["mph"] = (Counter({"length": 1, "time": -1}), 63360 * _INCH / 3600)
    found["kph"] = found["kmh"] = (Counter({"length": 1, "time": -1}), Fraction(1000, 3600))
    return found


_UNITS = _units()
NAMES = frozenset(_UNITS)
"""Of units that have a size, in the singular."""


@dataclass(frozen=True)
class Unit:
    dimensions: frozenset[tuple[str, int]]
    """Of the units that have a size."""
    size: Fraction
    counted: frozenset[str]
    """The other words, in the singular."""

    @property
    def is_any(self) -> bool:
        """Whether it fits every unit."""
        return not self.dimensions and (not self.counted or "unit" in self.counted)


@dataclass(frozen=True)
class Quantity:
    value: str
    """The mathematics before the words."""
    multiplier: int
    """1000000 of 5 million."""
    unit: Unit
    words: str
    """The unit, as it is written."""


def quantity(answer: str, *, letters: bool = False) -> Quantity | None:
    """An answer's value and unit; None where it is not a value that a unit, or what is counted, follows.

    letters: whether a single letter outside of a text may be a unit: 5 m may be a product.
    """
    marked = TEXT.sub(lambda text: f"{_FIRST_MARK}{text['words']} ", answer)
    marked = re.sub(r"\^\{?\\circ\}?|°", _FIRST_MARK + "degrees ", marked)
    match = _FORMULA_THEN_TEXT.fullmatch(marked) or _NUMBER_THEN_WORDS.fullmatch(marked)
    if match is None or not re.search(r"[\da-z]", match["value"]):
        return None
    words = " ".join(match["unit"].replace(_FIRST_MARK, " ").split())
    if _FIRST_MARK not in marked and not _begins_a_unit(words) and not (letters and words in _UNITS):
        return None
    if "degrees" in words and simple_fraction(match["value"]) is None:
        return None  # \sin 30^\circ is a number
    read = _read(words)
    return Quantity(match["value"].strip(), *read) if read is not None else None


def comparable(one: Unit, other: Unit) -> bool:
    """Whether values in these units can be equal."""
    if one.is_any or other.is_any:
        return True
    if one.dimensions or other.dimensions:  # 5 N m is no length, 5 m of rope is
        letters = [{word for word in unit.counted if len(word) == 1} for unit in (one, other)]
        return one.dimensions == other.dimensions and letters[0] == letters[1]
    return bool(one.counted & other.counted)


def ratio(one: Quantity, other: Quantity) -> Fraction:
    """What the first one's value is multiplied by to be in the other's unit."""
    sized = one.unit.dimensions and other.unit.dimensions
    return Fraction(one.multiplier, other.multiplier) * (one.unit.size / other.unit.size if sized else 1)


def no_unit(value: str) -> Quantity:
    return Quantity(value, 1, Unit(frozenset(), Fraction(1), frozenset()), "")


def _begins_a_unit(words: str) -> bool:
    """Of words outside of a text: one letter may be a variable."""
    first = re.match(r"[a-zA-Z]+", words)[0]
    return first not in FUNCTIONS and (len(first) > 1 or re.fullmatch(r"[a-z]+/[a-z]+", words) is not None)


def _read(words: str) -> tuple[int, Unit, str] | None:
    """The multiplier, the unit and its words; None for what is neither."""
    text = words.casefold().replace("²", "^2").replace("³", "^3").replace(".", "")
    text = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text)
    tokens = _TOKENS.findall(text)
    if not tokens or len("".join(tokens)) != len(text.replace(" ", "")) or _NO_UNIT & set(tokens):
        return None
    if tokens[0] in ("squared", "cubed"):  # of the number
        return None
    multiplier, sizes = 1, Counter()
    if words == "M":  # 5 M is 5 million, and 5 m five metres
        return 10**6, Unit(frozenset(), Fraction(1), frozenset()), ""
    while tokens and (factor := _MULTIPLIERS.get(tokens[0], _MULTIPLIERS.get(tokens[0].removesuffix("s")))):
        multiplier *= factor
        tokens.pop(0)
        words = words.partition(" ")[2]
    size, counted, sign, power = Fraction(1), set(), 1, 1
    last: tuple[Counter[str], Fraction] | None = None

    def add(unit: tuple[Counter[str], Fraction], times: int) -> None:
        nonlocal size
        size *= unit[1] ** times
        for name, exponent in unit[0].items():
            sizes[name] += exponent * times

    for token in tokens:
        singular = token if token in _UNITS or len(token) < 3 else token.removesuffix("s")
        if token in ("/", "per"):
            sign = -1
        elif token in ("square", "sq", "cubic", "cu"):
            power = 2 if token.startswith("s") else 3
        elif token in ("squared", "cubed") or token.startswith("^"):
            exponent = {"squared": 2, "cubed": 3}.get(token) or int(token.strip("^{}"))
            if last is not None:
                add(last, (exponent - 1) * sign)
        elif singular in _UNITS:
            last = _UNITS[singular]
            add(last, sign * power)
            power = 1
        elif len(token) == 1 and token not in "ajwnvcf":  # joule, watt, newton, volt, and degrees
            return None
        elif token not in ("of", "a", "an", "the"):
            counted.add(singular)
    return multiplier, Unit(frozenset(item for item in sizes.items() if item[1]), size, frozenset(counted)), words
