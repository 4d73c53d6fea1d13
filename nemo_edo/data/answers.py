"""Final answers: where a response states them, and the one spelling of a number."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from nemo_edo.data.units import measure

_NUMBER = re.compile(
    r"(?P<sign>[+-]?(?:\\?\$)?|\\?\$[+-])"  # -3, $5, -$5, $-5, \$5
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"  # 1,234 or 1234; nothing in .5
    r"(?:\.(?P<fraction>[0-9]+))?"
    r"\.?"  # the full stop of a sentence
)
LONGEST_ANSWER = 1000  # characters: a longer text is not an answer, and may be built to waste time
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<above>\d{1,30})/(?P<below>\d{1,30})|"
    r"\\[dt]?frac(?:\{(?P<over>-?\d{1,30})\}\{(?P<under>\d{1,30})\}|\s*(?P<short>\d{2})))"
)
_MARKER = "####"
_HEADING = re.compile(  # #### Step 2: Sum, #### **1. Sums**, #### So far:
    r"[*\s]*(?:\d+[.)]\s*[*\s]*[^\W\d_]{2}|(?:step|part|case|final|answer|solution|conclusion|summary|"
    r"check|results?|calculat\w*|verif\w*|explan\w*|simplif\w*|solv\w*|comput\w*|plan|working|interpret\w*|"
    r"understand\w*|reason\w*|analy\w*|approach|method|proof|strategy|overview|breakdown|given)\b)|"
    r".*:[*\s]*$",
    re.IGNORECASE,
)
_NO_PROSE = re.compile(r"[\\$=<>(\[+^]|(?<!\bof )\b\d|^(?:no|none|all|does)\b", re.IGNORECASE)
_CONCLUDES = re.compile(  # 5 + 5 = 10, so Tom has 12 apples.
    r"(?:=|\b(?:is|are|was|were|has|have|gets?|costs?|makes?|earns?|needs?))\s*[*\\$£€(]*-?[\d,.]*\d(?: [a-z]+)?"
    r"[\s.*$\\)\]%]*$"
)
_LABEL = re.compile(r"^[*\s]*(?:the\s+)?(?:final\s+)?answer\s*:[*\s]*(?=\S)", re.IGNORECASE)
_HASHES = re.compile(rf"^[ \t]*{_MARKER}", re.MULTILINE)
_BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<opens>\{)|\\(?:boxed|fbox) +(?P<bare>[^\s{}$\\]+)|\\.|[{}]", re.DOTALL
)
_PHRASES = {"final_answer_is": "the final answer is", "so_the_answer_is": "so the answer is"}
_ANY_PHRASE = {"answer_is": "answer is", **_PHRASES}
_ANY_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?|(?<!\d)\.\d+")
_BOLD = re.compile(r"^[\s:]*\*\*([^*]+)\*\*")
_NAME = re.compile(r"^[a-zA-Z]\s*=\s*")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_SPACES = re.compile(r"(?<!\\)\\[!,;: ]|~|\\quad|\\qquad")
_TYPESET = str.maketrans({
    **dict.fromkeys(map(chr, (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)), " "),
    **dict.fromkeys("\u2010\u2011\u2013\u2212\uff0d", "-"),
})  # fmt: skip
_GROUPED = r"(?<=\d)(?:\{{,\}}|\\,|\\!,?|,\\!|{})(?=\d{{3}}(?!\d))"
_THOUSANDS = re.compile(_GROUPED.format(" "))
_THOUSANDS_IN_PROSE = re.compile(_GROUPED.format("[\u00a0\u2009\u202f]"))  # where a plain space is between two numbers
_GAP = r"(?:[\s$~*]|\\[ ,;:!()\[\]]|\\q?quad(?![a-zA-Z]))*"
_AND_OR = r"(?:(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\})"
_BETWEEN_BOXES = re.compile(rf"{_GAP}(?:[,;](?:{_GAP}{_AND_OR})?|{_AND_OR}){_GAP}(?:[a-zA-Z](?:_\{{?\w+\}}?)?\s*=\s*)?")
_DOLLAR = "\x02"  # put for the sign of dollars, which is no delimiter
_BARE_DOLLAR = re.compile(r"^([-+]?)\$(?=\s*[-+]?[\d.]+[^$]*$)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ('"', '"'))


def canonical_number(text: str) -> str | None:
    """The one spelling of a number, without separators, dollar sign, leading and trailing zeros: ``"1,234" -> "1234"``,
    ``"$5" -> "5"``, ``"3.50" -> "3.5"``, ``"-3." -> "-3"``, ``"-0" -> "0"``. None for other texts."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not (match["whole"] or match["fraction"]):
        return None
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    fraction = (match["fraction"] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if "-" in match["sign"] and number != "0" else number


def simple_fraction(text: str) -> Fraction | None:
    """The exact value of a ``canonical_number``, of ``3/4`` or of ``\\frac{3}{4}``; None for other texts."""
    number = canonical_number(text)
    if number is not None:
        return Fraction(number)
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    above, below = match["short"] or (match["above"] or match["over"], match["below"] or match["under"])
    sign = -1 if match["sign"] == "-" else 1
    return Fraction(sign * int(above), int(below)) if int(below) else None


def stated_number(text: str) -> str | None:
    """The canonical number that an answer states, whatever is between it and a number alone: a name (``x = 42``), a
    unit (``42 apples``, ``50%``, ``£42``), a box, bold face; also a fraction that is a decimal (``1/2``). None for
    anything else, such as ``42 or 43``."""
    if len(text) > LONGEST_ANSWER:
        return None
    if (plain := canonical_number(text)) is not None:  # as nearly all answers of a built-in task; cleaning takes 0.2 ms
        return plain
    text = _NAME.sub("", clean_answer(text)).removesuffix("%")
    number = _decimal(text)
    if number is None and (measured := measure(text)) and measured.multiplier == 1 and measured.more is None:
        number = _decimal(measured.value)
    return number


def _decimal(text: str) -> str | None:
    value = simple_fraction(text)
    decimal = Decimal(value.numerator) / value.denominator if value is not None else None
    return canonical_number(f"{decimal:f}" if value is not None and Fraction(decimal) == value else text)


def final_answer(text: str) -> str | None:
    """The number that the last line that starts with ``####`` states; None if there is no such line or number."""
    markers = [line for line in map(str.strip, text.split("\n")) if line.startswith(_MARKER)]
    return stated_number(markers[-1].removeprefix(_MARKER)) if markers else None


def is_well_formed(text: str) -> bool:
    """True if exactly one line is ``#### N``, N a number, and no other text follows it."""
    lines = [line for line in text.split("\n") if line.strip()]
    return [index for index, line in enumerate(lines) if final_answer(line) is not None] == [len(lines) - 1]


def clean_answer(text: str) -> str:
    """An answer without what surrounds it: math delimiters, a box, bold face, typographic spaces, a closing full stop.
    Digits that a space or ``{,}`` groups are joined, and the sign of dollars is ``\\$``; nothing else is changed."""
    before, text = None, text.translate(_TYPESET).replace(r"\$", _DOLLAR)
    text = _SPACES.sub(" ", _THOUSANDS.sub("", text))
    while text != before:  # one thing may surround another
        before = text
        text = text.strip()
        text = text if text.endswith("..") else text.removesuffix(".").strip()
        for opening, closing in _DELIMITERS:
            inside = text[len(opening) : len(text) - len(closing)]
            around = len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing)
            if around and opening not in inside and closing not in inside:
                text = inside
        boxes = _boxes(text)
        if len(boxes) == 1 and boxes[0].start == 0 and boxes[0].end == len(text):
            text = boxes[0].content
    text = _THOUSANDS.sub("", _BARE_DOLLAR.sub(rf"\1{_DOLLAR}", text))
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text).replace(r"\%", "%")
    return " ".join(text.replace("$", "").replace(_DOLLAR, r"\$").split())


@dataclass(frozen=True)
class AnswerFormat:
    """Where responses state their final answer."""

    extract: Callable[[str], str | None]  # the last answer that the text states, cleaned; None without one
    is_well_formed: Callable[[str], bool]  # whether the text states exactly one answer, on its last line


def answer_format(name: str, pattern: str | None = None) -> AnswerFormat:
    """The format of that name, one of ``data.answer_format``, with ``data.answer_pattern``. A phrase's answer goes to
    the end of the sentence, or is the box there. Of what flexible finds, only a last number is not well formed."""
    if name in _FIXED:
        return _FIXED[name]
    if name == "boxed":
        return _format(lambda text: [(box.content, box.end) for box in _joined(text, _boxes(text))])
    if name == "pattern":
        expression = re.compile(pattern)
        group = "answer" if "answer" in expression.groupindex else min(1, expression.groups)
        return _format(lambda text: [(match[group] or "", match.end()) for match in expression.finditer(text)])
    return _format(lambda text: _after_phrase(text, _ANY_PHRASE[name]))


HASHES = AnswerFormat(final_answer, is_well_formed)  # GSM8K's
HASHES_TEXT = AnswerFormat(
    lambda text: _HASHES.split(text)[-1].strip() or None if _HASHES.search(text) else None,
    lambda text: len(_HASHES.findall(text)) == 1,
)


def _format(find: Callable[[str], list[tuple[str, int]]]) -> AnswerFormat:
    """``find``: every answer that a text states and where it ends, in order."""

    def extract(text: str) -> str | None:
        answer = found[-1][0] if (found := find(text)) else ""
        return (clean_answer(answer) if len(answer) <= LONGEST_ANSWER else answer) or None

    def well_formed(text: str) -> bool:
        found = find(text)
        if len(found) != 1 or not found[0][0].strip():
            return False
        return "\n" not in text[found[0][1] :].strip(" \n.$]\\*")

    return AnswerFormat(extract, well_formed)


def _stated_somewhere(text: str) -> str | None:
    if number := HASHES.extract(text):
        return number
    line, _, more = (HASHES_TEXT.extract(text) or "").partition("\n")  # #### 1/3 states no decimal, and not 3
    line, labels = _LABEL.subn("", line)
    if more.strip() and not labels and _is_heading(line, more):
        line = ""
    line = line if len(line) <= LONGEST_ANSWER else ""
    return _marked(line or text) or clean_answer(line) or None


def _is_heading(line: str, more: str) -> bool:
    """Whether the rest of a line ``####`` is a heading of Markdown, which the answer follows in ``more``."""
    if _HEADING.match(line) or (not re.search(r"\d", line) and _marked(more)):
        return True
    words, last = line.strip("* "), more.strip().rpartition("\n")[2]
    concludes = _CONCLUDES.search(last) is not None or stated_number(last) is not None
    return concludes and " " in words and not _NO_PROSE.search(words) and not _marked(line)


def _marked(text: str) -> str | None:
    """The answer in a box, or after a phrase."""
    return next(filter(None, (answer_format(name).extract(text) for name in ("boxed", "answer_is"))), None)


def _stated_or_last_number(text: str) -> str | None:
    numbers = _ANY_NUMBER.findall(_THOUSANDS_IN_PROSE.sub("", text).translate(_TYPESET))
    return _stated_somewhere(text) or (canonical_number(numbers[-1]) if numbers else None)


FLEXIBLE = AnswerFormat(_stated_or_last_number, lambda text: bool(_stated_somewhere(text)))
_FIXED = {"hashes": HASHES, "hashes_text": HASHES_TEXT, "flexible": FLEXIBLE}


class _Box(NamedTuple):
    content: str
    start: int
    end: int


def _boxes(text: str) -> list[_Box]:
    """The outermost closed boxes, in order. One pass: a text of a megabyte may open a box at every seventh letter."""
    opened: list[tuple[int, int] | None] = []  # of each open brace: where its box and the content begin, if it is a box
    found: list[tuple[int, int, int, int]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        if match["opens"]:
            opened.append((match.start(), match.end()))
        elif match["bare"]:
            found.append((match.start(), match.start("bare"), match.end(), match.end()))
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            box = opened.pop()
            if box is not None:
                while found and found[-1][0] > box[0]:
                    found.pop()  # it is inside this one
                found.append((*box, match.start(), match.end()))
    return [_Box(text[content:close], start, end) for start, content, close, end in found]


def _joined(text: str, boxes: list[_Box]) -> list[_Box]:
    """Boxes with only a comma, and, or or between them are one that has several answers."""
    joined: list[_Box] = []
    for box in boxes:
        last = joined[-1] if joined else None
        is_next = last is not None and _BETWEEN_BOXES.fullmatch(text, last.end, box.start)
        if not is_next or box.content in last.content.split(", "):
            joined.append(box)
        else:
            joined[-1] = _Box(f"{last.content}, {box.content}", last.start, box.end)
    return joined


def _after_phrase(text: str, phrase: str) -> list[tuple[str, int]]:
    """What follows each occurrence of the phrase: the first box before the next one, or the sentence's rest."""
    starts = [match.end() for match in re.finditer(re.escape(phrase), text, re.IGNORECASE)]
    found = []
    for start, end in pairwise([*starts, len(text)]):
        answer = _stated(text[start:end])
        found.append((answer, start + text[start:end].find(answer) + len(answer)))
    return found


def _stated(rest: str) -> str:
    if boxes := _joined(rest, _boxes(rest)):
        return boxes[0].content
    rest = _BOLD.sub(r"\1", rest).lstrip(" \t\n:*'\"")
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$")):  # a displayed formula
        if rest.startswith(opening) and closing in rest[len(opening) :]:
            return rest[len(opening) : rest.index(closing, len(opening))]
    line = rest.split("\n", 1)[0]
    end = _SENTENCE_END.search(line)
    return (line[: end.start()] if end else line).rstrip(" *'\"")
