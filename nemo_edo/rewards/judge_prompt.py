"""What a judge is asked, and how strictly its verdict is read."""

from __future__ import annotations

import json
import re
from typing import Any

from nemo_edo.config import JudgeConfig
from nemo_edo.types import Problem

VERDICTS = {"correct": True, "incorrect": False}
CHOICES = [f"verdict: {word}" for word in VERDICTS]
_VERDICT_LINE = re.compile(r"verdict: (correct|incorrect)", re.IGNORECASE)
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
    """The chat request for one verdict. Neither answer nor text can close the tag that the prompt puts it in."""
    values = {
        "question": problem.question,
        "reference": problem.answer,
        "answer": answer.replace("</answer>", ""),
        "response": text.replace("</answer>", ""),
    }
    content = _PLACEHOLDER.sub(lambda match: values[match[1]], settings.prompt)  # each once: values are not templates
    return {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        **_FORMS[settings.structured_output],
    }


def read_verdict(text: str, is_whole: bool) -> bool | None:
    """The verdict of a reply in words: its last line is one, and no other line is. None for every other reply, and for
    one that was cut. What a model thought aloud (up to ``</think>``) is no part of it."""
    lines = [line.strip() for line in text.rpartition("</think>")[2].splitlines() if line.strip()]
    found = [match for line in lines if (match := _VERDICT_LINE.fullmatch(line))]
    if not is_whole or len(found) != 1 or found[0].string != lines[-1]:
        return None
    return VERDICTS[found[0][1].lower()]


def read_json_verdict(text: str, is_whole: bool) -> bool | None:
    """The verdict of a reply that is JSON with a verdict and nothing else; None for every other one."""
    try:
        reply = json.loads(text)
    except ValueError:
        return None
    well_formed = is_whole and isinstance(reply, dict) and reply.keys() == {"verdict"}
    return VERDICTS.get(reply["verdict"]) if well_formed and isinstance(reply["verdict"], str) else None
