"""Rewards by a user's functions, which run in a worker process: it is killed where a call exceeds its time limit."""

import asyncio
import inspect
import json
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_edo.config import RewardsConfig
from nemo_edo.data.answers import AnswerFormat, canonical_number
from nemo_edo.data.problems import field_of
from nemo_edo.errors import PartlyScored, UserError
from nemo_edo.rewards.verifier import Response, read_responses
from nemo_edo.types import Problem, Rollout, ScoredRollout
from nemo_edo.utils.files import file_name
from nemo_edo.utils.import_path import load_function, said, wanted_arguments
from nemo_edo.utils.wording import shown
from nemo_edo.utils.worker_pool import TIMED_OUT, TaskFailure, WorkerPool

IDS = ("prompt_ids", "response_ids")
ARGUMENTS = ("question", "response", "answer", "metadata", "final_answer", "solution", "problem_id", "finished", *IDS)
"""The arguments that a function can take by name."""
_PLURAL = ("questions", "responses", "answers", "metadata", "final_answers", "solutions", "problem_ids", "finished",
           *IDS)  # fmt: skip
COMPLETIONS = "completions"
_TRL = {"prompts": "prompt", COMPLETIONS: "completion", "completion_ids": "response_ids"}
_TRUTH = "answer (data.columns.answer)"  # what verl's functions get; there is none where the answer is blank
_VERL = {"data_source": "data_source", "solution_str": "response", "ground_truth": _TRUTH, "extra_info": "extra_info"}
_FORMS: tuple[tuple[set[str], bool, dict[str, str]], ...] = (
    ({COMPLETIONS}, True, _TRL),
    ({"solution_strs"}, True, {f"{name}s": field for name, field in _VERL.items()}),
    ({"solution_str"}, False, _VERL),
    ({"responses", "final_answers"}, True, dict(zip(_PLURAL, ARGUMENTS, strict=True))),
    (set(), False, dict(zip(ARGUMENTS, ARGUMENTS, strict=True))),
)
"""The forms of functions: the parameters that mark each, whether it takes lists, and what its parameters get. TRL's
also takes columns of the data by their names. The last form needs no mark."""
COLUMN = "column "  # begins what a parameter gets that is the name of a column
SCORE = "score"  # the entry of a dict that is the reward; the others are logged; without it, their sum is
LARGEST = 1e12  # rewards are float32 in training: squares of these, times weights, add up to a finite number
VOTE = "vote"
"""The entry of a dict that votes compare: the answer that the response states, as a text that equal answers share, or
None. It must not depend on what is right: a vote at test time does not know that."""
_EXPECTED = f"expected a number from {-LARGEST:g} to {LARGEST:g}, or a dict of named ones"

Result = dict[str, Any]  # A response's reward as ``SCORE``, named parts, and ``VOTE`` where the function gave it


@dataclass(frozen=True)
class Signature:
    batch: bool  # whether it takes lists
    concurrent: bool  # whether it is ``async`` and takes one response: then a call is of many, at the same time
    arguments: dict[str, str]  # what each parameter gets: one of ``ARGUMENTS``, or of TRL's or verl's
    optional: frozenset[str]  # the parameters that have a default
    all_columns: bool  # whether it takes every column of the data by name


@dataclass(frozen=True)
class FailedCall:
    reason: str  # what the function did, without its name
    traceback: str = ""
    row: int = 0  # the response among the call's that it is about


@dataclass(eq=False)
class CustomScorer:
    """Scores responses, unfinished ones included, by the weighted sum of functions. Final answers are only for votes:
    the first that a function returns (``VOTE``), otherwise what the response states. The time limit is wall time for
    one response; a call with several has the sum of theirs. failures: the folder for responses whose scoring failed.
    require_unchanged: called before the functions' modules are imported, which happens again after a call that took too
    long. columns: our names of columns by the data's names."""

    answers: AnswerFormat
    rewards: RewardsConfig
    _: KW_ONLY
    failures: Path
    require_unchanged: Callable[[], None] = lambda: None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._functions = self.rewards.by_function
        self._pool = WorkerPool(None)
        self._signatures: dict[str, Signature] = {}  # empty where the worker has not imported the functions

    @property
    def by_group(self) -> bool:
        """Whether a function takes several responses: then it sees all of a problem's in one call."""
        self.check()
        return any(signature.batch for signature in self._signatures.values())

    def check(self) -> None:
        """Imports the functions. Raises UserError for one that is missing or takes arguments that there are not."""
        if self._signatures:
            return
        self.require_unchanged()
        asked = [(one.path, key) for key, one in self._functions.values()]
        signatures = self._pool.run("nemo_edo.rewards.custom:signature", asked)
        for (_, key), signature in zip(asked, signatures, strict=True):
            if isinstance(signature, TaskFailure):
                raise UserError(f"{key}: importing it ended its process (exit status {signature.exit_status})")
            if isinstance(signature, UserError):
                raise signature
        self._signatures = dict(zip(self._functions, signatures, strict=True))

    def try_on(self, problems: Sequence[Problem], encode: Callable[[str], tuple[int, ...]]) -> None:
        """Calls the functions with each problem's own solution, or its answer, for a response: one that fails must not
        do so after hours. encode: makes token ids for functions that take them. Raises UserError."""
        self.check()
        taken = any(field in IDS for signature in self._signatures.values() for field in signature.arguments.values())
        responses = []
        for one in problems:
            text = one.solution or one.answer
            ids = (encode(one.question), encode(text)) if taken else ((), ())
            rollout = Rollout(one.id, 0, *ids, (), text, True, 0, 0)
            responses.append(Response(rollout, one, self.answers.extract(text), True))
        for name, (key, function) in self._functions.items():
            results, failure = self._results(name, responses)
            if failure is not None:
                response = responses[len(results) + failure.row]
                raise UserError(
                    f"{key} ({function.path}), tried on problem {response.problem.id} "
                    f"({response.problem.source}) with the response {shown(response.rollout.text)}: {failure.reason}"
                )

    def begin(self, scored: Sequence[ScoredRollout], expected: int) -> None:
        """Nothing: the functions' time limit is of each response."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """Raises PartlyScored, with those before it, where a function failed."""
        responses, stopped = read_responses(rollouts, problems, self.answers), None
        of_functions: dict[str, list[Result]] = {}
        for name in self._functions:
            results, failure = self._results(name, responses)
            of_functions[name] = results
            if failure is not None:
                failed, kept = responses[len(results) + failure.row], len(results)
                ids = [response.problem.id for response in responses]
                while self.by_group and 0 < kept < len(ids) and ids[kept - 1] == ids[kept]:
                    kept -= 1
                responses = responses[:kept]
                stopped = self._described(name, failed, failure)
        scored = []
        for row, response in enumerate(responses):
            parts: dict[str, float] = {}  # of several functions, with their names
            own = {name: results[row] for name, results in of_functions.items()}
            for name, result in own.items():
                prefix = f"{name}." if len(own) > 1 else ""
                parts |= {name: result[SCORE]} if prefix else {}
                parts |= {prefix + part: value for part, value in result.items() if part not in (SCORE, VOTE)}
            total = math.fsum(self._functions[name][1].weight * result[SCORE] for name, result in own.items())
            listed = ", ".join(f"{name} {value:g}" for name, value in parts.items())
            reason = f"reward {total:g}{f' ({listed})' if listed else ''}"
            stated = None if response.answer is None else canonical_number(response.answer) or response.answer
            answer = next((result[VOTE] for result in own.values() if VOTE in result), stated)
            answer = answer if response.rollout.finished else None
            scored.append(response.scored(total, answer, reason, parts, self.rewards.success_at))
        if stopped is not None:
            raise PartlyScored(stopped, scored)
        return scored

    def close(self) -> None:
        """Ends the process; also done when this is garbage-collected."""
        self._pool.close()

    def _results(self, name: str, responses: Sequence[Response]) -> tuple[list[Result], FailedCall | None]:
        """One function's results up to the first call that failed, and why that failed."""
        self.check()
        (key, function), signature, results = self._functions[name], self._signatures[name], []
        size = max(1, len(responses)) if signature.batch or signature.concurrent else 1
        unused, limit_s = {*IDS} - {*signature.arguments.values()}, self.rewards.function_time_limit_s
        for start in range(0, len(responses), size):
            given = [self._arguments(response) for response in responses[start : start + size]]
            rows = [{name: value for name, value in one.items() if name not in unused} for one in given]
            call = (function.path, key, rows)
            [answer] = self._pool.run("nemo_edo.rewards.custom:call", [call], wall_s=limit_s * len(rows))
            if isinstance(answer, TaskFailure):
                self._signatures = {}  # a new worker imports the functions, which may take longer than a call
                each = f" for each of {len(rows)} responses" if len(rows) > 1 else ""
                answer = FailedCall(
                    f"took longer than rewards.function_time_limit_s = {limit_s:g}{each}"
                    if answer == TIMED_OUT
                    else f"ended its process (exit status {answer.exit_status})"
                )
            if isinstance(answer, FailedCall):
                return results, answer
            results += answer
        return results, None

    def _described(self, name: str, response: Response, failure: FailedCall) -> str:
        """The failure with its place in words; the response is written to a file."""
        (key, function), rollout, problem = self._functions[name], response.rollout, response.problem
        path = self.failures / f"reward_{file_name(problem.id)}_sample_{rollout.sample_index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **_own(response), "source": problem.source, "sample_index": rollout.sample_index,
            "function": function.path, "error": failure.reason, "traceback": failure.traceback,
        }  # fmt: skip
        text = json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it
        return (
            f"{key} ({function.path}), response {rollout.sample_index} to problem {problem.id} "
            f"({problem.source}): {failure.reason}; the response is in {path}"
        )

    def _arguments(self, response: Response) -> dict[str, Any]:
        """All that a function can ask for."""
        problem, own, text = response.problem, _own(response), response.rollout.text
        named = next((name for name, field in self.columns.items() if field == "answer"), "answer")
        answer = _as_given(problem.answer, field_of(own["metadata"], named))
        texts = {"question": problem.question, "answer": answer, "solution": problem.solution}
        texts |= {name: own[field] for name, field in self.columns.items() if field in own} | {named: answer}
        columns = texts | own["metadata"] | {name: text for name, text in texts.items() if text != ""}
        is_chat = bool(problem.messages)
        return {
            **own,
            "prompt": list(problem.messages) if is_chat else problem.question,
            "completion": [{"role": "assistant", "content": text}] if is_chat else text,
            "data_source": columns.get("data_source", problem.source),
            "extra_info": columns.get("extra_info", own["metadata"]),
            **({_TRUTH: answer} if problem.answer else {}),
            **{COLUMN + name: value for name, value in columns.items()},
        }


def _as_given(answer: str, value: Any) -> str | int:
    """The answer as a whole number where the data has it as one, as TRL and verl give it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return int(value) if is_number and str(int(value)) == answer else answer


def _own(response: Response) -> dict[str, Any]:
    """``ARGUMENTS`` of a response."""
    problem, rollout = response.problem, response.rollout
    values = (problem.question, rollout.text, problem.answer, dict(problem.metadata), response.answer)
    ids = list(rollout.prompt_ids), list(rollout.response_ids)
    return dict(zip(ARGUMENTS, (*values, problem.solution, problem.id, rollout.finished, *ids), strict=True))


# --- in the worker process --------------------------------------------------------------------------------------------

_function = cache(load_function)
_loop = cache(asyncio.new_event_loop)
"""One for all calls: a client or semaphore of a user's module belongs to the loop that it was first used in."""


@cache
def signature(path: str, key: str) -> Signature | UserError:
    """The signature of the function that ``key`` names; an error where it is missing or takes what is not there."""
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
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    concurrent = is_async and not batch
    optional = frozenset(name for name, one in declared.items() if one.default is not one.empty)
    return Signature(batch, concurrent, {name: names[name] for name in wanted}, optional, is_trl and variable)


def call(path: str, key: str, rows: Sequence[Mapping[str, Any]]) -> list[Result] | FailedCall:
    """The ``Result`` of each response. rows: what a function can ask for, of each."""
    function, takes = _function(path, key), signature(path, key)
    shared = set.intersection(*map(set, rows))
    fields = {name: field for name, field in takes.arguments.items() if field in shared or name not in takes.optional}
    if takes.all_columns:
        fields |= {field.removeprefix(COLUMN): field for field in sorted(shared) if field.startswith(COLUMN)}
    for row, given in enumerate(rows):
        if missing := next((field for field in fields.values() if field not in given), None):
            there = ", ".join(sorted(field.removeprefix(COLUMN) for field in given if field.startswith(COLUMN)))
            return FailedCall(f"takes the {missing}, which the data has not; there are {there}", row=row)
    try:
        if takes.batch:
            returned = function(**{name: [given[field] for given in rows] for name, field in fields.items()})
        else:
            returned = [function(**{name: given[field] for name, field in fields.items()}) for given in rows]
        if takes.concurrent:
            returned = _loop().run_until_complete(_all(returned))
        elif inspect.isawaitable(returned):
            [returned] = _loop().run_until_complete(_all([returned]))
            if isinstance(returned, BaseException):
                raise returned
    except (Exception, SystemExit) as error:  # whatever a user's function raises is a user's error
        return FailedCall(f"raised {said(error)}", traceback.format_exc())
    finally:
        sys.stdout.flush()  # a worker that is killed later has lost nothing
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple) or len(returned) != len(rows):
        size = f"{len(returned)} results" if isinstance(returned, list | tuple) else shown(returned)
        return FailedCall(f"returned {size} for {len(rows)} responses, expected a list with one for each")
    results = []
    for row, value in enumerate(returned):
        if isinstance(value, BaseException):
            return FailedCall(f"raised {said(value)}", "".join(traceback.format_exception(value)), row)
        if isinstance(value, dict) and {"solution_str", "solution_strs"} & fields.keys():  # verl logs texts as well
            value = {name: v for name, v in value.items() if name in (SCORE, VOTE) or not isinstance(v, str | None)}
        try:
            # None of TRL's: the reward says nothing of this response.
            results.append(as_result(0.0 if value is None and COMPLETIONS in fields else value))
        except ValueError as error:
            return FailedCall(f"returned {error}", row=row)
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
    return vote | result
