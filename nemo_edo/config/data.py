"""Where problems come from, how they are put to a model, and how its answers are judged."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Optional

from nemo_edo.config.checks import one_of, positive, require, share
from nemo_edo.config.judge import JudgeConfig
from nemo_edo.data.answers import ANSWER_FORMATS
from nemo_edo.data.benchmarks import BENCHMARKS

PATTERN = "pattern"


@dataclass
class ArithmeticConfig:
    """The built-in task: sum a few numbers, merging any two of those left in each step (``data.arithmetic``)."""

    num_operands: int = 4
    """Numbers to sum."""
    max_operand: int = 9
    """The largest of them; the smallest is 0."""
    warmup_problems: int = 4096
    """Problems with noisy solutions, for the warm-up."""
    train_problems: int = 1280
    """Problems that the policy samples responses to."""
    test_problems: int = 256
    """Problems that policies are evaluated on."""
    weak_fact_share: float = 0.25
    """Share of the addition facts that the warm-up data mostly gets wrong."""
    weak_fact_accuracy: float = 0.35
    """How often the warm-up data has a weak fact right."""
    step_noise: float = 0.1
    """Share of the warm-up data's other steps whose result is wrong."""
    seed: int = 0
    """Of the problems, apart from the run's seed: runs with other seeds see the same problems."""

    def __post_init__(self) -> None:
        require(self.num_operands >= 2, "data.arithmetic.num_operands", self.num_operands, "at least 2")
        positive(self, "data.arithmetic", "max_operand", "warmup_problems", "train_problems", "test_problems")
        share(self, "data.arithmetic", "weak_fact_share", "weak_fact_accuracy", "step_noise")


@dataclass
class DataConfig:
    """Problem files. ``train`` and ``test`` null: the built-in task writes them into the run folder. ``test`` alone is
    enough where nothing is trained."""

    warmup: Optional[str] = None
    """Solutions for the supervised warm-up; null: ``train``."""
    train: Optional[str] = None
    """Problems that the policy samples responses to: an official file or folder of ``benchmark``, or what
    tools/prepare_data wrote."""
    test: Optional[str] = None
    """Problems that policies are evaluated on; the file needs another name than ``train``'s."""
    benchmark: Optional[str] = None
    """What ``warmup`` and ``train`` are files of: a benchmark's name, or null for GSM8K's JSONL format with any number
    of rows."""
    test_benchmark: Optional[str] = None
    """What ``test`` is a file of; null: as ``benchmark``."""
    check_rows: bool = True
    """An official file has to hold as many rows as its benchmark's split. false: parts and copies are taken, too."""
    prompt: str = "{question}\n"
    """The text that precedes a response; {question} is replaced."""
    chat_template: str = "false"
    """true: the prompt is the user's message in the model's chat template. auto: where the model has one. false: the
    prompt is text that the model goes on with."""
    answer_format: str = "hashes"
    """Where a response states its answer. hashes: a line "#### 72"; boxed: the last \\boxed{}; final_answer_is,
    so_the_answer_is: behind the last such phrase; pattern: the last match of ``answer_pattern``."""
    answer_pattern: Optional[str] = None
    """A regular expression whose group "answer", or first group, or whole match is the answer."""
    on_bad_rows: str = "error"
    """error: the first bad rows stop the run; skip: they are left out and counted."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)

    def __post_init__(self) -> None:
        one_of("data.on_bad_rows", self.on_bad_rows, ("error", "skip"))
        require("{question}" in self.prompt, "data.prompt", self.prompt, "a text that contains {question}")
        if (self.train is not None and self.test is None) or (self.warmup is not None and self.train is None):
            raise ValueError("data.train and data.test: give both, or neither for the built-in task")
        for name in ("benchmark", "test_benchmark"):
            value = getattr(self, name)
            known = value is None or value in BENCHMARKS
            require(known, f"data.{name}", value, f"null or one of {', '.join(BENCHMARKS)}")
        self.chat_template = self.chat_template.lower()  # YAML's true and false
        one_of("data.chat_template", self.chat_template, ("auto", "true", "false"))
        one_of("data.answer_format", self.answer_format, ANSWER_FORMATS)
        pattern = self.answer_pattern
        if (pattern is not None) != (self.answer_format == PATTERN):
            raise ValueError("data.answer_pattern: give it with data.answer_format=pattern, and only then")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                expected = f"expected a regular expression ({error})"
                raise ValueError(f"data.answer_pattern is {pattern!r}, {expected}") from error

    @property
    def is_built_in(self) -> bool:
        """Whether the problems are the built-in task's."""
        return self.test is None

    @property
    def tested_on(self) -> Optional[str]:
        """The benchmark of ``test``."""
        return self.test_benchmark or self.benchmark


@dataclass
class RewardsConfig:
    """How a response's final answer is compared with the problem's."""

    verifier: str = "auto"
    """exact: numbers by value, other answers as texts. math: mathematical equivalence, by math-verify. judge: a
    language model (``rewards.judge``). auto: exact where every problem's answer is a number (GSM8K), else math."""
    time_limit_s: float = 5.0
    """Wall time for one answer; above it the reward is 0."""
    memory_limit_mb: int = 1024
    """Address space of a worker process; an answer that exhausts it has reward 0."""
    workers: int = 2
    """Processes that verify, beside the first rank's own."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        one_of("rewards.verifier", self.verifier, ("auto", "exact", "math", "judge"))
        for name in ("url", "model") if self.verifier == "judge" else ():
            value = getattr(self.judge, name)
            require(value is not None, f"rewards.judge.{name}", value, "a value with rewards.verifier judge")
        positive(self, "rewards", "time_limit_s", "workers")
        # Libraries alone take a part of it: with less, every answer would fail.
        require(self.memory_limit_mb >= 512, "rewards.memory_limit_mb", self.memory_limit_mb, "at least 512")
