"""Whether all of an answer is mathematics that has a meaning. A parser takes what it understands of a text, such as the
5 of ``5+``, ``2+2=5`` and ``5 is wrong``."""

from __future__ import annotations

import re
from collections.abc import Callable

from nemo_edo.data.answers import simple_fraction
from nemo_edo.rewards.units import FUNCTIONS, TEXT, is_followed_by_words, quantity

_RELATION = r"<|>|\\(?:leq?|geq?|neq?|ll|gg|cup|cap|in|equiv)(?![a-zA-Z])"
_OPERATOR = rf"[*/^_&]|\\(?:times|cdot|div)(?![a-zA-Z])|{_RELATION}"
_BEGINS = re.compile(_OPERATOR)
_ENDS = re.compile(rf"(?:{_OPERATOR}|[-+=?]|\\(?:pm|mp|to|implies|approx|sim|setminus)|\d\s*(?:\.\.\.|\\l?dots))$")
_SUPERSCRIPT_SIGN = re.compile(r"[^\d\s]\s*\^\{?[-+*]\}?$")
_EMPTY = re.compile(r"\\[dt]?frac\s*\{\s*\}|\\sqrt\s*\{\s*\}|\\[dt]?frac\s*\{[^{}]*\}\s*\{\s*\}")
_INDEX_OF_A_NUMBER = re.compile(
    r"(?<![\w}])(?P<digits>\d+)(?P<escape>\\?)_(?:\{(?P<long>[^{}]*)\}|(?P<short>.?))(?P<another>\\?_?)"
)
_COMMANDS = frozenset(
    "frac dfrac tfrac cfrac sqrt binom dbinom tbinom overline bar dot vec hat pi infty cdot times div pm mp circ "
    "degree le leq ge geq lt gt ne neq ll gg in cup cap setminus emptyset varnothing mid approx equiv implies iff to "
    "not ldots dots cdots langle rangle lfloor rfloor lceil rceil lvert rvert lVert rVert vert Vert begin end "
    "hline sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp gcd lcm min max det prime "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell displaystyle textstyle "
    "text textbf textit textrm mathrm mathbf mathit mathsf mathbb mathcal mbox operatorname quad qquad bigcup bigl "
    "bigr big Big bigg Bigg left right limits".split()
)
"""LaTeX that the parser understands; of other commands it takes what is around them: 5 of ``5\\downarrow``."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_STRANGE = re.compile(
    r"[^\x20-\x7e°−]|[?#~]|%\s*[-+*/^%\w]|\d\s*'|\.\.(?!\.)|\^\s*\{\s*\}|\d\s*\\(?:in|mathbb|to)(?![a-zA-Z])|[,;:]$"
    r"|\d\s*\^\{?[-+*T]\}?$|(?<!frac )(?<!binom )(?<![\w.\\])\d+(?:\.\d+)? \d|^\\[lc]?dots"
    r"|\\(?:sin|cos|tan|cot|sec|csc|arc\w+|sinh|cosh|tanh|log|ln|lg|exp)$"
)
"""What is no mathematics, or has another meaning than a parser's: 5' is five feet, and 3 4 is not 7."""
_CHOICE = re.compile(r"\b(?:or|mod)\b")
_LINE_BREAK = re.compile(r"\\\\")
_NAME_HAS_NO = re.compile(r"[\d+*/^-]|\\(?:[dt]?frac|cdot|times|sqrt)")
_ARGUMENTS = re.compile(r"\([^()]*\)|_\{[^{}]*\}|_\w")
_PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_LETTER_OR_NUMBER = re.compile(r"\b[A-Za-z]\b|^\s*\d")
_MATHEMATICAL_TEXT = re.compile(r"[\s,;]*(?:(?:(?:and|or|mod|\(?[A-Za-z]\)?)(?![A-Za-z])|[^A-Za-z]+)[\s,;]*)*")


def is_legible(gold: str, answer: str, is_equal: Callable[[str, str], bool], symbols: Callable[[str], int]) -> bool:
    """Whether an answer, cleaned, may be compared with the gold answer by what a parser reads in it.

    is_equal: whether two formulas are equivalent. symbols: how many variables there are in one.
    """
    if _BEGINS.match(answer) or (_ENDS.search(answer) and not _SUPERSCRIPT_SIGN.search(answer)):
        return False
    if _EMPTY.search(answer) or (_LINE_BREAK.search(answer) and r"\begin" not in answer):
        return False
    if _is_strange(gold, answer):
        return False
    if any(not _is_base(match) for match in _INDEX_OF_A_NUMBER.finditer(answer)):
        return False
    return not _has_prose(gold, answer) and _equations_hold(gold, answer, is_equal, symbols)


def _is_strange(gold: str, answer: str) -> bool:
    """Whether there is something in it that neither the parser knows nor the gold answer has."""
    if set(_COMMAND.findall(answer)) - _COMMANDS - set(_COMMAND.findall(gold)):
        return True
    if _STRANGE.search(answer) and not _STRANGE.search(gold):
        return True
    if ("&" in answer and r"\begin" not in answer) or answer.count("|") % 2:
        return True
    if sum(map(answer.count, "([{")) != sum(map(answer.count, ")]}")):
        return True
    choices = set(_CHOICE.findall(TEXT.sub(lambda text: f" {text['words']} ", answer)))
    return bool(gold) and not choices <= {*_CHOICE.findall(gold), *(["or"] if re.search(r"[,;=]|\\pm", gold) else [])}


def _is_base(number: re.Match[str]) -> bool:
    """Whether 12_8 is a number in base 8; 12_1, 12_x and 19_8 are not."""
    base = number["long"] or number["short"]
    if number["escape"] or number["another"]:
        return False
    return base.isdigit() and 2 <= int(base) <= 36 and all(int(digit) < int(base) for digit in number["digits"])


def _has_prose(gold: str, answer: str) -> bool:
    """Whether words are left that are neither a unit, nor mathematics, nor in the gold answer too."""
    if quantity(answer) is not None:
        return False
    texts = [(match["words"], answer[: match.start()]) for match in TEXT.finditer(answer)]
    known = {match["words"].strip() for match in TEXT.finditer(gold)}
    if any(not _is_mathematical(*text) and text[0].strip() not in known for text in texts):
        return bool(re.search(r"\d", answer)) and not _is_name(answer)
    if is_followed_by_words(answer):
        return True
    if simple_fraction(gold) is None:
        return False
    rest = TEXT.sub(" ", answer).rpartition("=")[2]
    return any(word not in FUNCTIONS for word in _PLAIN_WORD.findall(rest))


def _is_mathematical(text: str, before: str) -> bool:
    """Letters and digits behind a number are not: 5 with an e or a 3."""
    if before.rstrip()[-1:].isdigit() and _LETTER_OR_NUMBER.search(text):
        return False
    return _MATHEMATICAL_TEXT.fullmatch(text) is not None


def _is_name(answer: str) -> bool:
    r"""Whether the words are the name of what the answer is: ``\text{Area} = 5``."""
    name, equals, value = answer.rpartition("=")
    return bool(equals) and TEXT.search(value) is None and _names(name)


def _names(text: str) -> bool:
    return not _NAME_HAS_NO.search(_ARGUMENTS.sub("", text))


def _equations_hold(
    gold: str, answer: str, is_equal: Callable[[str, str], bool], symbols: Callable[[str], int]
) -> bool:
    """Whether what an answer says to be equal is: 2+2=5 is not, and 2x=5 does not state the value of x."""
    for equation in re.split(r"[,;]|\\text\{\s*(?:and|or)\s*\}", answer):
        *sides, value = re.split(r"(?<![<>!:\\])=", equation)
        for side in map(str.strip, sides):
            if not side or _names(side):
                continue
            count = symbols(side)
            if count == 0 and not symbols(value) and not is_equal(value, side):
                return False
            if count == 1 and "=" not in gold and not symbols(value):
                return False
    return True
