"""Custom rewards: what a user's function may take and return, and the scorer that calls it.

The functions run in a worker process, which is killed where a call exceeds its time limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_edo.data.answers import AnswerFormat, canonical_number
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.rewards.function_calls import ARGUMENTS, SCORE, Failure, Result, Signature
from nemo_edo.rewards.verifier import Response, read_responses
from nemo_edo.rewards.workers import TIMED_OUT, TaskFailure, WorkerPool
from nemo_edo.types import Problem, Rollout, ScoredRollout
from nemo_edo.utils.wording import shown

_CALLS = "nemo_edo.rewards.function_calls"
Reward = tuple[float, dict[str, float]]
"""The weighted sum of the functions' scores, and its parts by name."""


@dataclass(frozen=True)
class RewardFunction:
    """One function and what it counts."""

    name: str
    key: str
    """The setting that names it."""
    path: str
    weight: float = 1.0


@dataclass
class RewardFunctions:
    """The functions in their process, which starts with the first call of ``check`` or ``rewards``."""

    functions: Sequence[RewardFunction]
    time_limit_s: float
    """Wall time for one response; a call with several has the sum of theirs."""
    failures: Path
    """The folder that a response is written to whose scoring failed."""
    _pool: WorkerPool = field(default_factory=lambda: WorkerPool(None), init=False)
    _signatures: list[Signature] = field(default_factory=list, init=False)
    """Empty where the worker has not imported the functions."""

    def check(self) -> None:
        """Imports the functions. Raises UserError for one that is missing or takes arguments that there are not."""
        if self._signatures:
            return
        asked = [(function.path, function.key) for function in self.functions]
        signatures = self._pool.run(f"{_CALLS}:signature", asked)
        for (_, key), found in zip(asked, signatures, strict=True):
            if isinstance(found, TaskFailure):
                raise UserError(f"{key}: importing it ended its process (exit status {found.exit_status})")
            if isinstance(found, UserError):
                raise found
        self._signatures = signatures

    def try_on(self, items: Sequence[Response]) -> None:
        """Raises UserError where a function fails for one of the items, whose responses no policy gave."""
        for index, function in enumerate(self.functions):
            _, failed = self._results(index, items)
            if failed is not None:
                item, failure = failed
                raise UserError(
                    f"{function.key} ({function.path}), tried on problem {item.problem.id} ({item.problem.source}) "
                    f"with the response {shown(item.rollout.text)}: {failure.reason}"
                )

    def rewards(self, items: Sequence[Response]) -> tuple[list[Reward], str | None]:
        """The rewards of the items in order, and None; or those before the one whose scoring failed, and why."""
        of_functions: list[list[Result]] = []
        stopped = None
        for index in range(len(self.functions)):
            results, failed = self._results(index, items)
            of_functions.append(results)
            if failed is not None:
                items, stopped = items[: len(results)], self._described(index, *failed)
        count = min(map(len, of_functions))
        return [self._combined([results[row] for results in of_functions]) for row in range(count)], stopped

    def close(self) -> None:
        """Ends the process; also done when this is garbage-collected."""
        self._pool.close()

    def _results(self, index: int, items: Sequence[Response]) -> tuple[list[Result], tuple[Response, Failure] | None]:
        """One function's results up to the first call that failed, and that one's item and failure."""
        self.check()
        signature, results = self._signatures[index], []
        size = max(1, len(items)) if signature.batch else 1
        for start in range(0, len(items), size):
            rows = items[start : start + size]
            given = [_arguments(item) for item in rows]
            columns = {name: [one[field] for one in given] for name, field in signature.arguments.items()}
            arguments = columns if signature.batch else {name: column[0] for name, column in columns.items()}
            answer = self._call(self.functions[index], arguments, signature.batch, len(rows))
            if isinstance(answer, Failure):
                return results, (rows[answer.row], answer)
            results += answer
        return results, None

    def _call(
        self, function: RewardFunction, arguments: dict[str, Any], batch: bool, responses: int
    ) -> list[Result] | Failure:
        asked = (function.path, function.key, arguments, batch, responses)
        [answer] = self._pool.run(f"{_CALLS}:call", [asked], wall_s=self.time_limit_s * responses)
        if not isinstance(answer, TaskFailure):
            return answer
        self._signatures = []  # a new worker imports the functions, which may take longer than a call
        if answer != TIMED_OUT:
            return Failure(f"ended its process (exit status {answer.exit_status})")
        each = f" for each of {responses} responses" if responses > 1 else ""
        return Failure(f"took longer than rewards.function_time_limit_s = {self.time_limit_s:g}{each}")

    def _described(self, index: int, item: Response, failure: Failure) -> str:
        """The failure with its place in words; the response is written to a file."""
        function, rollout, problem = self.functions[index], item.rollout, item.problem
        path = self.failures / f"reward_{problem.id.replace('/', '_')}_sample_{rollout.sample_index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **_arguments(item), "source": problem.source, "sample_index": rollout.sample_index,
            "function": function.path, "error": failure.reason, "traceback": failure.traceback,
        }  # fmt: skip
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        return (
            f"{function.key} ({function.path}), response {rollout.sample_index} to problem {problem.id} "
            f"({problem.source}): {failure.reason}; the response is in {path}"
        )

    def _combined(self, results: Sequence[Result]) -> Reward:
        """The weighted sum of the functions' scores. Of several, parts begin with the name."""
        if len(self.functions) == 1:
            parts = {name: value for name, value in results[0].items() if name != SCORE}
        else:
            parts = {}
            for function, result in zip(self.functions, results, strict=True):
                parts[function.name] = result[SCORE]
                parts |= {f"{function.name}.{name}": value for name, value in result.items() if name != SCORE}
        scores = (function.weight * result[SCORE] for function, result in zip(self.functions, results, strict=True))
        return math.fsum(scores), parts


class CustomScorer:
    """Scores responses by a user's functions, unfinished ones included. Final answers are only for votes: a success's
    is the problem's, and no other response's is."""

    def __init__(
        self, answers: AnswerFormat, functions: RewardFunctions, success_at: float = ScoredRollout.success_at
    ) -> None:
        self._answers = answers
        self._functions = functions
        self._success_at = success_at

    def try_on(self, problems: Sequence[Problem]) -> None:
        """Calls the functions with each problem's own solution, or its answer, for a response: one that fails must not
        do so after hours. Raises UserError."""
        texts = [problem.solution or problem.answer for problem in problems]
        self._functions.try_on(
            [
                Response(Rollout(one.id, 0, (), (), (), text, True, 0, 0), one, self._answers.extract(text), True)
                for one, text in zip(problems, texts, strict=True)
            ]
        )

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """The functions' time limit is of each response."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order.

        Raises PartlyGenerated, with those before it, where a function failed, and ValueError for a rollout of an
        unknown problem.
        """
        responses = read_responses(rollouts, problems, self._answers)
        rewards, stopped = self._functions.rewards(responses)
        scored = [self._scored(*one) for one in zip(responses, rewards, strict=stopped is None)]
        if stopped is not None:
            raise PartlyGenerated(stopped, scored)
        return scored

    def _scored(self, response: Response, reward: Reward) -> ScoredRollout:
        total, values = reward
        parts = ", ".join(f"{name} {value:g}" for name, value in values.items())
        reason = f"reward {total:g}{f' ({parts})' if parts else ''}"
        scored = response.scored(total, response.answer, reason, values, self._success_at)
        if response.answer is None:
            return scored
        if scored.success:
            return replace(scored, answer=response.problem.answer)
        form = canonical_number(response.answer) or response.answer
        same = response.problem.answer in (form, response.answer)
        return replace(scored, answer=f"{form} (no success)" if same else form)


def _arguments(response: Response) -> dict[str, Any]:
    """What a function can ask for (``ARGUMENTS``)."""
    problem, rollout = response.problem, response.rollout
    values = (problem.question, rollout.text, problem.answer, dict(problem.metadata), response.answer)
    return dict(zip(ARGUMENTS, (*values, problem.solution, problem.id, rollout.finished), strict=True))
