"""Whether two answers are equivalent: both are respelled, read, and compared by their kind. Only worker processes
import it: an answer can hang sympy or exhaust the memory (``utils.worker_pool`` limits both)."""

import logging
import re
import string
from collections.abc import Sequence

import sympy
from math_verify import verify

from nemo_edo.data.units import FUNCTIONS
from nemo_edo.rewards.answer_values import (
    NO_SOLUTION,
    Items,
    Named,
    Number,
    Region,
    Text,
    Time,
    Value,
    plain,
    read,
    region,
)
from nemo_edo.rewards.spelling import respelled

_DIGITS = 40  # decimals of numbers that are compared; they are equal where three quarters of these agree
_POINTS = ((0.6180339, 0.3141592), (2.2360679, 0.1414213), (-1.7320508, -0.2718281))
"""The first and the last variable's value, with steps in between."""
_ROUNDED = re.compile(r"-?\d*\.\d+")
_FEWEST_DIGITS = 6  # of a decimal that may stand for 1/3 or a root
_VARIABLE = re.compile(r"(?<![a-zA-Z])[a-df-hj-zA-Z](?![a-zA-Z])")
_BOUND = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_RUN, _COMMAND = re.compile(r"[a-zA-Z]{2,}"), re.compile(r"\\(?:(?:begin|end)\{\w+\}|[a-zA-Z]+)")
_WARM_UP = (
    r"\frac{1}{2}", r"-3\sqrt{2}+1", r"(1,2]", r"(-\infty,2)\cup[3,\infty)", r"\{1,2\}", "x^2+2x+1", "y=2x+3",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"2^{10}\cdot 3", r"\pi r^2", "1.5", r"90^\circ", r"\log_2 8", r"x\le 5",
    "3+4i", "(2,3),(4,5)", r"\binom{5}{2}", r"3\frac{1}{2}", r"\sin x", "f(x)=2x", r"e^{2\pi i}", r"\frac{x+1}{x-2}",
)  # fmt: skip


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Whether the answer is equivalent to the gold answer, and the answer's canonical form. Answers with the same
    canonical form are equivalent, up to the names of what they are."""
    meant, given = respelled(gold), respelled(answer)
    form = canonical(answer)
    if plain(meant) == plain(given):
        return True, form
    values = [read(text, letters=True) for text in (meant, given)]
    if not all(isinstance(value, Number) and not value.unit.is_any for value in values):
        values = [read(text) for text in (meant, given)]  # 5 m may be a product
    if None not in values and _same(*map(_only, values)):
        return True, form
    return False, form


def canonical(answer: str) -> str:
    """One spelling for many: the value of numbers, sets and intervals, the expansion of expressions, and words in lower
    case; any other text is only cleaned. Identities beyond expansion are not found."""
    text = respelled(answer)
    try:
        return _form(read(text)) or text
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, NotImplementedError):
        return text  # sympy has no value for it, or one with more digits than Python prints


def parses(answer: str) -> bool:
    """Whether an answer can be compared as more than a text."""
    return read(respelled(answer)) is not None


def warm_up() -> None:
    """Parses some texts: the parser's first calls take a hundred times as long as later ones."""
    logging.disable(logging.WARNING)  # math-verify warns that it has no timeout: the workers have one
    for text in _WARM_UP:
        canonical(text)
    compare("2x+1", "1+2x")


def _form(value: Value | None) -> str | None:
    match value:
        case Named():
            return _form(value.value)
        case Text():
            return value.words
        case Time():
            shown = value.shown if value.since_midnight is None else value.since_midnight
            return f"{shown // 3600}:{shown // 60 % 60:02}{'' if value.since_midnight is None else ' of 24'}"
        case Items():
            forms, brackets = [_form(item) for item in value.items], value.brackets or "{}"
            forms = sorted(set(forms)) if brackets == "{}" else forms
            return brackets[0] + ", ".join(forms) + brackets[1]
        case Number():
            number = value.value.doit() * sympy.Rational(value.size) / (100 if value.percent else 1)
            shown = str(sympy.expand(number) if isinstance(number, sympy.Expr) else number)
            dimensions = (f"{name}^{power}" for name, power in sorted(value.unit.dimensions))
            return shown if value.unit.is_any else " ".join([shown, *dimensions, *sorted(value.unit.counted)])
    return None if value is None else str(value)


# --- comparison by kind: the gold answer first ------------------------------------------------------------------------


def _only(value: Value) -> Value:
    """The value in a set of one."""
    is_one = isinstance(value, Items) and value.brackets == "{}" and len(value.items) == 1
    return value.items[0] if is_one and value.items[0] != NO_SOLUTION else value


def _same(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Named) and isinstance(answer, Named):
        return _same(gold.value, answer.value) if gold.name == answer.name else _same_equation(gold, answer)
    if isinstance(gold, Named) and gold.formula is not None:
        return False
    if isinstance(answer, Named) and answer.formula is not None and len(answer.formula.free_symbols) < 2:
        return False  # x + y = 5 states 5, and 2x = 5 does not
    gold, answer = (one.value if isinstance(one, Named) else one for one in (gold, answer))
    if isinstance(gold, Time) and isinstance(answer, Time):
        are_known = None not in (gold.since_midnight, answer.since_midnight)
        return gold.since_midnight == answer.since_midnight if are_known else gold.shown == answer.shown
    if isinstance(gold, Text) or isinstance(answer, Text):
        if gold == answer or not any(isinstance(one, Text) and one.is_choice for one in (gold, answer)):
            return gold == answer
        letters = {(one.words if isinstance(one, Text) else getattr(one, "text", "")).upper() for one in (gold, answer)}
        if len(letters) == 1:
            return not all(getattr(one, "rest", "") for one in (gold, answer))
        stated = [read(one.rest) if isinstance(one, Text) else one for one in (gold, answer)]  # (C) 12 states 12
        numbers = [isinstance(one, Number) for one in (gold, answer, *stated)]
        return numbers[0] != numbers[1] and all(numbers[2:]) and _same_measure(*stated)
    if isinstance(gold, Number) and isinstance(answer, Number):
        return _same_measure(gold, answer)
    brackets = {getattr(one, "brackets", None) for one in (gold, answer)}
    regions = region(gold), region(answer)
    if None not in regions and (isinstance(gold, Region) or isinstance(answer, Region) or "to" in brackets):
        return _same_region(*regions)
    if brackets & {"::", "to"}:
        return _same_ratio(gold, answer)
    return isinstance(gold, Items) and isinstance(answer, Items) and _same_items(gold, answer)


def _same_items(gold: Items, answer: Items) -> bool:
    kinds = {gold.brackets, answer.brackets}
    if len(kinds) == 2 and not ("" in kinds and kinds & {"{}", "()"}):
        return False
    names = {re.sub(r"_.*", "", one.name) for item in (gold, answer) for one in item.items if isinstance(one, Named)}
    are_named = all(isinstance(one, Named) for one in (*gold.items, *answer.items))
    if not kinds <= {"{}", ""} or (len(names) > 1 and not are_named):  # the order counts
        ours, theirs = gold.items, answer.items
        if _are_letters(ours) != _are_letters(theirs):  # y = 4, x = 3 is the point (3, 4)
            ours, theirs = (sorted(one, key=_name) if _are_letters(one) else one for one in (ours, theirs))
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    first, second = _distinct(gold.items), _distinct(answer.items)
    if kinds == {""} and len(second) < min(2, len(answer.items)):
        return False
    for one in first:
        place = next((place for place, other in enumerate(second) if _same(one, other)), None)
        if place is None:
            return False
        second.pop(place)
    return not second


def _name(item: Value) -> str:
    return item.name if isinstance(item, Named) else ""


def _are_letters(items: Sequence[Value]) -> bool:
    """Whether they are named by letters that follow each other, as x, y and a, b do: m, b and h, k have no order."""
    names = "".join(sorted(map(_name, items)))
    return len(names) == len(items) and (names in string.ascii_letters or set(names) <= {*"xyz"})


def _distinct(items: Sequence[Value]) -> list[Value]:
    distinct: list[Value] = []
    for item in items:
        if not any(_same(one, item) for one in distinct):
            distinct.append(item)
    return distinct


def _same_region(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    if gold == answer:
        return True
    pieces = [one.args if isinstance(one, sympy.Union) else (one,) for one in (gold, answer)]
    if not all(isinstance(one, sympy.Interval) for one in (*pieces[0], *pieces[1])):
        return verify([gold], [answer], allow_set_relation_comp=True, timeout_seconds=None)
    return len(pieces[0]) == len(pieces[1]) and all(
        (one.left_open, one.right_open) == (other.left_open, other.right_open)
        and _same_value(one.start, other.start) and _same_value(one.end, other.end)
        for one, other in zip(*pieces, strict=True)
    )  # fmt: skip


def _same_ratio(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Items) and isinstance(answer, Items) and gold.brackets in ("::", "to"):
        sums = [sum(part.value for part in one.items) for one in (gold, answer)]
        return answer.brackets in ("::", "to") and len(gold.items) == len(answer.items) and 0 not in sums and all(
            _same_value(one.value * sums[1], other.value * sums[0])
            for one, other in zip(gold.items, answer.items, strict=True)
        )  # fmt: skip
    ratio, number = (gold, answer) if isinstance(gold, Items) else (answer, gold)
    if ratio.brackets != "::" or len(ratio.items) != 2 or not isinstance(number, Number) or not ratio.items[1].value:
        return False
    return _same_value(ratio.items[0].value / ratio.items[1].value, number.value)


def _same_equation(gold: Value, answer: Value) -> bool:
    """Whether one equation is a multiple of the other."""
    differences = []
    for one in (gold, answer):
        left = one.formula or getattr(read(one.name), "value", None) if isinstance(one, Named) else None
        if not isinstance(left, sympy.Expr) or not isinstance(one.value, Number):
            return False
        differences.append(left - one.value.value)
    first, second = differences
    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return False
    factor = sympy.N(first.subs(_point(first, 0)) / second.subs(_point(first, 0)), _DIGITS)
    return factor.is_finite and factor != 0 and _same_value(first, factor * second)


def _same_measure(gold: Number, answer: Number) -> bool:
    if gold.digits and not answer.digits:  # a question that names a base may have an answer that does not
        return answer.text.upper() == gold.digits or _same_value(gold.value, answer.value)
    if not gold.unit.fits(answer.unit) or _has_prose(gold, answer):
        return False
    if gold.percent == answer.percent:
        if gold.unit.dimensions and answer.unit.dimensions and gold.size != answer.size:
            return _same_value(gold.value, answer.value * sympy.Rational(answer.size / gold.size))
        rounded = _is_rounded(answer.text, gold) or _is_rounded(gold.text, answer)
        return rounded or _same_value(gold.value, answer.value)
    if gold.percent and answer.percent:
        return _same_value(gold.value, answer.value)
    percent, other = (gold, answer) if gold.percent else (answer, gold)
    if not other.unit.is_any or other.unit.counted:  # 50 cents are not 50%
        return False
    # 25 may mean 25%, but 1/2 does not mean 0.5%.
    number = other.value
    as_written = gold.percent or (answer.percent == "%" and number.is_Rational and abs(number) >= 1)
    return (as_written and _same_value(percent.value, number)) or _same_value(percent.value, 100 * number)


def _has_prose(gold: Number, answer: Number) -> bool:
    """Whether there are words that are neither mathematics nor letters of the gold answer: the parser takes them for a
    product of variables, and 0 times any product is 0. Also whether there are variables that the value is without."""
    said, known = (_COMMAND.sub(" ", text) for text in (answer.text, gold.text))
    if _VARIABLE.search(said) and not _VARIABLE.search(known) and not _BOUND.search(answer.text):
        if not getattr(answer.value.doit(), "free_symbols", True):
            return True
    return any(run not in FUNCTIONS and not set(run) <= set(known) for run in _RUN.findall(said))


def _is_rounded(decimal: str, exact: Number) -> bool:
    """Whether a decimal has the first digits of a number that no decimal is equal to."""
    digits = decimal.lstrip("-0.").replace(".", "")
    if not _ROUNDED.fullmatch(decimal) or len(digits) < _FEWEST_DIGITS or _ROUNDED.fullmatch(exact.text):
        return False
    number = exact.value.doit()
    if getattr(number, "free_symbols", True) or not number.is_real:
        return False
    last = sympy.Rational(1, 10 ** len(decimal.partition(".")[2]))
    rest = sympy.N(abs(number) - abs(sympy.Rational(decimal)), _DIGITS)
    return bool(number * sympy.Rational(decimal) > 0 and -last / 2 <= rest < last)  # rounded, or cut off


def _same_value(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    """Whether two expressions are equal: exactly where both are rational, to many digits where they are numbers, and at
    some points where they have variables; math-verify decides where sympy finds no number there."""
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return getattr(gold, "shape", None) == getattr(answer, "shape", ()) and all(map(_same_value, gold, answer))
    exact = gold.doit(), answer.doit()
    if any(one.has(sympy.zoo, sympy.nan) for one in exact):
        return False
    if exact[0] == exact[1]:
        return True
    if all(one.is_Rational for one in exact) or any(one.is_infinite for one in exact):
        return False
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
        return False
    difference = exact[0] - exact[1]
    decided = False
    for number in range(len(_POINTS)):
        point = _point(difference, number)
        try:
            first, second = values = [sympy.N(one.subs(point), _DIGITS) for one in exact]
            if not all(value.is_number and value.is_finite for value in values):
                continue
            scale = max(abs(first), abs(second))
            equal = scale == 0 or bool(abs(first - second) < scale * sympy.Float(10) ** (-_DIGITS * 3 // 4))
        except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError, NotImplementedError):
            continue
        if not equal:
            if point and number == len(_POINTS) - 1 and not all(value.is_real for value in values):
                continue  # another branch of a root or a logarithm
            return False
        decided = True
        if not point:
            return True
    return decided or bool(verify([gold], [answer], timeout_seconds=None))


def _point(expression: sympy.Expr, number: int) -> dict[sympy.Symbol, sympy.Float]:
    first, step = _POINTS[number]
    symbols = sorted(expression.free_symbols, key=str)
    return {symbol: sympy.Float(str(first + step * place), _DIGITS) for place, symbol in enumerate(symbols)}
