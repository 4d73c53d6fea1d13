r"""Spellings of answers that the parser does not know or misreads, rewritten: it takes ``3 1/2`` for (3+1)/2, ``2**3``
and ``2^-1`` for 2, and ``0.\overline{3}`` for 0."""

import re
import unicodedata
from fractions import Fraction

from nemo_edo.data.answers import clean_answer
from nemo_edo.data.units import NAMES, PARTS, SMALL, TENS

_SYMBOLS = {
    "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "—": "-",
    "∕": "/", "⁄": "/", "º": "°", "。": "", "、": ",", "“": "", "”": "", "\u200b": "", "\u2060": "", "\ufeff": "",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<head>\d*)\\(?:overline|bar|dot)(?:\s*\{(?P<cycle>\d+)\}|\s*(?P<digit>\d))"
)
_FRACTION = r"\\[dt]?frac(?:\{[^{}]*\}\{[^{}]*\}|\s*\d\d)"


def _decimal_comma(number: re.Match[str]) -> str:
    whole, decimals = number["whole"] or number["grouped"], number["cents"] or number["decimals"]
    return f"{whole.replace('.', '')}.{decimals}"


_REWRITTEN = tuple((re.compile(pattern), by) for pattern, by in (
    (r"\\(?:displaystyle|[lL]arge|LARGE|huge|color\{\w+\})(?![a-zA-Z])\s*", ""),
    (r"\\(?:boldsymbol|bm|underline)\s*\{([^{}]*)\}", r"\1"),
    (r"\\pounds(?![a-zA-Z])", "£"),
    (r"\{([:.])\}", r"\1"),
    (r"^\{(\w+)\}$", r"\1"),
    (r"\\langle(?![a-zA-Z])\s*", "("),
    (r"\s*\\rangle(?![a-zA-Z])", ")"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\[bB]igg?[lrm]?\s*(?=[()\[\]|]|\\[{}])", ""),
    (r"(?:^|(?<=\\cup))\s*\](?=[^\[\]()]*,)", "("),  # ]1, 2[
    (r"(?<=[\dy}])\s*\[(?=$|\s*\\cup)", ")"),
    (r"^\{(?P<items>[^{}]*[^{},],[^{}]+)\}$", r"\\{\g<items>\\}"),
    (r"\\(?:math(?:rm|it)|text)\{(?P<letter>[ei])\}", r" \g<letter>"),
    (r"^(?:=|(?:[a-zA-Z]\s*)?(?:\\approx(?![a-zA-Z])|≈))\s*", ""),
    (r"\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"(?<=\d)[个個人天岁名次米]$", ""),
    (r"^\d{1,3}(?:'\d{3})+(?=\D|$)|^\d{1,3}(?:\.\d{3}){2,}(?=,\d+$|$)|^\d{1,3}(?:_\d{3}){2,}$",
     lambda digits: re.sub(r"\D", "", digits[0])),
    (r"^(?P<whole>\d{1,3}(?:\.\d{3})*),(?P<cents>\d\d)(?=\s*[€£])|"
     r"^(?P<grouped>\d{1,3}(?:\.\d{3})+),(?P<decimals>\d+)$", _decimal_comma),
    (r"(?i)^\\text\{\s*the (?:final )?answer is:?\s*\}\s*|^the (?:final )?answer is:?\s+", ""),
    (r"\\frac\s*\{\\(?:text|mathrm)\{(?P<per>[a-z]+)\}\}\s*\{\\(?:text|mathrm)\{(?P<unit>[a-z]+)\}"
     r"(?P<power>\^\{?\d\}?)?\}", r"\\text{\g<per>/\g<unit>\g<power>}"),
    (r"\\(?:text|mathrm|mathbf)\{\s*(?P<number>-?(?:\\?\$)?[\d.]+)\s*\}", r"\g<number>"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"√\s*(?:\((?P<inside>[^()]*)\)|(?P<plain>\d+|[a-z]))", r"\\sqrt{\g<inside>\g<plain>}"),
    (r"\s*\*\*\s*(?P<power>-?\d+|[a-z]|\([^()]*\))", r"^{\g<power>}"),
    (rf"\^\s*(?P<power>-\d+|{_FRACTION}|\\sqrt\{{[^{{}}]*\}})", r"^{\g<power>}"),
    (r"(?<![\w.^_}])(?P<whole>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)(?![\d.])",
     r"\g<whole>\\frac{\g<above>}{\g<below>}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"(?<![\w.])(?P<number>\d+(?:\.\d+)?)[eE](?P<exponent>[+-]?\d+)(?![\w.])", r"\g<number>\\cdot 10^{\g<exponent>}"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<=[\d)])\s*(?=\((?=[^()]*\d)[^(),]*\)(?!,))(?<!_\d)(?<!\^\d)", r"\\cdot "),
    (rf"(?P<number>(?:^|(?<=[-+=\s/]))[\d,.]*\d)(?=[a-z]{{2}})(?P<unit>(?:{'|'.join(NAMES)})s?)(?![a-zA-Z(])",
     r"\g<number> \g<unit>"),
    # Not sec, which is a unit as well, nor cost and logs.
    (r"(?<![\\a-zA-Z{])(?P<function>arcsin|arccos|arctan|sin|cos|tan|cot|csc|ln|log|exp)"
     r"(?=[xyz]\b|\s*[\d(_^\\]|\s+[a-z]\b)", r"\\\g<function> "),
))  # fmt: skip


def respelled(answer: str) -> str:
    """An answer, cleaned, in spellings that the parser reads as they are meant."""
    text = answer
    if not answer.isascii():
        text = _SUPERSCRIPT.sub(
            lambda power: "^{" + "".join(str(unicodedata.digit(digit)) for digit in power[0]) + "}",
            "".join(map(_ascii, answer)),
        )
    text = _REPEATING.sub(_fraction, clean_answer(text))
    for pattern, by in _REWRITTEN:
        text = pattern.sub(by, text)
    return " ".join(text.split())


def _ascii(character: str) -> str:
    """The ASCII spelling of digits of any script, of fractions, wide and small characters and common symbols."""
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    form, _, points = unicodedata.decomposition(character).partition(" ")
    spelled = "".join(chr(int(point, 16)) for point in points.split())
    if form == "<fraction>":
        return r"\frac{{{}}}{{{}}}".format(*spelled.split("⁄"))
    if form in ("<wide>", "<small>"):
        return spelled
    return f"_{spelled}" if form == "<sub>" else character


def _fraction(number: re.Match[str]) -> str:
    """0.1\\overline{6} as \\frac{1}{6}."""
    whole, head, cycle = number["whole"] or "0", number["head"], number["cycle"] or number["digit"]
    repeated = Fraction(int(whole + head + cycle) - int(whole + head), 10 ** len(head) * (10 ** len(cycle) - 1))
    return rf"\frac{{{repeated.numerator}}}{{{repeated.denominator}}}"


def _spelled(number: int) -> str:
    """The words of a number below 1000, without hyphens and "and"."""
    if number < 20:
        return SMALL[number]
    above, below = divmod(number, 10 if number < 100 else 100)
    words = TENS[above - 2] if number < 100 else f"{SMALL[above]} hundred"
    return f"{words} {_spelled(below)}" if below else words


_NUMBERS = {_spelled(number): number for number in range(1000)}
_FRACTIONS = {
    f"{SMALL[above]} {part}{'s' if above > 1 else ''}".replace("halfs", "halves"): f"{above}/{below}"
    for below, part in enumerate(PARTS, start=2) for above in range(1, 20)
}  # fmt: skip
_FRACTIONS |= {text.replace("quarter", "fourth"): fraction for text, fraction in _FRACTIONS.items()}


def number_in_words(text: str) -> tuple[str, str] | None:
    """The number that a text begins with, in LaTeX, and the rest: ("5", "apples"); None where it begins with none."""
    words = re.sub(rf"\ban? (?={'|'.join(PARTS)}|fourth)", "one ", text.replace("-", " ")).split()
    sign = "-" if words[:1] in (["minus"], ["negative"]) else ""
    words = words[len(sign) :]
    if words and words[0] in ("half", "dozen", "hundred", "thousand", "million"):
        words = ["one", *words]
    for count in range(len(words), 0, -1):
        number = _number(" ".join(words[:count]))
        if number is not None:
            return sign + number, " ".join(words[count:])
    return None


def _number(text: str) -> str | None:
    if text in _FRACTIONS:
        return _FRACTIONS[text]
    whole, _, part = text.rpartition(" and ")
    if part in _FRACTIONS and (number := _number(whole)):
        return r"{}\frac{{{}}}{{{}}}".format(number, *_FRACTIONS[part].split("/"))
    total, text = 0, text.replace(" and ", " ")
    for name, size in (("billion", 10**9), ("million", 10**6), ("thousand", 1000), ("", 1)):
        before, found, after = text.partition(f" {name}") if name else (text, True, "")
        if found and before:
            if before not in _NUMBERS:
                return None
            total, text = total + size * _NUMBERS[before], after.strip()
    return str(total)
