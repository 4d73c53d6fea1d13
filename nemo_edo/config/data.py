"""Where problems come from, how a model is prompted with them, and how its answers are verified."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Optional

from nemo_edo.config.checks import import_path, one_of, positive, require, share
from nemo_edo.config.judge_server import JudgeConfig
from nemo_edo.data.answers import ANSWER_FORMATS
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.data.columns import Columns

PATTERN = "pattern"


@dataclass
class ArithmeticConfig:
    """The built-in task: sum a few numbers, merging any two of those left in each step
    (``builtin_task.arithmetic``)."""

    num_operands: int = 4
    """Numbers to sum."""
    max_operand: int = 9
    """The largest number; the smallest is 0."""
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
    """Seed of the problems, separate from the run's: runs with other seeds see the same problems."""

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
    """Problems that policies are evaluated on; its file name must differ from ``train``'s."""
    benchmark: Optional[str] = None
    """The benchmark of ``warmup`` and ``train``; null: GSM8K's JSONL format with any number of rows."""
    test_benchmark: Optional[str] = None
    """The benchmark of ``test``; null: as ``benchmark``."""
    check_rows: bool = True
    """An official file must have as many rows as its benchmark's split. false: parts and copies are taken, too."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of ``train`` and ``test`` (JSONL, JSON, Parquet, or folders of ``Dataset.save_to_disk``), or
    of the rows of ``source``. Where all are null, files are in GSM8K's format or a benchmark's."""
    source: Optional[str] = None
    """Import path of a function that makes the problems, such as my_data:make, in place of files
    (docs/data_and_rewards.md)."""
    source_args: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""
    prompt: str = "{question}\n"
    """The text that precedes a response; {question} is replaced."""
    chat_template: str = "false"
    """true: the prompt is the user's message in the model's chat template. auto: where the model has one. false: the
    prompt is text that the model continues."""
    answer_format: str = "hashes"
    """Where a response states its answer. hashes: a line "#### 72"; hashes_text: all after the last "####", a text of
    any kind and as it is; boxed: the last \\boxed{}; final_answer_is, so_the_answer_is: after the last such phrase;
    pattern: the last match of ``answer_pattern``."""
    answer_pattern: Optional[str] = None
    """A regular expression whose group "answer", or first group, or whole match is the answer."""
    on_bad_rows: str = "error"
    """error: the first bad rows stop the run; skip: they are left out and counted."""
    allow_overlap: bool = False
    """Whether problems of ``test`` may be in ``train``, too: questions that differ in white space and case alone count
    as one. false: such data stop the run before it begins; true: the run says how many there are."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)

    def __post_init__(self) -> None:
        one_of("data.on_bad_rows", self.on_bad_rows, ("error", "skip"))
        require("{question}" in self.prompt, "data.prompt", self.prompt, "a text that contains {question}")
        self._check_source()
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

    def _check_source(self) -> None:
        """Where problems come from, and how their rows are read."""
        import_path("data.source", self.source)
        fits = self.source is not None or not self.source_args
        require(fits, "data.source_args", self.source_args, "none without data.source")
        files = ("warmup", "train", "test", "benchmark", "test_benchmark") if self.source is not None else ()
        for name in files:
            value = getattr(self, name)
            require(value is None, f"data.{name}", value, "null with data.source, which makes the problems")
        if self.columns.are_named and (self.benchmark or self.test_benchmark):
            raise ValueError("data.columns and data.benchmark: give one of them, as a benchmark has its own columns")

    @property
    def is_built_in(self) -> bool:
        """Whether the problems are the built-in task's."""
        return self.test is None and self.source is None

    def reading(self, split: str) -> dict[str, Any]:
        """How ``data.problems.load_problems`` reads the file of a split."""
        benchmark = self.benchmark if split == "train" else self.tested_on
        return {"on_bad_rows": self.on_bad_rows, "benchmark": benchmark, "split": split,
                "check_rows": self.check_rows, "columns": self.columns}  # fmt: skip

    @property
    def tested_on(self) -> Optional[str]:
        """The benchmark of ``test``."""
        return self.test_benchmark or self.benchmark


@dataclass
class RewardFunctionConfig:
    """One of several custom rewards."""

    path: str = ""
    """Import path of the function, such as my_rewards:brevity."""
    weight: float = 1.0
    """What its score is multiplied by in the sum; 0: it is only logged."""


@dataclass
class RewardsConfig:
    """How a response's final answer is compared with the problem's, or the functions that score it instead."""

    verifier: str = "auto"
    """exact: numbers by value, other answers as texts. math: mathematical equivalence, by math-verify. judge: a
    language model (``rewards.judge``). auto: exact where every problem's answer is a number (GSM8K), otherwise math."""
    time_limit_s: float = 5.0
    """CPU time for one answer; above it the reward is 0."""
    time_budget_s: float = 60.0
    """Seconds of all workers that answers which reach the time limit may take in one collection, or in an evaluation's
    greedy or sampled responses, however many parts, ranks and restarts it has. Those left have reward 0; none that is
    verified within a quarter of a second is among them."""
    memory_limit_mb: int = 1024
    """Address space of a worker process; an answer that exhausts it has reward 0."""
    workers: int = 2
    """Worker processes that verify, in addition to the first rank's."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    function: Optional[str] = None
    """Import path of a function that scores a response, such as my_rewards:score (docs/data_and_rewards.md). null: the
    verifier does."""
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Several of them by name; the reward is the weighted sum of their scores."""
    function_time_limit_s: float = 60.0
    """Wall time of a function for one response; above it the run stops, and resumes where it was."""
    success_at: float = 1.0
    """The lowest reward of a success, for accuracy, pass@k, votes, pairs and guards. Verifiers give 0 or 1."""

    @property
    def by_function(self) -> dict[str, tuple[str, RewardFunctionConfig]]:
        """The custom rewards by name, each with its setting; empty where a verifier scores."""
        if self.function is not None:
            return {"function": ("rewards.function", RewardFunctionConfig(self.function))}
        return {name: (f"rewards.functions.{name}.path", one) for name, one in self.functions.items()}

    def __post_init__(self) -> None:
        one_of("rewards.verifier", self.verifier, ("auto", "exact", "math", "judge"))
        for name in ("url", "model") if self.verifier == "judge" else ():
            value = getattr(self.judge, name)
            require(value is not None, f"rewards.judge.{name}", value, "a value with rewards.verifier judge")
        positive(self, "rewards", "time_limit_s", "time_budget_s", "workers", "function_time_limit_s")
        self._check_functions()
        # The libraries take a part of it: with less, every answer would fail.
        require(self.memory_limit_mb >= 512, "rewards.memory_limit_mb", self.memory_limit_mb, "at least 512")

    def _check_functions(self) -> None:
        if self.function is not None and self.functions:
            raise ValueError("rewards.function and rewards.functions: give one of them")
        for key, one in self.by_function.values():
            import_path(key, one.path)
            weight = key.removesuffix("path") + "weight"
            require(math.isfinite(one.weight), weight, one.weight, "a finite number")
        fits = not self.by_function or self.verifier == "auto"
        require(fits, "rewards.verifier", self.verifier, "auto with a custom reward, which replaces it")
        require(math.isfinite(self.success_at), "rewards.success_at", self.success_at, "a finite number")
        fixed = bool(self.by_function) or self.success_at == 1
        require(fixed, "rewards.success_at", self.success_at, "1 without a custom reward: verifiers give 0 or 1")
