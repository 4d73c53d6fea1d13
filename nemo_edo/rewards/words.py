"""Numbers in words: ``three hundred and five``, ``two and a half``, ``minus two thirds``."""

from __future__ import annotations

import re

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def _spelled(number: int) -> str:
    """Of a number below 1000, without hyphens and and."""
    if number < 20:
        return _SMALL[number]
    above, below = divmod(number, 10 if number < 100 else 100)
    words = _TENS[above - 2] if number < 100 else f"{_SMALL[above]} hundred"
    return f"{words} {_spelled(below)}" if below else words


_NUMBERS = {_spelled(number): number for number in range(1000)}
_PARTS = "half third quarter fifth sixth seventh eighth ninth tenth".split()
_FRACTIONS = {
    f"{_SMALL[above]} {part}{'s' if above > 1 else ''}".replace("halfs", "halves"): f"{above}/{below}"
    for below, part in enumerate(_PARTS, start=2) for above in range(1, 20)
}  # fmt: skip
_FRACTIONS |= {text.replace("quarter", "fourth"): fraction for text, fraction in _FRACTIONS.items()}


def number_in_words(text: str) -> tuple[str, str] | None:
    """The number that a text begins with, in LaTeX, and the rest: ("5", "apples"); None where it begins with none."""
    words = re.sub(r"\ba (?=half|third|quarter|fourth)", "one ", text.replace("-", " ")).split()
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
