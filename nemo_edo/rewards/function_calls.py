"""Calls of a user's reward functions, in a worker process (``utils.worker_pool``)."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
COMPLETIONS = "completions"
_TRL = {"prompts": "prompt", COMPLETIONS: "completion", "completion_ids": "response_ids"}
_VERL = {"data_source": "data_source", "solution_str": "response", "ground_truth": "answer", "extra_info": "extra_info"}
_FORMS: tuple[tuple[set[str], bool, dict[str, str]], ...] = (
    ({COMPLETIONS}, True, _TRL),
    ({"solution_strs"}, True, {f"{name}s": field for name, field in _VERL.items()}),
    ({"solution_str"}, False, _VERL),
    ({"responses", "final_answers"}, True, dict(zip(_PLURAL, ARGUMENTS, strict=True))),
    (set(), False, dict(zip(ARGUMENTS, ARGUMENTS, strict=True))),
)
"""The forms of functions: the parameters that mark each, whether it takes lists, and what its parameters get. TRL's
also takes columns of the data by their names. The last form needs no mark."""
COLUMN = "column "
"""Begins what a parameter gets that is the name of a column."""
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
    """Whether it takes lists."""
    concurrent: bool
    """Whether it is ``async`` and takes one response: then a call is of many, at the same time."""
    arguments: dict[str, str]
    """The function's parameters, and what each gets: one of ``ARGUMENTS``, or of TRL's or verl's."""
    optional: frozenset[str]
    """The parameters that have a default."""
    all_columns: bool
    """Whether it takes every column of the data by name."""


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
        declared = inspect.signature(function).parameters
        _, batch, names = next(form for form in _FORMS if not form[0] or form[0] & declared.keys())
        is_trl, variable = names is _TRL, any(one.kind is one.VAR_KEYWORD for one in declared.values())
        if is_trl:
            own = [name for name, one in declared.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
            names = {**{name: COLUMN + name for name in own}, **names}
        wanted = wanted_arguments(function, names, f"{key} ({path})")
        # A function of **kwargs has no need of thousands of ids.
        wanted = [name for name in wanted if is_trl or name not in IDS or name in declared]
    except UserError as error:
        return error
    called = function if inspect.isroutine(function) else type(function).__call__
    concurrent = inspect.iscoroutinefunction(called) and not batch
    optional = frozenset(name for name, one in declared.items() if one.default is not one.empty)
    return Signature(batch, concurrent, {name: names[name] for name in wanted}, optional, is_trl and variable)


def call(
    path: str, key: str, arguments: Mapping[str, list], signature: Signature, responses: int
) -> list[Result] | Failure:
    """The ``Result`` of each response. arguments: lists."""
    function = _function(path, key)
    try:
        if signature.batch:
            returned = function(**arguments)
        else:
            rows = [{name: values[row] for name, values in arguments.items()} for row in range(responses)]
            returned = [function(**row) for row in rows]
        if signature.concurrent:
            returned = asyncio.run(_all(returned))
        elif inspect.isawaitable(returned):
            [returned] = asyncio.run(_all([returned]))
            if isinstance(returned, BaseException):
                raise returned
    except (Exception, SystemExit) as error:  # whatever a user's function raises is a user's error
        return Failure(f"raised {said(error)}", traceback.format_exc())
    finally:
        sys.stdout.flush()  # a worker that is killed later has lost nothing
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple) or len(returned) != responses:
        size = f"{len(returned)} results" if isinstance(returned, list | tuple) else shown(returned)
        return Failure(f"returned {size} for {responses} responses, expected a list with one for each")
    results = []
    for row, value in enumerate(returned):
        if isinstance(value, BaseException):
            return Failure(f"raised {said(value)}", "".join(traceback.format_exception(value)), row)
        if isinstance(value, dict) and {"solution_str", "solution_strs"} & arguments.keys():  # verl logs texts as well
            value = {name: v for name, v in value.items() if name in (SCORE, VOTE) or not isinstance(v, str | None)}
        try:
            # None of TRL's: the reward says nothing of this response.
            results.append(as_result(0.0 if value is None and COMPLETIONS in arguments else value))
        except ValueError as error:
            return Failure(f"returned {error}", row=row)
    return results


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """What the calls return, or the exceptions that they raise."""
    return await asyncio.gather(*calls, return_exceptions=True)


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
