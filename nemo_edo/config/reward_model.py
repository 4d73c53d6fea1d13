"""Process reward models: training one by ranking NCE, and scoring the responses that a run has stored."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from nemo_edo.config.checks import (
    FolderName,
    NonNegative,
    NonNegativeInt,
    NotEmpty,
    Positive,
    PositiveInt,
    Rules,
    Section,
    one_of,
    within,
)
from nemo_edo.config.generation import ServersConfig

REWARD_MODEL, SCORE = "reward_model", "score"  # values of the key ``job``, which a run's config lacks
BY_ANSWER, ARITHMETIC = "answer", "arithmetic"
DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class RewardBaseConfig:
    """What the reward model is made from."""

    path: Optional[str] = None
    """A Hugging Face folder with weights and tokenizer: an encoder such as ModernBERT, or a causal language model; its
    head is new. null: random weights, as ``architecture`` says, and the tokenizer of the run."""
    architecture: Optional[dict[str, Any]] = None  # Without a path: model_type and fields of its Hugging Face config.


@dataclass
class RewardDataConfig(Section):
    """Right and wrong steps, from the responses that a run has stored."""

    run: Optional[str] = None  # The run's folder.
    arms: list[str] = field(default_factory=list)
    """Arms whose training responses are used, of all their iterations; empty: every arm that has any."""
    test_arms: list[str] = field(default_factory=list)
    """Arms, ``warmup`` among them, whose responses to the run's test problems the model is tested on; empty: every one
    that was evaluated."""
    steps: Annotated[str, one_of(BY_ANSWER, ARITHMETIC)] = BY_ANSWER
    """answer: steps of right solutions are right, those of wrong ones wrong, unless a right solution shares them.
    arithmetic: each step of the built-in task is checked."""
    step_separator: NotEmpty = "\n"  # What separates two steps of a response.
    positives: PositiveInt = 4  # Right steps sampled for each question, at most.
    negatives: PositiveInt = 3  # Wrong steps that each of them is ranked against, at most (K - 1).
    validation_share: Annotated[float, within(0, 1, "()")] = 0.1  # Share of the questions that are not trained on.
    max_tokens: PositiveInt = 1024  # Most tokens of question and steps together. Longer ones are left out, and counted.


@dataclass
class RewardTrainConfig(Section):
    """Ranking NCE (``losses.ranking_nce_loss``), by transformers' Trainer."""

    steps: PositiveInt = 1000  # Optimizer steps.
    batch_size: PositiveInt = 32  # Right steps, each with its wrong ones, per optimizer step.
    micro_batch_size: Optional[PositiveInt] = None  # Right steps per forward pass; null: all.
    lr: Positive = 1e-5  # The highest learning rate.
    warmup_steps: NonNegativeInt = 20  # Steps in which the learning rate rises linearly from 0; a cosine to 0 follows.
    weight_decay: NonNegative = 0.01  # AdamW's weight decay.
    clip_grad: Positive = 1.0  # The gradient is clipped to this norm.
    weighting: Annotated[str, one_of("softmax", "uniform")] = "softmax"
    """How the wrong steps' gradients are weighted. softmax: by the model's own probabilities, the paper's equation;
    uniform: equally, as in its source's published code."""
    l2: NonNegative = 0.0
    """Weight of the penalty on the squares of the scores. uniform needs one above 0: it is unbounded without."""
    dtype: Annotated[str, one_of(*DTYPES[1:])] = "float32"  # float32; bfloat16: autocast, on weights kept in float32.
    evaluate_every: NonNegativeInt = 250  # Steps between two validations; 0: only at the beginning and the end.
    checkpoint_every: PositiveInt = 250  # Steps between two checkpoints, which a killed training resumes from.

    def rules(self) -> Rules:
        yield self.weighting == "softmax" or self.l2 > 0, "l2", "a number above 0 with train.weighting uniform"
        divides = self.micro_batch_size is None or self.batch_size % self.micro_batch_size == 0
        yield divides, "micro_batch_size", f"null or a divisor of train.batch_size = {self.batch_size}"


@dataclass
class RewardModelRunConfig(Section):
    """The training of a process reward model: ``nemo-edo train --config-name reward_model``."""

    job: Annotated[str, one_of(REWARD_MODEL)] = REWARD_MODEL  # Tells this kind of config from a run's.
    name: FolderName = "reward_model"  # The folder is ``output_dir/name``.
    output_dir: str = "runs"  # Parent folder of the runs.
    seed: NonNegativeInt = 42  # Seed of random weights, sampled steps, their order, and the questions held out.
    threads: Optional[PositiveInt] = None  # CPU threads; null: torch's choice.
    model: RewardBaseConfig = field(default_factory=RewardBaseConfig)
    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    bootstrap: PositiveInt = 2000  # Resamples of the questions for the 95 % intervals.

    def rules(self) -> Rules:
        either = (self.model.path is None) != (self.model.architecture is None)
        yield either, "model.path", "a folder, or null and a model.architecture: give one of them"
        yield self.data.run is not None, "data.run", "the folder of a run that has stored responses"


@dataclass
class ScoreConfig(Section):
    """How ``nemo-edo score`` computes."""

    job: Annotated[str, one_of(SCORE)] = SCORE  # Tells this kind of config from a run's.
    device: str = "auto"  # In process: cpu, cuda, cuda:1; auto: a GPU where there is one.
    dtype: Annotated[str, one_of(*DTYPES)] = "auto"
    """float32 or bfloat16; auto: bfloat16 on a GPU, otherwise float32. The head computes in float32."""
    batch_tokens: PositiveInt = 16384  # In process: tokens of a forward pass, padding included.
    part_size: PositiveInt = 1024  # Responses scored and put on disk at a time: what a killed command loses, at most.
    step_separator: Optional[NotEmpty] = None  # Separates a response's steps; null: what the model was trained with.
    too_long: Annotated[str, one_of("error", "zero")] = "error"
    """Responses that do not fit the model's context. error: they end the command before anything is computed; zero:
    each of their steps has score 0, and they are counted."""
    serve: bool = False  # Start vLLM servers with the model (``servers``) in place of computing in process.
    servers: ServersConfig = field(default_factory=ServersConfig)

    def rules(self) -> Rules:
        yield from self.only_if(not self.serve, "with serve: it starts its own servers", "servers.urls")


@dataclass
class SearchConfig(Section):
    """The tree search itself (``test_time.SearchLLM``). Raises ValueError for a value out of its range."""

    steps: PositiveInt = 20  # T: iterations, hence the largest number of steps of a solution.
    branches: PositiveInt = 4  # k: next steps sampled for each node that is expanded.
    width: PositiveInt = 4  # s: nodes that are expanded together, and children that join the frontier.
    exploration: NonNegative = 0.1  # lambda: weight in f of the width, a reward's uncertainty. 0: best first by reward.
    prior_precision: Positive = 1.0  # Precision of the linear model's prior; about n^2 for embeddings of norm n.
    noise_variance: Positive = 1.0  # Noise variance of a reward around the linear model.
    width_kind: Annotated[str, one_of("sd", "variance")] = "sd"
    """sd: the standard deviation of a reward, noise included; variance: the variance without noise."""
    mean: Annotated[str, one_of("reward", "linear")] = "reward"
    """r in f. reward: the reward model's; linear: the linear model's, fitted to the expanded nodes."""


@dataclass
class SearchLLMConfig(SearchConfig):
    """The paper's Algorithm 2, a tree search over reasoning steps (``test_time.search_llm``)."""

    name: FolderName = "search"  # The results are in search/ARM/NAME of the run's folder.
    reward_model: Optional[str] = None  # The process reward model's folder.
    seed: Optional[NonNegativeInt] = None  # Seed of the sampled steps; null: the run's.
    step_separator: Optional[NotEmpty] = None  # What ends a step in the policy's text; null: the reward model's.
    end_at_answer: bool = True
    """A solution ends with the step that states its final answer, even if its end token has not come. Not with
    data.answer_format pattern: what such a pattern finds in a step need not be final."""
    part_size: PositiveInt = 64  # Problems searched together, then put on disk: what a killed command loses, at most.
    trees: NonNegativeInt = 6  # How many of the first problems have their trees kept for the report.
    device: str = "auto"  # Device of the reward model: cpu, cuda, cuda:1; auto: a GPU where there is one.
    dtype: Annotated[str, one_of(*DTYPES)] = "auto"
    """Number format of the reward model: float32 or bfloat16; auto: bfloat16 on a GPU, otherwise float32."""
    batch_tokens: PositiveInt = 16384  # Tokens of the reward model's forward pass, padding included.
