"""Whether two answers mean the same, through math-verify and sympy; what runs inside a verification worker.

It is imported by the workers alone: an answer can hang sympy or exhaust its memory (``rewards.workers`` bounds both).
Before math-verify sees a text, spellings that it misreads are put right: it takes ``0.\\overline{3}`` for 0, and
``1e-3`` for a product with e.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from math_verify import parse, verify

from nemo_edo.data.answers import clean_answer, simple_fraction

_REPEATING = re.compile(r"(?P<whole>\d*)\.(?P<head>\d*)\\(?:overline|bar|dot)\s*\{(?P<cycle>\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{(?P<words>[^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_ARTICLE = re.compile(r"^(?:an?|the) (?=\w\w)")
_FEWEST_LETTERS = 4
"""Of a text outside ``\\text{}`` that is taken for a word: xy and abc are products."""
_UNIT = re.compile(
    r"(?P<number>[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?) "
    r"(?:(?!sin|cos|tan|log|and|or\b|pi\b)[a-zA-Z]{2,}|[a-z]+/[a-z]+)\b[a-zA-Z0-9 /^]*"
)
_BASE = re.compile(r"(?P<digits>[0-9A-Z]+)_\{?(?P<base>\d+)\}?")
_BRACKETS = re.compile(r"(?P<opens>\(|\[|\\\{|)(?P<items>[^()\[\]]*?)(?P<closes>\)|\]|\\\}|)")
_KINDS = {(left, right): left + right for left in "([" for right in ")]"} | {("{", "}"): "{}", ("", ""): "{}"}
_ASSIGNED = re.compile(r"(?P<name>[a-zA-Z])\s*=(?P<value>[^=<>,;]+)")
_CLEARLY = 1e-5
"""Relative; math-verify takes numbers for equal that agree to six decimals."""
_WARM_UP = (
    r"\frac{1}{2}", r"-3\sqrt{2}+1", r"(1,2]", r"(-\infty,2)\cup[3,\infty)", r"\{1,2\}", "x^2+2x+1", "y=2x+3",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"2^{10}\cdot 3", r"\pi r^2", "1.5", r"90^\circ", r"\log_2 8", r"x\le 5",
    "3+4i", "(2,3),(4,5)", r"\binom{5}{2}", r"3\frac{1}{2}", r"\sin x", "f(x)=2x", r"e^{2\pi i}", r"\frac{x+1}{x-2}",
)  # fmt: skip


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Whether the answer means the gold one, and the answer's canonical form.

    Equal are texts that are the same once cleaned, words that differ in case or article alone, what math-verify holds
    to be equivalent, and what has one canonical form. So an answer that is not equal has another canonical form than
    the gold answer has, and another than the gold answer's own text. 50% is taken for 50 and for 1/2, as either may
    have been meant.
    """
    gold, answer = clean_answer(gold), clean_answer(answer)
    form = canonical(answer)
    if gold == answer or form in (gold, canonical(gold)):
        return True, form
    words = _words(gold)
    if words is not None:
        return words == _words(answer, fewest_letters=1), form
    if _BASE.fullmatch(gold) and _BASE.fullmatch(answer):
        return False, form
    assigned = _ASSIGNED.fullmatch(gold), _ASSIGNED.fullmatch(answer)
    if None not in assigned and assigned[0]["name"] == assigned[1]["name"]:  # solving both equations takes long
        return _equivalent(assigned[0]["value"], assigned[1]["value"]), form
    collections = _numbers_in_brackets(gold), _numbers_in_brackets(answer)
    if None not in collections and "." not in gold + answer and collections[0][0] == collections[1][0]:
        return False, form
    percents = gold.endswith("%"), answer.endswith("%")
    if any(percents):
        same = any(_equivalent(gold.removesuffix("%"), text) for text in _percent_readings(answer, percents))
        return same, form
    return _equivalent(gold, answer), form


def canonical(answer: str) -> str:
    """One spelling for many: of numbers, sets and intervals their value, of expressions their expansion, of words the
    words in small letters. A text that is none of these stays as it is, cleaned.

    Two answers of one canonical form mean the same; the opposite does not hold (identities that take more than
    expansion are not seen).
    """
    answer = clean_answer(answer)
    number, words, base = simple_fraction(answer), _words(answer), _BASE.fullmatch(answer)
    if number is not None:
        return str(number)
    if words is not None:
        return words
    if base is not None:
        return f"{base['digits']}_{base['base']}"
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
        return answer  # sympy has no value for it, or one of more digits than Python prints


def parses(answer: str) -> bool:
    """Whether an answer can be compared as more than a text: math-verify reads it, or it is made of words."""
    answer = clean_answer(answer).removesuffix("%")
    return _words(answer) is not None or any(not isinstance(found, str) for found in _parsed(answer))


def warm_up() -> None:
    """The parser's first sentences take a hundred times as long as its later ones."""
    logging.disable(logging.WARNING)  # math-verify warns that it has no timeout of its own: the workers have one
    for text in _WARM_UP:
        canonical(text)
    compare("2x+1", "1+2x")


def _equivalent(gold: str, answer: str) -> bool:
    if _differ_at_a_point(_parsed(gold), _parsed(answer)):
        return False
    return verify(_parsed(gold), _parsed(answer), allow_set_relation_comp=True, timeout_seconds=None)


def _differ_at_a_point(gold: list, answer: list) -> bool:
    """Whether two expressions have clearly different values where their variables have arbitrary ones: most wrong
    answers do, and are spared ``simplify``. False where it cannot be told."""
    if not gold or not answer or not all(isinstance(one[0], sympy.Expr) for one in (gold, answer)):
        return False
    if any(isinstance(one[0], sympy.Symbol) for one in (gold, answer)):
        return False  # a word may be parsed as one symbol or as a product of many
    symbols = sorted(gold[0].free_symbols | answer[0].free_symbols, key=str)
    point = {symbol: sympy.Float(0.6180339 + 0.3141592 * number) for number, symbol in enumerate(symbols)}
    try:
        first, second = (complex(one[0].evalf(subs=point)) for one in (gold, answer))
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError, NotImplementedError):
        return False
    return abs(first - second) > _CLEARLY * (1 + abs(first))


def _numbers_in_brackets(answer: str) -> str | None:
    """The spelling of ``(1, 2)``, ``[1,2)`` and the like, or of a set or list (both in order), of plain numbers and
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


def _percent_readings(answer: str, percents: tuple[bool, bool]) -> list[str]:
    """What an answer can mean beside a gold answer's number, where one of the two, or both, has a percent sign."""
    number = answer.removesuffix("%")
    if all(percents):
        return [number]
    return [number, rf"\frac{{{number}}}{{100}}" if percents[1] else rf"100({number})"]


@lru_cache(maxsize=256)
def _parsed(answer: str) -> list:
    """What math-verify reads in the text; strings are what it could not read."""
    text = _REPEATING.sub(_fraction, answer.replace(r"\varnothing", r"\emptyset").replace("°", r"^\circ"))
    text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
    unit = _UNIT.fullmatch(_TEXT.sub(lambda text: text["words"], text))
    return parse(f"${unit['number'] if unit else text}$", parsing_timeout=None)


def _fraction(number: re.Match[str]) -> str:
    """0.1\\overline{6} as \\frac{1}{6}."""
    whole, head, cycle = number["whole"] or "0", number["head"], number["cycle"]
    repeated = Fraction(int(whole + head + cycle) - int(whole + head), 10 ** len(head) * (10 ** len(cycle) - 1))
    return rf"\frac{{{repeated.numerator}}}{{{repeated.denominator}}}"


def _words(answer: str, fewest_letters: int = _FEWEST_LETTERS) -> str | None:
    """The words of an answer without mathematics, in small letters, its article left out; None for any other answer.

    Outside ``\\text{}``, fewer than ``fewest_letters`` make no word.
    """
    plain = _TEXT.sub(lambda text: text["words"], answer).strip()
    if not _WORDS.fullmatch(plain):
        return None
    if plain == answer and sum(character.isalpha() for character in plain) < fewest_letters:
        return None
    return _ARTICLE.sub("", " ".join(plain.rstrip(".").casefold().split()))
