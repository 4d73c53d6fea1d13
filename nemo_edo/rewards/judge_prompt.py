"""The request to a judge, and the strict parsing of its verdict."""

import json
import re
from typing import Any

from nemo_edo.config import JudgeConfig
from nemo_edo.types import Problem

VERDICTS = {"correct": True, "incorrect": False}
CHOICES = [f"verdict: {word}" for word in VERDICTS]
_VERDICT_LINE = re.compile(r"verdict: (correct|incorrect)", re.IGNORECASE)
_TAG = re.compile(r"</\s*([\w-]+)\s*>")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{(question|reference|answer|response)\}")
_SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"type": "string", "enum": list(VERDICTS)}},
    "required": ["verdict"],
    "additionalProperties": False,
}
_FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "choice": {"structured_outputs": {"choice": CHOICES}},
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": _SCHEMA},
        }
    },
}


def request_body(settings: JudgeConfig, problem: Problem, answer: str, text: str) -> dict[str, Any]:
    """The chat request for one verdict. No value can close a tag of the prompt, such as <answer>."""
    values = {"question": problem.question, "reference": problem.answer, "answer": answer, "response": text}
    tags = "|".join(map(re.escape, {"answer", *_TAG.findall(settings.prompt)}))
    # Taking "</answer>" out of "</ans</answer>wer>" would leave one: what begins a closing tag is written otherwise.
    closing = re.compile(rf"<(?=\s*/\s*(?:{tags})\b)", re.IGNORECASE)

    def value(match: re.Match[str]) -> str:
        return closing.sub("&lt;", values[match[1]])

    content = _PLACEHOLDER.sub(value, settings.prompt)  # in one pass: values are not templates
    return {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        **({} if settings.temperature is None else {"temperature": settings.temperature}),
        settings.token_limit: settings.max_tokens,
        **_FORMS[settings.structured_output],
    }


def read_verdict(text: str, is_whole: bool) -> bool | None:
    """The verdict of a text reply whose last line, and no other, is a verdict. None for any other reply, and for one
    that was cut. Reasoning (up to ``</think>``) is ignored."""
    lines = [line.strip() for line in _answer(text).splitlines() if line.strip()]
    found = [match for line in lines if (match := _VERDICT_LINE.fullmatch(line))]
    if not is_whole or len(found) != 1 or found[0].string != lines[-1]:
        return None
    return VERDICTS[found[0][1].lower()]


def read_json_verdict(text: str, is_whole: bool) -> bool | None:
    """The verdict of a JSON reply, which may have reasoning before it and a fence around it; None for any other."""
    answer = _answer(text).strip()
    fenced = _FENCE.fullmatch(answer)
    try:
        pairs = json.loads(fenced[1] if fenced else answer, object_pairs_hook=list)  # a key may be there twice
    except (ValueError, RecursionError):
        return None
    if not is_whole or not isinstance(pairs, list) or len(pairs) != 1 or not isinstance(pairs[0], tuple):
        return None
    key, verdict = pairs[0]
    return VERDICTS.get(verdict) if key == "verdict" and isinstance(verdict, str) else None


def _answer(text: str) -> str:
    """A reply without its reasoning; empty where that does not end."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
