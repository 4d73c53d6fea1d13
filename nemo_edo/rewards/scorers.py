"""Builds the scorer from the config."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import DataConfig, RewardsConfig
from nemo_edo.data.answers import answer_format, canonical_number, clean_answer, simple_fraction, stated_number
from nemo_edo.data.benchmarks import NUMBER
from nemo_edo.data.problems import LoadedProblems, without_unusable
from nemo_edo.data.units import TEXT, measure
from nemo_edo.errors import UserError
from nemo_edo.rewards.custom import CustomScorer
from nemo_edo.rewards.spelling import number_in_words
from nemo_edo.rewards.verifier import ExactAnswerScorer, MathScorer, MathVerifier
from nemo_edo.types import Problem
from nemo_edo.utils.worker_pool import Limits

if TYPE_CHECKING:
    from nemo_edo.interfaces import Scorer
    from nemo_edo.rewards.judge import Judge


_NAMED = re.compile(r"^.*(?:=|≈|\\approx(?![a-z]))|^[a-zA-Z ]+:\s+")  # f(2) = 4, Option A: 5
_NO_DECIMAL = re.compile(
    r",(?!\d{3}(?!\d))|[;:]|\bor\b|\band\b(?! \d+(?:/| [a-z]))|"  # several values, times, ratios
    r"(?<![a-z])(?:[a-df-z]|pi)(?![a-z])|[a-df-z]\d"  # variables, but not 1e5 or e^2
)


def build_scorer(
    rewards: RewardsConfig,
    data: DataConfig,
    run: Path,
    loaded: dict[Path, LoadedProblems],
    encode: Callable[[str], tuple[int, ...]],
    require_unchanged: Callable[[], None] = lambda: None,
) -> tuple[Scorer, Judge | None]:
    """The scorer of responses to the loaded problems, and its judge (a language model) or None.

    run: the run's folder, for a custom reward's failures; a judge's verdicts are next to it unless the config says
    where. encode: the policy's token ids of a text, for a custom reward. require_unchanged: as for ``CustomScorer``.
    Problems whose answers cannot be verified are bad rows: an error, or removed from ``loaded``. Raises UserError where
    a custom reward fails on the first problems, and where a judge does not answer.
    """
    answers = answer_format(data.answer_format, data.answer_pattern)
    if rewards.by_function:
        columns = {column: name for name, column in vars(data.columns).items() if column}
        custom = CustomScorer(
            answers, rewards, failures=run / "failures", require_unchanged=require_unchanged, columns=columns
        )
        custom.try_on([file.problems[0] for file in loaded.values()], encode)
        return custom, None
    without = next((p for file in loaded.values() for p in file.problems if not p.answer), None)
    if without is not None:
        raise UserError(
            f"{without.source}: has no answer, which the verifier compares with; name its column with "
            "data.columns.answer, or score by a custom reward (rewards.function)"
        )
    # A response that marks its answer in another way (a box) may state 2^{10} or 4\text{ cm}, whatever the answers are.
    plain = data.answer_format in ("hashes", "so_the_answer_is")
    plain = plain and all(p.answer_kind == NUMBER for file in loaded.values() for p in file.problems)
    exact = rewards.verifier == "exact" or (rewards.verifier == "auto" and plain)
    if data.answer_format == "hashes":
        states = canonical_number if exact else _may_be_decimal
        expected = "data.answer_format=hashes finds no other; expected hashes_text, boxed or flexible, or a number"

        def why(problem: Problem) -> str | None:
            is_stated = states(problem.answer)
            return None if is_stated else f"the answer {problem.answer[:80]} is no decimal number, and {expected}"

        for path, file in loaded.items():
            loaded[path] = without_unusable(path, file, data.on_bad_rows, why)
    if exact:
        return ExactAnswerScorer(answers), None
    limits = Limits(rewards.time_limit_s, rewards.memory_limit_mb, rewards.workers, rewards.time_budget_s)
    verifier = MathVerifier(limits)  # starts no process before it verifies
    if rewards.verifier == "judge":
        from nemo_edo.rewards.judge import Judge, JudgeCache  # HTTP clients, which other runs do not load

        cache = JudgeCache(Path(rewards.judge.cache or run.parent / "judge.sqlite"))
        judge = Judge(rewards.judge, cache, answers, verifier if rewards.judge.compare_with_rules else None)
        judge.check()
        return judge, judge
    for path, file in loaded.items():
        loaded[path] = verifier.verifiable(path, file, data.on_bad_rows)
    return MathScorer(answers, verifier), None


def _may_be_decimal(answer: str) -> bool:
    """Whether an answer can equal a decimal number: 2^{10} and "five" can, 1/3, x+1, (1, 2) and "Paris" cannot."""
    answer = _NAMED.sub("", clean_answer(answer)).strip()
    if stated_number(answer) is not None:
        return True
    value = measured.value if (measured := measure(answer)) else answer
    if simple_fraction(value) is not None:
        is_changed = measured is not None and (measured.multiplier != 1 or measured.more is not None)
        return is_changed  # half a dozen, 4 hours and 30 minutes
    words = TEXT.sub(r"\g<words>", value).casefold()
    words = re.sub(r"(?<=\d)\s*x\s*(?=\d)", " ", " ".join(number_in_words(words) or [words]))
    words = re.sub(r"\\(?!pi)[a-z]+|\ba(?= [a-z]{2})", " ", words)
    return bool(re.search(r"\d", words)) and not _NO_DECIMAL.search(words)


def check_functions(rewards: RewardsConfig) -> None:
    """Raises UserError for a custom reward that cannot be called."""
    if rewards.by_function:
        custom = CustomScorer(answer_format("flexible"), rewards, failures=Path())  # scores nothing
        custom.check()
        custom.close()
