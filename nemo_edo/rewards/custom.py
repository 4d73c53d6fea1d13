"""Rewards by a user's functions, which run in a worker process: it is killed where a call exceeds its time limit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_edo.config import RewardsConfig
from nemo_edo.data.answers import AnswerFormat, canonical_number
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.rewards.function_calls import ARGUMENTS, COLUMN, IDS, SCORE, VOTE, Failure, Result, Signature
from nemo_edo.rewards.verifier import Response, read_responses
from nemo_edo.types import Problem, Rollout, ScoredRollout
from nemo_edo.utils.files import file_name
from nemo_edo.utils.wording import shown
from nemo_edo.utils.worker_pool import TIMED_OUT, TaskFailure, WorkerPool

_CALLS = "nemo_edo.rewards.function_calls"


class CustomScorer:
    """Scores responses, unfinished ones included, by the weighted sum of functions. Final answers are only for votes:
    the first that a function returns (``function_calls.VOTE``), otherwise what the response states.

    The time limit is wall time for one response; a call with several has the sum of theirs. failures: the folder that a
    response is written to whose scoring failed. require_unchanged: called before the functions' modules are imported,
    which happens again after a call that took too long. columns: our names of columns by the data's names. The process
    starts with the first ``check`` or call.
    """

    def __init__(
        self,
        answers: AnswerFormat,
        rewards: RewardsConfig,
        *,
        failures: Path,
        require_unchanged: Callable[[], None] = lambda: None,
        columns: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._answers = answers
        self._functions = rewards.by_function
        self._time_limit_s = rewards.function_time_limit_s
        self._success_at = rewards.success_at
        self._failures = failures
        self._require_unchanged = require_unchanged
        self._columns = columns
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
        self._require_unchanged()
        asked = [(one.path, key) for key, one in self._functions.values()]
        signatures = self._pool.run(f"{_CALLS}:signature", asked)
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
            responses.append(Response(rollout, one, self._answers.extract(text), True))
        for name, (key, function) in self._functions.items():
            results, failure = self._results(name, responses)
            if failure is not None:
                response = responses[len(results) + failure.row]
                raise UserError(
                    f"{key} ({function.path}), tried on problem {response.problem.id} "
                    f"({response.problem.source}) with the response {shown(response.rollout.text)}: {failure.reason}"
                )

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """Nothing: the functions' time limit is of each response."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """Raises PartlyGenerated, with those before it, where a function failed."""
        responses, stopped = read_responses(rollouts, problems, self._answers), None
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
        scored = [
            self._scored(response, {name: results[row] for name, results in of_functions.items()})
            for row, response in enumerate(responses)
        ]
        if stopped is not None:
            raise PartlyGenerated(stopped, scored)
        return scored

    def close(self) -> None:
        """Ends the process; also done when this is garbage-collected."""
        self._pool.close()

    def _results(self, name: str, responses: Sequence[Response]) -> tuple[list[Result], Failure | None]:
        """One function's results up to the first call that failed, and why that failed."""
        self.check()
        (key, function), signature, results = self._functions[name], self._signatures[name], []
        size = max(1, len(responses)) if signature.batch or signature.concurrent else 1
        for start in range(0, len(responses), size):
            rows = responses[start : start + size]
            given = [self._arguments(response) for response in rows]
            shared = set.intersection(*(set(one) for one in given))
            wanted = signature.arguments.items()
            fields = {name: field for name, field in wanted if field in shared or name not in signature.optional}
            if signature.all_columns:
                fields |= {name.removeprefix(COLUMN): name for name in sorted(shared) if name.startswith(COLUMN)}
            for row, one in enumerate(given):
                if missing := next((name for name in fields.values() if name not in one), None):
                    there = ", ".join(sorted(name.removeprefix(COLUMN) for name in one if name.startswith(COLUMN)))
                    return results, Failure(f"takes the {missing}, which the data has not; there are {there}", row=row)
            arguments = {name: [one[field] for one in given] for name, field in fields.items()}
            call = (function.path, key, arguments, signature, len(rows))
            [answer] = self._pool.run(f"{_CALLS}:call", [call], wall_s=self._time_limit_s * len(rows))
            if isinstance(answer, TaskFailure):
                self._signatures = {}  # a new worker imports the functions, which may take longer than a call
                each = f" for each of {len(rows)} responses" if len(rows) > 1 else ""
                answer = Failure(
                    f"took longer than rewards.function_time_limit_s = {self._time_limit_s:g}{each}"
                    if answer == TIMED_OUT
                    else f"ended its process (exit status {answer.exit_status})"
                )
            if isinstance(answer, Failure):
                return results, answer
            results += answer
        return results, None

    def _described(self, name: str, response: Response, failure: Failure) -> str:
        """The failure with its place in words; the response is written to a file."""
        (key, function), rollout, problem = self._functions[name], response.rollout, response.problem
        path = self._failures / f"reward_{file_name(problem.id)}_sample_{rollout.sample_index}.json"
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

    def _scored(self, response: Response, results: Mapping[str, Result]) -> ScoredRollout:
        """The response with the weighted sum of the functions' scores. Of several functions, parts begin with the
        name."""
        parts: dict[str, float] = {}
        for name, result in results.items():
            prefix = f"{name}." if len(results) > 1 else ""
            parts |= {name: result[SCORE]} if prefix else {}
            parts |= {prefix + part: value for part, value in result.items() if part not in (SCORE, VOTE)}
        total = math.fsum(self._functions[name][1].weight * result[SCORE] for name, result in results.items())
        listed = ", ".join(f"{name} {value:g}" for name, value in parts.items())
        reason = f"reward {total:g}{f' ({listed})' if listed else ''}"
        stated = None if response.answer is None else canonical_number(response.answer) or response.answer
        answer = next((result[VOTE] for result in results.values() if VOTE in result), stated)
        answer = answer if response.rollout.finished else None
        return response.scored(total, answer, reason, parts, self._success_at)

    def _arguments(self, response: Response) -> dict[str, Any]:
        """All that a function can ask for."""
        problem, own, text = response.problem, _own(response), response.rollout.text
        columns = {**own["metadata"], "answer": problem.answer, "solution": problem.solution}
        columns |= {name: own[field] for name, field in self._columns.items() if field in own}
        is_chat = bool(problem.messages)
        return {
            **own,
            "prompt": list(problem.messages) if is_chat else problem.question,
            "completion": [{"role": "assistant", "content": text}] if is_chat else text,
            "data_source": columns.get("data_source", problem.source),
            "extra_info": columns.get("extra_info", own["metadata"]),
            **{COLUMN + name: value for name, value in columns.items()},
        }


def _own(response: Response) -> dict[str, Any]:
    """``ARGUMENTS`` of a response."""
    problem, rollout = response.problem, response.rollout
    values = (problem.question, rollout.text, problem.answer, dict(problem.metadata), response.answer)
    ids = list(rollout.prompt_ids), list(rollout.response_ids)
    return dict(zip(ARGUMENTS, (*values, problem.solution, problem.id, rollout.finished, *ids), strict=True))
