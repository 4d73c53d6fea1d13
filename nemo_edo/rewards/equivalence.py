"""Whether two answers are equivalent, by math-verify and sympy.

Only worker processes import it: an answer can hang sympy or exhaust the memory (``rewards.workers`` limits both).
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from math_verify import verify

from nemo_edo.data.answers import simple_fraction
from nemo_edo.rewards.spelling import respelled
from nemo_edo.rewards.units import FUNCTIONS, TEXT, Quantity, comparable, no_unit, quantity, ratio

_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_ARTICLE = re.compile(r"^(?:an?|the) (?=\w\w)")
_FEWEST_LETTERS = 4
"""Of a word outside ``\\text{}``: xy and abc are products."""
_BASE = re.compile(r"(?P<digits>[0-9A-Z]+)_\{?(?P<base>\d+)\}?")
_ORDERED, _SET = re.compile(r"[(\[].*,.*[)\]]"), re.compile(r"\\\{.*,.*\\\}")
_PERCENT = re.compile(r"\s*(?:\\text\{\s*per ?cent\s*\}|\bper ?cent)$")
_PLAIN_WORD, _LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}"), re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_MISREAD = re.compile(
    r"\.\.|\d\s*'|(?<![\w.\\])\d+(?:\.\d+)? \d|\d\s*\^\{?[*T]\}?$|\\[lc]?dots|\\Pi(?![a-zA-Z])|\\mod(?![a-zA-Z])"
)
"""What the parser takes for something else: 5' for 5, 3 4 for 7."""
_INDEX_OF_A_NUMBER = re.compile(
    r"(?<![\w}])(?P<digits>\d+)(?P<escape>\\?)_(?:\{(?P<long>[^{}]*)\}|(?P<short>.?))(?P<another>\\?_?)"
)
_NAME_HAS_NO = re.compile(r"[\d+*/^-]|\\(?:[dt]?frac|cdot|times|sqrt)")
_ARGUMENTS = re.compile(r"\([^()]*\)|_\{[^{}]*\}|_\w")
_BRACKETS = re.compile(r"(?P<opens>\(|\[|\\\{|)(?P<items>[^()\[\]]*?)(?P<closes>\)|\]|\\\}|)")
_KINDS = {(left, right): left + right for left in "([" for right in ")]"} | {("{", "}"): "{}", ("", ""): "{}"}
_ASSIGNED = re.compile(r"(?P<name>[a-zA-Z])\s*=(?P<value>[^=<>,;]+)")
_NORMALIZED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
"""Spellings only: math-verify's own ``parse`` drops what it does not know, and takes 5 out of ``5 is wrong``."""
_CLEARLY = 1e-5
"""Relative difference; math-verify calls numbers equal that agree to six decimals."""
_WARM_UP = (
    r"\frac{1}{2}", r"-3\sqrt{2}+1", r"(1,2]", r"(-\infty,2)\cup[3,\infty)", r"\{1,2\}", "x^2+2x+1", "y=2x+3",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"2^{10}\cdot 3", r"\pi r^2", "1.5", r"90^\circ", r"\log_2 8", r"x\le 5",
    "3+4i", "(2,3),(4,5)", r"\binom{5}{2}", r"3\frac{1}{2}", r"\sin x", "f(x)=2x", r"e^{2\pi i}", r"\frac{x+1}{x-2}",
)  # fmt: skip


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Whether the answer is equivalent to the gold answer, and the answer's canonical form.

    Answers are equivalent if they are the same text once cleaned, the same words up to case and article, equivalent by
    math-verify, or have the same canonical form. So the canonical form of any other answer differs from the gold
    answer's, and from the gold answer's text. 50% is read as 50 and as 1/2, as either may be meant.
    """
    money = [" dollars" if r"\$" in text else "" for text in (gold, answer)]
    gold, answer = _cleaned(gold), _cleaned(answer)
    if ";" in answer and ";" not in gold:
        answer = answer.replace(";", ",")
    form = canonical(answer)
    if _without_markup(gold) == _without_markup(answer):
        return True, form
    words = _words(gold)
    if words is not None:
        return words == _words(answer, fewest_letters=1), form
    if not _is_legible(gold, answer):
        return False, answer
    meant, given = quantity(gold, letters=True), quantity(answer, letters=True)
    if meant is None or given is None:
        meant, given = (
            quantity(text) or quantity(text + unit) for text, unit in zip((gold, answer), money, strict=True)
        )
    if meant is not None or given is not None:
        if any(
            text.endswith("%") and one is not None and not one.unit.is_any
            for text, one in ((gold, given), (answer, meant))
        ):  # 50 cents are not 50%
            return False, form
        return _same_quantity(meant or no_unit(gold), given or no_unit(answer)), form
    return _same(gold, answer, form), form


def _same(gold: str, answer: str, form: str) -> bool:
    """``compare``, of answers without units."""
    if form in (gold, canonical(gold)):
        return True
    bases = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if all(bases):
        return False
    if bases[0]:  # a question that names a base may have an answer that does not
        return compare(bases[0]["digits"], answer)[0]
    if bases[1] and (number := _in_base(bases[1])) is not None:
        return compare(gold, str(number))[0]
    if simple_fraction(gold) is not None and (_ORDERED.fullmatch(answer) or _numbers_in_brackets(answer) is not None):
        return False  # 5,5 is no list of one number: it may be 5.5
    if (_ORDERED.fullmatch(gold) and _SET.fullmatch(answer)) or (_SET.fullmatch(gold) and _ORDERED.fullmatch(answer)):
        return False
    assigned = _ASSIGNED.fullmatch(gold), _ASSIGNED.fullmatch(answer)
    if None not in assigned and assigned[0]["name"] == assigned[1]["name"]:  # solving both equations takes long
        return _equivalent(assigned[0]["value"], assigned[1]["value"])
    collections = _numbers_in_brackets(gold), _numbers_in_brackets(answer)
    if None not in collections and "." not in gold + answer and collections[0][0] == collections[1][0]:
        return False
    if collections[0] is not None and collections[0].startswith("{") and _is_no_list(answer):
        return False
    percents = gold.endswith("%"), answer.endswith("%")
    if any(percents):
        return any(_equivalent(gold.removesuffix("%"), text) for text in _percent_readings(gold, answer, percents))
    return _equivalent(gold, answer)


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    factor = ratio(answer, gold)
    if not comparable(gold.unit, answer.unit):
        return False
    return compare(gold.value, _scaled(answer.value, factor))[0]


def _scaled(value: str, factor: Fraction) -> str:
    if factor == 1:
        return value
    number = simple_fraction(value)
    if number is not None:
        return str(number * factor)
    return rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}({value})"


def _in_base(number: re.Match[str]) -> int | None:
    """The value of 1010_2; None for what is no number in that base."""
    try:
        return int(number["digits"], int(number["base"]))
    except ValueError:
        return None


def canonical(answer: str) -> str:
    """One spelling for many: the value of numbers, sets and intervals, the expansion of expressions, and words in lower
    case. Any other text is only cleaned.

    Answers with the same canonical form are equivalent; the converse does not hold (identities beyond expansion are
    not found).
    """
    answer = _cleaned(answer)
    number, words, base = simple_fraction(answer), _words(answer), _BASE.fullmatch(answer)
    if number is not None:
        return str(number)
    if words is not None:
        return words
    if base is not None:
        return f"{base['digits']}_{base['base']}"
    measured = quantity(answer)
    if measured is not None:
        value = canonical(_scaled(measured.value, Fraction(measured.multiplier)))
        return value if measured.unit.is_any else f"{value} {measured.words}"
    if not _is_legible("", answer):
        return answer
    collection, assigned = _numbers_in_brackets(answer), _ASSIGNED.fullmatch(answer)
    if collection is not None:
        return collection
    if assigned is not None:
        return f"{assigned['name']} = {canonical(assigned['value'])}"
    if answer.endswith("%") and answer != "%":
        return canonical(rf"\frac{{{answer.removesuffix('%')}}}{{100}}")
    parsed = _parsed(answer)
    if not parsed or isinstance(parsed[0], str):
        return answer
    try:
        value = parsed[0].doit()
        value = value.xreplace({number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)})
        return str(sympy.expand(value) if isinstance(value, sympy.Expr) else value)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, NotImplementedError):
        return answer  # sympy has no value for it, or one with more digits than Python prints


def parses(answer: str) -> bool:
    """Whether an answer can be compared as more than a text: math-verify parses it, or it consists of words."""
    answer = _cleaned(answer).removesuffix("%")
    return _words(answer) is not None or any(not isinstance(found, str) for found in _parsed(answer))


def warm_up() -> None:
    """Parses some texts: the parser's first calls take a hundred times as long as later ones."""
    logging.disable(logging.WARNING)  # math-verify warns that it has no timeout: the workers have one
    for text in _WARM_UP:
        canonical(text)
    compare("2x+1", "1+2x")


def _cleaned(answer: str) -> str:
    return _PERCENT.sub("%", respelled(answer))


def _without_markup(answer: str) -> str:
    return " ".join(TEXT.sub(lambda text: f" {text['words']} ", answer).split())


def _is_legible(gold: str, answer: str) -> bool:
    """Whether an answer may be compared with the gold answer by what the parser reads in it."""
    if _MISREAD.search(answer) and not _MISREAD.search(gold):
        return False
    if _has_prose(gold, answer):
        return False
    return all(map(_is_base, _INDEX_OF_A_NUMBER.finditer(answer))) and _equations_hold(gold, answer)


def _has_prose(gold: str, answer: str) -> bool:
    """Whether there are words that are neither a unit, nor mathematics, nor in the gold answer too. The parser takes
    them for a product of variables, and 0 times any product is 0."""
    if quantity(answer) is not None:
        return False
    said = answer.rpartition("=")[2] if answer.count("=") == 1 else answer  # without the name of what it is
    texts = [text["words"] for text in TEXT.finditer(said)]
    if not _LETTER.search(gold):
        texts.append(TEXT.sub(" ", said))
    known = {*FUNCTIONS, *_PLAIN_WORD.findall(_without_markup(gold))}
    return any(word not in known for text in texts for word in _PLAIN_WORD.findall(text))


def _is_base(number: re.Match[str]) -> bool:
    """Whether 12_8 is a number in base 8; 12_1, 12_x and 19_8 are not."""
    base = number["long"] or number["short"]
    if number["escape"] or number["another"]:
        return False
    return base.isdigit() and 2 <= int(base) <= 36 and all(int(digit) < int(base) for digit in number["digits"])


def _equations_hold(gold: str, answer: str) -> bool:
    """Whether what an answer says to be equal is: 2+2=5 is not, and 2x=5 does not state the value of x."""
    for equation in re.split(r"[,;]|\\text\{\s*(?:and|or)\s*\}", answer):
        *sides, value = re.split(r"(?<![<>!:\\])=", equation)
        for side in map(str.strip, sides):
            if not side or not _NAME_HAS_NO.search(_ARGUMENTS.sub("", side)):
                continue  # the name of what the answer is
            count = _count_symbols(side)
            if count == 0 and not _count_symbols(value) and not _equivalent(value, side):
                return False
            if count == 1 and "=" not in gold and not _count_symbols(value):
                return False
    return True


def _count_symbols(text: str) -> int:
    """How many variables a formula has; 2, which is any number, where it is none."""
    parsed = _parsed(text)
    return len(parsed[0].free_symbols) if parsed and isinstance(parsed[0], sympy.Expr) else 2


def _equivalent(gold: str, answer: str) -> bool:
    if _differ_at_a_point(_parsed(gold), _parsed(answer)):
        return False
    return verify(_parsed(gold), _parsed(answer), allow_set_relation_comp=True, timeout_seconds=None)


def _differ_at_a_point(gold: list, answer: list) -> bool:
    """Whether two expressions clearly differ at an arbitrary point: most wrong answers do, which saves ``simplify``.
    False where the values cannot be computed."""
    if not gold or not answer or not all(isinstance(one[0], sympy.Expr) for one in (gold, answer)):
        return False
    if any(isinstance(one[0], sympy.Symbol) for one in (gold, answer)):
        return False  # a word may be parsed as one symbol or as a product of many
    symbols = sorted(gold[0].free_symbols | answer[0].free_symbols, key=str)
    exact = [] if symbols else [one[0].doit() for one in (gold, answer)]
    if exact and all(isinstance(value, sympy.Rational) for value in exact):
        return exact[0] != exact[1]  # 1/2004! and 1/2006! agree to many decimals
    point = {symbol: sympy.Float(0.6180339 + 0.3141592 * number) for number, symbol in enumerate(symbols)}
    try:
        first, second = (complex(one[0].evalf(subs=point)) for one in (gold, answer))
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError, NotImplementedError):
        return False
    return abs(first - second) > _CLEARLY * (1 + abs(first))


def _numbers_in_brackets(answer: str) -> str | None:
    """The canonical form of ``(1, 2)``, ``[1,2)`` and the like, or of a set or list (both sorted), of numbers and
    fractions; None for other texts. The parser takes twenty times as long for these as for a formula."""
    match = _BRACKETS.fullmatch(answer)
    kind = match and _KINDS.get((match["opens"][-1:], match["closes"][-1:]))
    if kind is None:
        return None
    numbers = [simple_fraction(item) for item in match["items"].split(",")]
    if len(numbers) < 2 or None in numbers:
        return None
    if kind == "{}":
        numbers = sorted(set(numbers))
    return kind[0] + ", ".join(map(str, numbers)) + kind[1]


def _is_no_list(answer: str) -> bool:
    """Whether it is an inequality, an interval, or several sets, which a parser may take for a set of their numbers."""
    several = answer.count(r"\{") > 1 and r"\cup" not in answer
    return several or re.search(r"[<>]|\\(?:leq?|geq?)(?![a-zA-Z])|\\in\s*[(\[]", answer) is not None


def _percent_readings(gold: str, answer: str, percents: tuple[bool, bool]) -> list[str]:
    """What an answer may mean where it, or the gold answer's number, or both have a percent sign. 25% may be meant by
    25, but 0.5% by 1/2 is not."""
    number = answer.removesuffix("%")
    if all(percents):
        return [number]
    value = simple_fraction(gold)
    if percents[1] and (value is None or abs(value) < 1):
        return [rf"\frac{{{number}}}{{100}}"]
    return [number, rf"\frac{{{number}}}{{100}}" if percents[1] else rf"100({number})"]


@lru_cache(maxsize=256)
def _parsed(answer: str) -> list:
    """What all of the text means to math-verify's parser; empty where it cannot read all of it."""
    text = answer.replace(r"\varnothing", r"\emptyset").replace("°", r"^\circ")
    try:
        return [latex2sympy(text, normalization_config=_NORMALIZED)]
    except MemoryError:
        raise
    except Exception:  # its parser and sympy raise any type
        return []


def _words(answer: str, fewest_letters: int = _FEWEST_LETTERS) -> str | None:
    """The words of an answer without mathematics, in lower case and without article; None for any other answer.

    Outside ``\\text{}``, fewer than ``fewest_letters`` letters are not a word.
    """
    plain = TEXT.sub(lambda text: text["words"], answer).strip()
    if not _WORDS.fullmatch(plain):
        return None
    if plain == answer and sum(character.isalpha() for character in plain) < fewest_letters:
        return None
    return _ARTICLE.sub("", " ".join(plain.rstrip(".").casefold().split()))
