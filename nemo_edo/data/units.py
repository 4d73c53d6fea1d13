"""What stands beside a number in an answer: a unit, a currency, what is counted, or a multiplier such as million."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{(?P<words>[^{}]*)\}")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi max min gcd lcm mod choose det "
    "and or".split()
)  # words that are mathematics
_MULTIPLIERS = {"k": 10**3, "dozen": 12, "tens": 10, "hundred": 10**2, "thousand": 10**3, "million": 10**6,
                "billion": 10**9, "trillion": 10**12, "mn": 10**6, "mio": 10**6, "mil": 10**6, "bn": 10**9,
                "lakh": 10**5, "crore": 10**7, "score": 20, "gross": 144}  # fmt: skip
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
PARTS = (
    "half third quarter fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
"""Names of equal parts of a whole, from 1/2 on."""
_SMALLER = [*PARTS[9:], *(f"{ten[:-1]}ieth" for ten in TENS), "millionth", "billionth"]  # than a tenth
NO_UNIT = frozenset(
    "is are was were be not no nor never wrong incorrect false invalid nope or and but if unless than more less fewer "
    "plus minus over off mod modulo factorial root power inverse reciprocal negative percent permille basis bc bce "
    "halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth "
    "tenths hundredth hundredths thousandth thousandths half maybe perhaps except without instead so because nothing "
    "none doubled tripled quadrupled halved bps to it percentage out remainder rem exponent "
    "too impossible quadrillion quintillion".split()
    + [part + ending for part in _SMALLER for ending in ("", "s")]
)  # words that say something else of the number than its unit
_OTHER_NUMBER = re.compile(
    r"(?:^(?!hundred(?![\w-]))|\b(?:of|times|below|above|under) |"
    rf"\b(?:in|by|to) (?!one (?!hundred|thousand|million)))(?:{'|'.join([*SMALL, *TENS, 'hundred', 'pi'])})(?![\w-])|"
    rf"\b(?:(?:multiplied|divided) by|raised to)\b|\bpoint (?:oh|{'|'.join([*SMALL, *TENS])})\b"
)  # 1 in six, 5 below zero, 5 divided by n, 3 point oh five
_BANKNOTES = re.compile(
    r"(?!\w+illion|thousand|hundred)\b\w+[ -](?:dollar|cent)s?[ -](bill|coin|note)"
)  # 20 five dollar bills are counted
_IN = Fraction(254, 10000)
_SIZES: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "m meter metre": 1, "cm centimeter centimetre": Fraction(1, 100), "mm millimeter millimetre": Fraction(1, 1000),
        "km kilometer kilometre": 1000, "in inch inche": _IN, "ft foot feet": 12 * _IN, "yd yard": 36 * _IN,
        "mi mile": 63360 * _IN,
    },
    "time": {"s sec second": 1, "ms millisecond": Fraction(1, 1000), "min minute": 60, "h hr hour": 3600, "day": 86400,
             "wk week": 604800},
    "months": {"month": 1, "yr year": 12, "decade": 120},
    "mass": {"g gram": 1, "kg kilogram kilo": 1000, "mg milligram": Fraction(1, 1000)},
    "weight": {"oz ounce": 1, "lb pound": 16, "ton": 32000},
    "volume": {"tsp teaspoon": Fraction(1, 48), "tbsp tablespoon": Fraction(1, 16), "cup": 1, "pt pint": 2,
               "qt quart": 4, "gal gallon": 16},
    "energy": {"j joule": 1, "kj kilojoule": 1000},
    "power": {"w watt": 1, "kw kilowatt": 1000},
    "force": {"n newton": 1},
    "voltage": {"v volt": 1},
    "dollars": {"dollar usd buck": 1, "cent": Fraction(1, 100)},
    "euros": {"euro eur": 1},
    "sterling": {"sterling gbp": 1},
    "rupees": {"rupee inr rs": 1},
    "yen": {"yen jpy": 1},
    "yuan": {"yuan cny rmb": 1},
    "degrees": {"degree deg": 1},
    "radians": {"radian rad": 1},
}  # fmt: skip
_UNITS = {
    name: (Counter({dimension: 1}), Fraction(size))
    for dimension, sizes in _SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}  # the dimensions of each unit, and its size in the first unit of the dimension
for _name, _size in (("mph", 63360 * _IN / 3600), ("kph", Fraction(1000, 3600)), ("kmh", Fraction(1000, 3600))):
    _UNITS[_name] = Counter({"length": 1, "time": -1}), _size
_UNITS["acre"] = Counter({"length": 2}), 43560 * (12 * _IN) ** 2
for _name, _size in (("l liter litre", Fraction(1, 1000)), ("ml milliliter millilitre", Fraction(1, 10**6))):
    _UNITS |= dict.fromkeys(_name.split(), (Counter({"length": 3}), _size))
NAMES = frozenset(_UNITS)  # units that have a size, in the singular
_MARK = "\x01"  # put where a text or a sign of a unit began
_SIGNS = {"$": "dollars", "¢": "cents", "€": "euros", "£": "sterling", "¥": "yen", "₹": "rupees", "元": "yuan"}
_MONEY = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?:US)?\\?(?P<mark>[$€£¥₹])|(?:\\text\{\s*)?(?P<word>USD|EUR|GBP|INR|Rs)\.?(?![a-zA-Z])[\s}]*)"
    r"\s*(?P<amount>[-+]?[.\d\\](?:(?![,;]\s)[^$])*)|(?P<before>.*\d)\s*\\?(?P<last>[$¢€£¥₹元])"
)
_PRIMES = (
    (re.compile(r"(?<=\d)\s*(?:''|\")$"), _MARK + "inches prime"),
    (re.compile(r"(?<=\d)\s*'$"), _MARK + "feet prime"),
)
_FORMULA_THEN_TEXT = re.compile(rf"(?P<value>[^{_MARK}]*\S)\s*{_MARK}(?P<unit>.+)")
_NUMBER_THEN_WORDS = re.compile(r"(?P<value>[^a-zA-Z\\]*\d|.*\\[dt]?frac\s*\{\d+\}\s*\{\d+\}) (?P<unit>[a-zA-Z].*)")
_TOKENS = re.compile(r"[a-z]+|\^\{?-?\d+\}?|/")
_ANOTHER = re.compile(r"(?P<first>\D+?)(?:\s*,)?(?:\s+and)?\s+(?P<number>\d[\d.]*)\s+(?P<rest>\D.*)")


@dataclass(frozen=True)
class Unit:
    dimensions: frozenset[tuple[str, int]] = frozenset()  # the exponents of the dimensions of units that have a size
    counted: frozenset[str] = frozenset()  # the other words, in the singular

    @property
    def is_any(self) -> bool:
        return not self.dimensions and (not self.counted or bool({"unit", "th"} & self.counted))

    def fits(self, other: Unit) -> bool:
        """Whether values in these units can be equal."""
        if self.is_any or other.is_any:
            # 5'' may be no length, and a fifth 1/5
            return "th" in self.counted & other.counted or not {"prime", "spelled"} & (self.counted | other.counted)
        if self.dimensions or other.dimensions:  # 5 N m is no length, 5 m of rope is
            letters = [{word for word in unit.counted if len(word) == 1} for unit in (self, other)]
            return self.dimensions == other.dimensions and letters[0] == letters[1]
        return bool(self.counted & other.counted)


@dataclass(frozen=True)
class Measure:
    """A value and its unit, as they are written."""

    value: str
    multiplier: int  # 1000000 in 5 million
    size: Fraction  # the unit's, in the first unit of its dimension
    unit: Unit
    more: Measure | None = None  # 30 minutes in 1 hour 30 minutes


def measure(answer: str, *, letters: bool = False) -> Measure | None:
    """An answer's value and unit; None where it is not a value that a unit, or what is counted, follows. letters:
    whether a single letter outside of a text may be a unit: 5 m may be a product."""
    currency = ""
    if money := _MONEY.fullmatch(answer):
        answer = money["before"] or money["sign"] + money["amount"]
        currency = _SIGNS.get(money["mark"] or money["last"]) or money["word"].casefold()
    for prime, words in _PRIMES:
        answer = prime.sub(words, answer)
    answer = re.sub(r"(\\(?:text|mathrm)\s*\{[^{}]*)\^\{(-?\d)\}", r"\1^\2", answer)
    marked = TEXT.sub(lambda text: f"{_MARK}{text['words']} ", answer)
    marked = re.sub(r"\^\{?\\circ\}?|°", _MARK + "degrees ", marked)
    match = _FORMULA_THEN_TEXT.fullmatch(marked) or _NUMBER_THEN_WORDS.fullmatch(marked)
    if match is None and (letters or currency):
        match = re.fullmatch(r"(?P<value>[\d.,]+)(?P<unit>[a-zA-Z])", marked)
    if match is None:
        return _read(answer, "", currency) if currency else None
    if not re.search(r"[\da-z]", match["value"]):
        return None
    words = " ".join(match["unit"].replace(_MARK, " ").replace(r"\cdot", " ").split())
    if _MARK not in marked and not (letters and words in _UNITS) and not currency:
        first = re.match(r"[a-zA-Z]+", words)[0]  # one letter may be a variable
        if first in FUNCTIONS or (
            len(first) == 1 and not re.fullmatch(r"[a-z]+/[a-z]+(?:\^\{?\d\}?)?|h \d+ min", words)
        ):
            return None
    if "degrees" in words and not re.fullmatch(r"[-+\d.,/ ]+|.*\\[dt]?frac.*\d.*", match["value"]):
        return None  # \sin 30^\circ is a number
    value, more = match["value"].strip(), _ANOTHER.fullmatch(words)
    if value.endswith("/"):
        value, words = value[:-1].strip(), f"/ {words}"
    if more is not None:
        parts = _read(value, more["first"]), _read(more["number"], more["rest"])
        if None in parts or not parts[0].unit.dimensions or parts[0].unit != parts[1].unit:
            return None
        return Measure(value, parts[0].multiplier, parts[0].size, parts[0].unit, parts[1])
    return _read(value, words, currency)


def _read(value: str, words: str, currency: str = "") -> Measure | None:
    """The measure of a value and the words after it; None where they are no unit."""
    if words == "M":  # 5 M is 5 million, and 5 m five metres
        words = "million"
    words = re.sub(r"\bM(?=(?:[gmJWNV]|Hz|Pa|eV)\b)", "mega", words)  # 5 MW are not 5 mW
    text = _BANKNOTES.sub(r"\1", words.casefold().replace("²", "^2").replace("³", "^3").replace(".", ""))
    if _OTHER_NUMBER.search(text):
        return None
    text = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text)
    tokens = _TOKENS.findall(text)
    if len("".join(tokens)) != len(text.replace(" ", "")) or NO_UNIT & set(tokens) or not (tokens or currency):
        return None
    if tokens[:1] in (["squared"], ["cubed"]):  # of the number
        return None
    multiplier = 1
    while tokens and (factor := _MULTIPLIERS.get(tokens[0], _MULTIPLIERS.get(tokens[0].removesuffix("s")))):
        multiplier *= factor
        tokens.pop(0)
    if multiplier > 1 and multiplier % 100 == 0 and tokens and tokens[0] in {*SMALL, *TENS}:  # 5 hundred fifty
        return None
    tokens = [*currency.split(), *tokens]
    powers: list[tuple[str, int]] = []  # units that have a size, with their exponents
    counted, sign, power = set(), 1, 1
    for token in tokens:
        singular = token if token in _UNITS or len(token) < 3 else token.removesuffix("s")
        if token in ("/", "per"):
            sign = -1
        elif token in ("square", "sq", "cubic", "cu"):
            power = 2 if token.startswith("s") else 3
        elif token in ("squared", "cubed") or token.startswith("^"):
            if powers:
                exponent = {"squared": 2, "cubed": 3}.get(token) or int(token.strip("^{}"))
                powers[-1] = (powers[-1][0], exponent * sign)
        elif singular in _UNITS:
            powers.append((singular, sign * power))
            power = 1
        elif len(token) == 1 and token not in "ajwnvcf":  # joule, watt, newton, volt, and degrees
            return None
        elif token not in ("of", "a", "an", "the"):
            counted.add("th" if token in ("st", "nd", "rd") else singular)
    size, dimensions = Fraction(1), Counter()
    for name, exponent in powers:
        size *= _UNITS[name][1] ** exponent
        for dimension, times in _UNITS[name][0].items():
            dimensions[dimension] += times * exponent
    unit = Unit(frozenset(item for item in dimensions.items() if item[1]), frozenset(counted))
    return Measure(value, multiplier, size, unit)
