r"""What an answer means: a number, a collection, a set of numbers, an equation, a ratio, a time, or a text. ``read``
takes structure apart by itself (names, lists, brackets, inequalities, units) and gives math-verify's LaTeX parser
single formulas only: given a whole answer, the parser takes 5 out of ``5 is wrong``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.logic.boolalg import Boolean

from nemo_edo.data.answers import simple_fraction
from nemo_edo.data.units import FUNCTIONS, NAMES, TEXT, Measure, Unit, measure
from nemo_edo.rewards.spelling import number_in_words

_NORMALIZED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CASES = ConversionConfig(lowercase_symbols=False)
_MISREAD = re.compile(
    r"\.\.|\d\s*'|(?<![\w.\\])\d+(?:\.\d+)? \d|\d\s*\^\{?[*T]\}?$|\\[lc]?dots|\\Pi(?![a-zA-Z])|\\mod(?![a-zA-Z])|%|,|;|"
    r"\\(?:angle|triangle)(?![a-zA-Z])"
)  # what the parser takes for something else in a formula: 5' for 5, 3 4 for 7
_INDEX_OF_A_NUMBER = re.compile(r"(?<![\w}])\d+\\?_")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(?P<angle>\d+(?:\.\d+)?)\s*(?:\^\{?\\circ\}?|°)")
_BASE = re.compile(r"\(?(?P<digits>[0-9A-Za-z]+)\)?_\{?(?P<base>\d+)\}?")
_NO_NAME = re.compile(r"[\d+*/^<>%,-]|\\(?:[dt]?frac|cdot|times|sqrt|pm|infty|pi(?![a-zA-Z]))|^$")
_ARGUMENTS = re.compile(r"(?:\^\{-1\})?\([^()=]*\)|_\{[^{}]*\}|_\w|\\text\{[^{}]*\}(?=.)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9' .,-]*")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")
_CHOICE = re.compile(
    r"(?i:(?:the )?(?:correct |right |final )?(?:option|choice|letter|answer)(?: is)?:?\s+){0,2}"
    r"(?:\((?P<closed>[A-Ja-j])\)|(?P<letter>[A-J](?=$|[.:)])|[a-j](?=[.)])))"
    r"(?P<rest>.*)"
)
_NOT_A_CHOICE = re.compile(
    r"\b(?:[A-J]|is|are|was|were|be|not?|nor|never|none|nothing|nope|wrong|incorrect|false|invalid|and|or|but|if|"
    r"unless|maybe|perhaps|except|without|instead|because)\b|[=+*/^<>_]|^\s*[,(]"
)  # a letter, and words that say something else of it than what the choice is
_BOUNDS = {"<": sympy.Lt, r"\le": sympy.Le, ">": sympy.Gt, r"\ge": sympy.Ge, r"\ne": sympy.Ne}
_BOUND = re.compile(r"<=|>=|[<>]|\\(?:le|ge)(?:q|qslant)?(?![a-zA-Z])|\\neq?(?![a-zA-Z])")
_AND, _OR = r"\\text\{\s*and\s*\}|\band\b|\\land(?![a-zA-Z])", r"\\text\{\s*or\s*\}|\bor\b|\\lor(?![a-zA-Z])"
_PLUS_MINUS, _MINUS_PLUS = r"\\pm(?![a-zA-Z])", r"\\mp(?![a-zA-Z])"
_MEANINGS = tuple((re.compile(pattern), meaning) for pattern, meaning in (
    (r"(?:there (?:is|are) )?no (?:real )?(?:solution|value|root)s?(?: exists?)?|(?:the )?empty set", r"\emptyset"),
    (r"all real numbers|all reals|any real number", r"\mathbb{R}"),
    (r"(?:positive )?infinity|infinitely many(?: solutions)?|infinite", r"\infty"),
    (r"(?:negative|minus) infinity", r"-\infty"),
    (r"(?:limit )?does not exist", r"\text{dne}"),
))  # fmt: skip
"""Words for a formula."""
_OF_ORDER = re.compile(  # a third acre, an eighth note
    r"an? (?!half|quarter (?!note|turn|past|pounder|way|final|back|to\b))\w+[ -](\w+)"
)
_MEASURES = NAMES | set("of a as the square sq cubic cu foot feet percent".split())
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_BUILDER = re.compile(r"[a-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\\vert|[:|])(?P<rest>.*)")  # x : x < 2
_VERDICT = re.compile(r"(?P<verdict>yes|no|true|false)(?:, [^0-9]*)?")


@dataclass(frozen=True)
class Text:
    words: str  # in lower case, without article; of a choice, its letter
    is_choice: bool = False
    rest: str = ""  # what follows the letter of a choice


@dataclass(frozen=True)
class Time:
    shown: int  # Seconds of the day, without am and pm
    since_midnight: int | None  # None where it may be in the morning or in the afternoon


@dataclass(frozen=True)
class Number:
    text: str
    value: sympy.Expr | sympy.MatrixBase
    unit: Unit = Unit()
    size: Fraction = Fraction(1)  # the unit's, in the first unit of its dimension
    percent: str = ""  # %, or percent in words, which never means the number itself
    digits: str = ""  # its digits in another base than ten, if it has them


@dataclass(frozen=True)
class Items:
    """Several values: a tuple, a set, a list, a ratio, or the range ``2 to 3``."""

    brackets: str  # none for a list, which may be a tuple or a set; ``::`` for a ratio, ``to`` for a range
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Named:
    """An equation: a name, or another formula, and its value."""

    name: str
    value: Value
    formula: sympy.Expr | None = None  # the left side where it is no name


Region: TypeAlias = sympy.Set | Boolean
"""A set of numbers: an interval, a union, or what an inequality says; a condition where it is one of several variables.
"""
Value: TypeAlias = Text | Time | Number | Items | Region | Named


@lru_cache(maxsize=512)
def read(text: str, *, letters: bool = False) -> Value | None:
    """The value of a respelled answer; None without a meaning as a whole. letters: whether ``5 m`` may have a unit."""
    text = text.strip()
    if not text:
        return None
    number = None if "$" in text else simple_fraction(text)
    if number is not None:
        return Number(text, sympy.Rational(number))
    for reader in (_text, _time, _percent, _measured, _list, _member, _set, _relation, _equation, _ratio, _in_base):
        value = reader(text, letters)
        if value is not None:
            return None if value is _NOTHING else value
    parsed = _parsed(text)
    return formula(text) or (parsed if isinstance(parsed, Region) else None)


NO_SOLUTION = Text("no solution")
_NOTHING = Text("")  # read by a reader that knows the kind of the answer, but not its value


def plain(text: str) -> str:
    """The text without the markup of words."""
    return " ".join(TEXT.sub(lambda match: f" {match['words']} ", text).split())


def formula(text: str) -> Number | None:
    """The number, expression or matrix that all of the text is."""
    parsed = _parsed(text)
    return Number(text, parsed) if isinstance(parsed, sympy.Expr | sympy.MatrixBase) else None


@lru_cache(maxsize=512)
def _parsed(text: str) -> sympy.Basic | None:
    shown = _DEGREES.sub(r"{\\frac{\g<angle> \\pi}{180}}", text) if _ANGLE_FUNCTION.search(text) else text
    if _MISREAD.search(re.sub(r"\\(?:binom|begin\{\w*matrix\}).*|\([^()]*,[^()]*\)", "", shown)):
        return None
    if _INDEX_OF_A_NUMBER.search(shown) or TEXT.search(re.sub(r"\\math(?:rm|bf)\{\w\}", "", shown)):
        return None
    try:
        parsed = latex2sympy(shown, conversion_config=_CASES, normalization_config=_NORMALIZED)
        known = {symbol: {"i": sympy.I, "e": sympy.E}[symbol.name] for symbol in parsed.free_symbols
                 if symbol.name in ("i", "e")}  # fmt: skip
        decimals = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
        return parsed.xreplace({**known, **decimals})
    except MemoryError:
        raise
    except Exception:  # the parser and sympy raise any type
        return None


def _depths(text: str) -> list[int]:
    """How many brackets are open before each character, and at the end."""
    return list(accumulate(((one in "([{") - (one in ")]}") for one in text), initial=0))


def _split(text: str, separator: str) -> list[str]:
    """The parts of a text between matches of a regular expression outside of all brackets."""
    depths, parts, start = _depths(text), [], 0
    for match in re.finditer(separator, text):
        if depths[match.start()] == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _is_name(text: str) -> bool:
    """Whether it names what an answer is: x, f(x), a_{10}, AB, \\text{Area}."""
    return not _NO_NAME.search(_ARGUMENTS.sub("", text)) or re.fullmatch(r"\([a-z](?:,\s*[a-z])+\)", text) is not None


# --- one reader for each kind: the value, None (try the next), or _NOTHING --------------------------------------------


def _text(text: str, letters: bool) -> Value | None:
    said = plain(text).rstrip(".")
    choice = _CHOICE.fullmatch(said)
    if choice is not None and not _NOT_A_CHOICE.search(choice["rest"]):
        rest = " ".join(choice["rest"].strip(" .:)").split())
        return Text((choice["closed"] or choice["letter"]).upper(), True, rest)
    words = " ".join(re.sub(r"^(?:an?|the) (?=\w\w)", "", said.casefold()).split())
    for pattern, meaning in _MEANINGS:
        if pattern.fullmatch(words):
            return read(meaning)
    counted = _OF_ORDER.match(said.casefold())
    is_ordinal = counted is not None and counted[1].removesuffix("s") not in _MEASURES  # an eighth note is no eighth
    number = None if is_ordinal else number_in_words(" ".join(said.casefold().split()))
    if number := number or number_in_words(words):
        return read(" ".join(filter(None, number)))
    ordinal = re.fullmatch(r"(\d+)\s*(?:\^\{?)?\s*(?:st|nd|rd|th)\s*\}?", words)
    if ordinal or words in _ORDINALS:
        digits = ordinal[1] if ordinal else str(_ORDINALS.index(words) + 1)
        return Number(digits, sympy.Integer(digits), Unit(counted=frozenset({"th"} if ordinal else {"th", "spelled"})))
    if verdict := _VERDICT.fullmatch(words):
        return Text(verdict["verdict"])
    is_marked = TEXT.fullmatch(text) is not None
    if is_marked and said[:1].isdigit():
        return _NOTHING if (value := read(said)) is None else value
    if (
        not _WORDS.fullmatch(said)
        or re.search(r"\d to \d", said)
        or not (is_marked or (_LONG_WORD.search(said) and said.split()[0] not in FUNCTIONS))
    ):
        return None
    if is_marked and len(words) == 1:
        return formula(said)
    return Text(re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", words))


def _time(text: str, letters: bool) -> Value | None:
    said = plain(text).replace(".", "").casefold()
    match = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(am|pm|o'clock)?", said)
    if match is None or not (match[2] or match[4]):
        return None
    hour, rest = int(match[1]), 60 * int(match[2] or 0) + int(match[3] or 0)
    if match[4] in ("am", "pm"):
        day_hour = hour % 12 + 12 * (match[4] == "pm")
    else:
        day_hour = hour if not 1 <= hour <= 12 else None
    return Time(3600 * hour + rest, None if day_hour is None else 3600 * day_hour + rest)


def _measured(text: str, letters: bool) -> Value | None:
    found = None if re.search("[=<>]", text) else measure(text, letters=letters)
    if found is None:
        return None
    return _NOTHING if found.value.endswith("%") else _measured_number(found) or _NOTHING


def _measured_number(found: Measure) -> Number | None:
    number = read(found.value)
    if not isinstance(number, Number):
        return None
    value = number.value * found.multiplier
    if found.more is not None:  # 1 hour 30 minutes
        more = _measured_number(found.more)
        if more is None:
            return None
        value += more.value * sympy.Rational(more.size / found.size)
    return Number(found.value, value, found.unit, found.size)


def _list(text: str, letters: bool) -> Value | None:
    if re.search(_PLUS_MINUS, text):
        both = [re.sub(_MINUS_PLUS, other, re.sub(_PLUS_MINUS, sign, text)) for sign, other in ("+-", "-+")]
        values = [read(one.removeprefix("+")) for one in both]
        return Items("", tuple(values)) if None not in values else None
    for connective, combine in ((_OR, sympy.Union), (f"{_AND}|,", sympy.Intersection)):
        regions = [read(part) for part in _split(text, connective) if part != text]
        if regions and all(isinstance(part, Named) and isinstance(part.value, Region) for part in regions):
            return Named(regions[0].name, combine(*(part.value for part in regions)))
    parts = [part for part in _split(text, f"[,;]|{_AND}|{_OR}") if part.strip()]
    if len(parts) < 2:
        return None
    values = [read(part) for part in parts]
    if None in values or re.search(r",\s*$", text):
        return _NOTHING
    if isinstance(values[0], Named):  # x = 1, 2
        values = [one if isinstance(one, Named) else Named(values[0].name, one) for one in values]
    return Items("", tuple(values))


def _member(text: str, letters: bool) -> Value | None:
    name, is_member, rest = (
        part.strip() for part in re.sub(r"\\in(?![a-zA-Z])", "\x01", text, count=1).partition("\x01")
    )
    if not is_member or "{" in name:
        return None
    value = read(rest)
    return Named(_bare(name), value) if _is_name(name) and value is not None else _NOTHING


def _set(text: str, letters: bool) -> Value | None:
    if text in (r"\emptyset", r"\varnothing"):
        return NO_SOLUTION
    if text == r"\mathbb{R}":
        return sympy.S.Reals
    unions = _split(text, r"\\cup(?![a-zA-Z])")
    if len(unions) > 1:
        parts = [read(part) for part in unions]
        if all(isinstance(part, Items) and part.brackets == "{}" for part in parts):
            return Items("{}", tuple(item for part in parts for item in part.items))
        regions = [region(part) for part in parts]
        return _NOTHING if None in regions else sympy.Union(*regions)
    match = re.fullmatch(r"(?P<opens>\\\{|[(\[])(?P<inside>.*?)(?P<closes>\\\}|[)\]])", text)
    if match is None or min(_depths(text)[2:-1]) < 1:
        return None
    brackets = match["opens"][-1] + match["closes"][-1]
    inside = match["inside"].strip()
    if brackets == "{}":
        if not inside:
            return NO_SOLUTION
        if condition := _BUILDER.fullmatch(inside):
            return _NOTHING if (value := read(condition["rest"])) is None else value
    parts = _split(inside, "[,;]")
    if len(parts) == 1 and (brackets == "()" or inside.startswith(r"\begin")):
        return read(inside)
    values = tuple(read(part) for part in parts)
    return _NOTHING if None in values or ("{" in brackets and brackets != "{}") else Items(brackets, values)


def region(value: Value | None) -> Region | None:
    """The interval that ``[1, 2)`` may be meant as, or the region that a value is."""
    if isinstance(value, Region):
        return value
    if not isinstance(value, Items) or value.brackets in ("", "{}", "::") or len(value.items) != 2:
        return None
    low, high = (end.value if isinstance(end, Number) else None for end in value.items)
    if not all(getattr(end, "is_extended_real", False) and not end.free_symbols for end in (low, high)):
        return None
    return sympy.Interval(low, high, value.brackets[0] == "(", value.brackets[1] == ")") if low < high else None


def _relation(text: str, letters: bool) -> Value | None:
    signs = [re.sub("q.*", "", sign.replace("<=", r"\le").replace(">=", r"\ge")) for sign in _BOUND.findall(text)]
    if not signs:
        return None
    sides = [formula(side.strip()) for side in _BOUND.split(text)]
    if None in sides or len(signs) > 2:
        return _NOTHING
    symbols = sorted({symbol for side in sides for symbol in side.value.free_symbols}, key=str)
    real = {symbol: sympy.Symbol(symbol.name, real=True) for symbol in symbols}
    try:
        ends = [side.value.xreplace(real) for side in sides]
        holds = [_BOUNDS[sign](*pair) for sign, pair in zip(signs, pairwise(ends), strict=True)]
        if len(symbols) > 1:
            return sympy.And(*holds)
        numbers = sympy.Intersection(*(one.as_set() for one in holds))
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return _NOTHING
    return Named(symbols[0].name, numbers) if symbols else _NOTHING


def _bare(name: str) -> str:
    return re.sub(r"[\s{}]|\\(?:left|right|overline|angle)", "", plain(name))


def _equation(text: str, letters: bool) -> Value | None:
    sides = [side.strip() for side in _split(text, r"(?<![<>!:\\])=")]
    if len(sides) == 1:
        return None
    *firsts, last = sides
    if last in firsts:  # 5 = 5
        return _NOTHING
    if len(firsts) == 1 and _is_name(last) and not _is_name(firsts[0]):
        firsts, last = [last], firsts[0]  # 5 = x
    value = read(last, letters=letters)
    if value is None:
        return _NOTHING
    name = None
    for side in firsts:
        if _is_name(side):
            name = _bare(side)
            continue
        left = formula(side)
        if left is None or not isinstance(value, Number) or not isinstance(left.value, sympy.Expr):
            return _NOTHING
        if left.value.free_symbols or value.value.free_symbols:
            return Named(side, value, left.value) if len(firsts) == 1 else _NOTHING
        if not value.unit.is_any or sympy.N(left.value - value.value, 30) != 0:
            return _NOTHING  # 2 + 2 = 5
    return value if name is None else Named(name, value)


def _ratio(text: str, letters: bool) -> Value | None:
    said = plain(text).removeprefix("from ")
    is_range = re.search(r"\bto\b", said) is not None
    parts = [formula(part) for part in re.split(r"\bto\b" if is_range else ":", said)]
    if len(parts) == 1:
        return None
    return _NOTHING if None in parts else Items("to" if is_range else "::", tuple(parts))


def _in_base(text: str, letters: bool) -> Value | None:
    match = _BASE.fullmatch(text)
    if match is None or not match["digits"][0].isdigit():
        return None
    digits, base = match["digits"].upper(), int(match["base"])
    if not 2 <= base <= 36 or (len(digits) == 1 and base != 10):  # one digit needs no base
        return _NOTHING
    try:
        number = int(digits, base)
    except ValueError:
        return _NOTHING
    return Number(str(number), sympy.Integer(number), digits="" if base == 10 else digits)


def _percent(text: str, letters: bool) -> Value | None:
    spoken = re.sub(r"\s*(?:\\text\{\s*per ?cent\s*\}|\bper ?cent)$", "%", text)
    if not spoken.endswith("%") or spoken == "%":
        return None
    number = formula(spoken[:-1].strip())
    percent = "%" if spoken == text else "percent"
    return _NOTHING if number is None else Number(number.text, number.value, percent=percent)
