"""Calls of a user's reward functions, in a worker process (``workers.py``)."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.utils.import_path import load_function, said, wanted_arguments
from nemo_edo.utils.wording import shown

IDS = ("prompt_ids", "response_ids")
ARGUMENTS = ("question", "response", "answer", "metadata", "final_answer", "solution", "problem_id", "finished", *IDS)
"""What a function can take by name."""
_PLURAL = ("questions", "responses", "answers", "metadata", "final_answers", "solutions", "problem_ids", "finished",
           *IDS)  # fmt: skip
"""The same in the batch form, which takes lists: a function with one of ``_MARKS_BATCH`` has it."""
_MARKS_BATCH = {"responses", "final_answers"}
SCORE = "score"
"""The entry of a dict that is the reward, the others being only logged; without it, the reward is their sum."""
LARGEST = 1e12
"""Rewards are trained on in float32: there the squares of these, times weights, add up to a finite number."""
VOTE = "vote"
"""The entry of a dict that votes compare: the answer that the response states, as a text that equal answers share, or
None. It must not depend on what is right: a vote at test time does not know that."""
_EXPECTED = f"expected a number from {-LARGEST:g} to {LARGEST:g}, or a dict of named ones"

Result = dict[str, Any]
"""A response's reward as ``SCORE``, named parts, and ``VOTE`` where the function gave it."""


@dataclass(frozen=True)
class Signature:
    batch: bool
    arguments: dict[str, str]
    """The function's parameters, and which of ``ARGUMENTS`` each gets."""


@dataclass(frozen=True)
class Failure:
    """Why a call has no result."""

    reason: str
    """What the function did, without its name."""
    traceback: str = ""
    row: int = 0
    """The response among the call's that it is about."""


def signature(path: str, key: str) -> Signature | UserError:
    """Of the function that the setting ``key`` names; an error for one that is missing, or whose parameters cannot be
    given."""
    try:
        function = _function(path, key)
        batch = bool(_MARKS_BATCH & inspect.signature(function).parameters.keys())
        names = dict(zip(_PLURAL if batch else ARGUMENTS, ARGUMENTS, strict=True))
        wanted = wanted_arguments(function, names, f"{key} ({path})")
        declared = inspect.signature(function).parameters  # a function of **kwargs has no need of thousands of ids
        wanted = [name for name in wanted if name not in IDS or name in declared]
    except UserError as error:
        return error
    return Signature(batch, {name: names[name] for name in wanted})


def call(path: str, key: str, arguments: Mapping[str, Any], batch: bool, responses: int) -> list[Result] | Failure:
    """The ``Result`` of each response."""
    try:
        returned = _function(path, key)(**arguments)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is a user's error
        return Failure(f"raised {said(error)}", traceback.format_exc())
    finally:
        sys.stdout.flush()  # a worker that is killed later has lost nothing
    if not batch:
        returned = [returned]
    elif hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple) or len(returned) != responses:
        size = f"{len(returned)} results" if isinstance(returned, list | tuple) else shown(returned)
        return Failure(f"returned {size} for {responses} responses, expected a list with one for each")
    results = []
    for row, value in enumerate(returned):
        try:
            results.append(as_result(value))
        except ValueError as error:
            return Failure(f"returned {error}", row=row)
    return results


def as_result(value: Any) -> Result:
    """Raises ValueError for what is no reward."""
    entries = dict(value) if isinstance(value, dict) else {SCORE: value}
    vote = {VOTE: entries.pop(VOTE)} if VOTE in entries else {}
    if not isinstance(vote.get(VOTE), str | None):
        raise ValueError(f"{shown(vote[VOTE])} as {VOTE!r}; expected the answer as a text, or None")
    if not entries:
        raise ValueError(f"a dict without a number; {_EXPECTED}")
    result: Result = {}
    for name, one in entries.items():
        number = one.item() if getattr(one, "shape", None) == () else one  # of NumPy and torch
        if not isinstance(number, Real) or not -LARGEST <= number <= LARGEST:  # neither has NaN
            entry = f"{shown(one)} as {name!r}" if isinstance(value, dict) else shown(one)
            raise ValueError(f"{entry}; {_EXPECTED}")
        result[str(name)] = float(number)
    if SCORE not in result:
        result = {SCORE: math.fsum(result.values()), **result}
    if abs(result[SCORE]) > LARGEST:
        raise ValueError(f"parts whose sum is {result[SCORE]:g}; {_EXPECTED}")
    return vote | result


@cache
def _function(path: str, key: str) -> Callable[..., Any]:
    return load_function(path, key)
