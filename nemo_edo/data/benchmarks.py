"""The benchmarks: where each comes from, the columns and row counts of its official files, and its gold answers."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_edo.data.answers import answer_format, clean_answer, final_answer, is_well_formed, stated_number
from nemo_edo.data.rows import NAME_COLUMNS, Row, RowError, plain_values, text_of
from nemo_edo.types import Problem

NUMBER, MATH, TEXT = "number", "math", "text"
"""Kinds of gold answers: a canonical number; LaTeX or words that rules can compare; prose that needs a judge."""
_BOXED = answer_format("boxed")
_PHRASE = answer_format("final_answer_is")
Gold = tuple[str, str, str, str]
"""Question, solution (where the benchmark has none, the sentence that states the answer), answer, its kind."""
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_PROSE = re.compile(r"[a-z]+ [a-z]+ [a-z]+")
_LONGEST_RULED = 100  # characters of a solution of one line that is taken for the answer itself: s1K has both


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    hub: str  # the data set on the Hugging Face hub
    splits: Mapping[str, int]  # rows of each official split
    columns: Mapping[str, tuple[str, ...]]  # official copies' names of what is read; one of each has to be there
    read: Callable[[Mapping[str, Any]], Gold]  # from a row's read columns, by our names; raises RowError
    answers: str  # the answer format of the paper's prompt for it
    licence: str
    hub_configs: tuple[str, ...] = ("default",)
    hub_splits: Mapping[str, str] = field(default_factory=dict)  # the hub's names of splits, where they differ
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def problem(self, row: Row, stem: str) -> Problem:
        """Raises RowError for a row without the columns, or with contents that are not the benchmark's."""
        content = row.fields()
        values = {
            ours: next((content[name] for name in names if content.get(name) is not None), None)
            for ours, names in {**self.columns, **self.optional}.items()
        }
        for ours, names in self.columns.items():
            if values[ours] is None:
                there = ", ".join(map(str, content)) or "none"
                raise RowError(f'has no "{names[0]}" (its columns: {there}); expected {self.expected}; {NAME_COLUMNS}')
        known = {name for names in (*self.columns.values(), *self.optional.values()) for name in names}
        question, solution, answer, kind = self.read(values)
        for name, text in {"question": question, "solution": solution, "answer": answer}.items():
            text_of(text, name, may_be_blank=name == "solution")
        metadata = plain_values({name: value for name, value in content.items() if name not in known})
        return Problem(f"{stem}-{row.number}", question, solution, answer, row.source, kind, metadata)

    @property
    def expected(self) -> str:
        return f"the columns {', '.join(names[0] for names in self.columns.values())} of {self.title} ({self.hub})"


def _gsm8k_gold(values: Mapping[str, Any]) -> Gold:
    """The solution is without calculator annotations, as is usual: ``48/2=<<48/2=24>>24`` becomes ``48/2=24``."""
    question, solution = text_of(values["question"], "question"), text_of(values["solution"], "answer")
    solution = _ANNOTATION.sub("", solution)
    if not is_well_formed(solution):
        raise RowError(
            '"answer" does not end in one "#### number" line, as in "... #### 72"; where a column has the final answer '
            "alone, name it with data.columns.answer"
        )
    return question, solution, final_answer(solution), NUMBER


def _aime_gold(values: Mapping[str, Any]) -> Gold:
    """Answers are whole numbers from 0 to 999, in some copies with a unit, or in the solution's box alone."""
    question, solution, answer, kind = _stated_or_boxed_gold(values)
    digits = re.fullmatch(r"0*(\d{1,3})", stated_number(answer) or answer)
    if digits is None:
        raise RowError(f'the answer is "{answer}", expected a whole number from 0 to 999')
    return question, solution, digits[1], kind


def _stated_or_boxed_gold(values: Mapping[str, Any]) -> Gold:
    """The stated answer, or MATH's: the last box of the solution."""
    question, answer, solution = text_of(values["question"], "problem"), values["answer"], values["solution"]
    if isinstance(answer, float) and math.isfinite(answer):
        answer = str(int(answer) if answer.is_integer() else answer)
    elif answer == "" or answer != answer:  # NaN is what pandas makes of none
        answer = None
    if answer is not None:
        answer = clean_answer(text_of(answer, "answer", may_be_number=True))
        answer = _BOXED.extract(answer) or answer
        return question, text_of(solution or f"The final answer is ${answer}$.", "solution"), answer, MATH
    if solution is None:
        raise RowError(f'has neither "solution" nor "answer"; {NAME_COLUMNS}')
    answer = _BOXED.extract(text_of(solution, "solution"))
    if answer is None:
        raise RowError('"solution" has no \\boxed{} answer whose braces close')
    return question, solution, answer, MATH


def _olympiad_gold(values: Mapping[str, Any]) -> Gold:
    """Several answers of one problem are in one text, as a rule; in a list of several, they are put in one."""
    for name, expected in (("language", "English"), ("subject", "Math"), ("modality", "Text-only")):
        if values[name] is not None and values[name] != expected:
            raise RowError(f'"{name}" is {values[name]}, expected {expected}: the file OE_TO_maths_en_COMP')
    answers = values["answer"]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise RowError('"final_answer" is not a list of texts')
    context, solutions = values["context"], values["solution"]
    question = text_of(values["question"], "question")
    answer = clean_answer(", ".join(clean_answer(answer) for answer in answers))
    solution = "\n\n".join(solutions) if isinstance(solutions, list) else solutions
    question = f"{context}\n\n{question}" if context else question
    return question, solution or f"The final answer is {answer}.", answer, MATH


def _s1k_gold(values: Mapping[str, Any]) -> Gold:
    """``solution`` is a number, a formula, a letter, a whole solution or a proof, as its source has it. What SFT learns
    is the trace of thought and the attempt, where they are given, and the sentence with the answer."""
    question, reference = text_of(values["question"], "question"), text_of(values["solution"], "solution").strip()
    stated = _BOXED.extract(reference) or _PHRASE.extract(reference)
    short = "\n" not in reference and len(reference) <= _LONGEST_RULED and not _PROSE.search(reference)
    answer = stated or (clean_answer(reference) if short else None)
    steps = [*(values["thinking_trajectories"] or [])[:1], *([values["attempt"]] if values["attempt"] else [])]
    steps = steps or [reference]
    if answer is not None:
        steps.append(f"The final answer is {answer}.")
    return question, "\n\n".join(steps), answer or reference, TEXT if answer is None else MATH


_PROBLEM = ("problem", "Problem", "question")
_SOLUTION = {"solution": ("solution", "Solution")}
_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
_S1K = {
    "columns": {"question": ("question",), "solution": ("solution",)},
    "optional": {"thinking_trajectories": ("thinking_trajectories",), "attempt": ("attempt",)},
    "read": _s1k_gold,
    "answers": "final_answer_is",
}
_AIME = {
    "columns": {"question": _PROBLEM},
    "optional": {"answer": ("answer", "Answer"), **_SOLUTION},
    "read": _aime_gold,
    "answers": "final_answer_is",
}

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "gsm8k", "GSM8K", "openai/gsm8k", {"train": 7473, "test": 1319},
            {"question": ("question",), "solution": ("answer",)}, _gsm8k_gold, "so_the_answer_is", "MIT",
            hub_configs=("main",),
        ),
        Benchmark(
            "math", "MATH", "EleutherAI/hendrycks_math", {"train": 7500, "test": 5000},
            {"question": ("problem", "question")}, _stated_or_boxed_gold, "boxed", "MIT", hub_configs=_SUBJECTS,
            optional={"answer": ("answer",), **_SOLUTION},
        ),
        Benchmark("s1k", "s1K", "simplescaling/s1K", {"train": 1000}, licence="Apache-2.0", **_S1K),
        Benchmark(
            "s1k_eval", "s1K's evaluation split", "simplescaling/data_ablation_full59K", {"test": 1000},
            licence="Apache-2.0", hub_splits={"test": "train"}, **_S1K,
        ),
        Benchmark(
            "aime24", "AIME 2024", "HuggingFaceH4/aime_2024", {"test": 30}, licence="not stated (MAA's problems)",
            hub_splits={"test": "train"}, **_AIME,
        ),
        Benchmark(
            "aime25", "AIME 2025", "math-ai/aime25", {"test": 30}, licence="Apache-2.0 (MAA's problems)", **_AIME
        ),
        Benchmark(
            "math500", "MATH500", "HuggingFaceH4/MATH-500", {"test": 500},
            {"question": ("problem",), "solution": ("solution",), "answer": ("answer",)}, _stated_or_boxed_gold,
            "final_answer_is", "MIT (MATH's)",
        ),
        Benchmark(
            "minerva", "Minerva Math", "math-ai/minervamath", {"test": 272}, {"question": ("question", "problem")},
            _stated_or_boxed_gold, "final_answer_is", "not stated (MIT OpenCourseWare's problems: CC BY-NC-SA 4.0)",
            optional={"answer": ("answer",), **_SOLUTION},
        ),
        Benchmark(
            "olympiadbench", "OlympiadBench", "Hothan/OlympiadBench", {"test": 674},
            {"question": ("question",), "answer": ("final_answer",)}, _olympiad_gold, "final_answer_is", "Apache-2.0",
            hub_configs=("OE_TO_maths_en_COMP",), hub_splits={"test": "train"},
            optional={
                "solution": ("solution",), "context": ("context",), "language": ("language",),
                "subject": ("subject",), "modality": ("modality",),
            },
        ),
    )
}  # fmt: skip
