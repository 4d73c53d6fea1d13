"""Process reward models: training one by ranking NCE, and scoring the responses that a run has stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from nemo_edo.config.checks import folder_name, one_of, positive, require
from nemo_edo.config.generation import ServersConfig

REWARD_MODEL, SCORE = "reward_model", "score"
"""Values of the key ``job``, which a run's config lacks."""
BY_ANSWER, ARITHMETIC = "answer", "arithmetic"
DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class RewardBaseConfig:
    """What the reward model is made from."""

    path: Optional[str] = None
    """A Hugging Face folder with weights and tokenizer: an encoder such as ModernBERT, or a causal language model; its
    head is new. null: random weights, as ``architecture`` says, and the tokenizer of the run."""
    architecture: Optional[dict[str, Any]] = None
    """Without a path: ``model_type`` and fields of its Hugging Face config."""


@dataclass
class RewardDataConfig:
    """Right and wrong steps, from the responses that a run has stored."""

    run: Optional[str] = None
    """The run's folder."""
    arms: list[str] = field(default_factory=list)
    """Arms whose training responses are used, of all their iterations; empty: every arm that has any."""
    test_arms: list[str] = field(default_factory=list)
    """Arms, ``warmup`` among them, whose responses to the run's test problems the model is tested on; empty: every one
    that was evaluated."""
    steps: str = BY_ANSWER
    """answer: steps of right solutions are right, those of wrong ones wrong, unless a right solution shares them.
    arithmetic: each step of the built-in task is checked."""
    step_separator: str = "\n"
    """What separates two steps of a response."""
    positives: int = 4
    """Right steps sampled for each question, at most."""
    negatives: int = 3
    """Wrong steps that each of them is ranked against, at most (K - 1)."""
    validation_share: float = 0.1
    """Share of the questions that are not trained on."""
    max_tokens: int = 1024
    """Most tokens of question and steps together. Longer ones are left out, and counted."""

    def __post_init__(self) -> None:
        one_of("data.steps", self.steps, (BY_ANSWER, ARITHMETIC))
        require(self.step_separator != "", "data.step_separator", self.step_separator, "a text, such as a line break")
        positive(self, "data", "positives", "negatives", "max_tokens")
        inside = 0 < self.validation_share < 1
        require(inside, "data.validation_share", self.validation_share, "a number in (0, 1)")


@dataclass
class RewardTrainConfig:
    """Ranking NCE (``losses.ranking_nce_loss``), by transformers' Trainer."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 32
    """Right steps, each with its wrong ones, per optimizer step."""
    micro_batch_size: Optional[int] = None
    """Right steps per forward pass; null: all."""
    lr: float = 1e-5
    """The highest learning rate."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0; a cosine to 0 follows."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    clip_grad: float = 1.0
    """The gradient is clipped to this norm."""
    weighting: str = "softmax"
    """How the wrong steps' gradients are weighted. softmax: by the model's own probabilities, the paper's equation;
    uniform: equally, as in its source's published code."""
    l2: float = 0.0
    """Weight of the penalty on the squares of the scores. uniform needs one above 0: it is unbounded without."""
    dtype: str = "float32"
    """float32; bfloat16: autocast, on weights kept in float32."""
    evaluate_every: int = 250
    """Steps between two validations; 0: only at the beginning and the end."""
    checkpoint_every: int = 250
    """Steps between two checkpoints, which a killed training resumes from."""

    def __post_init__(self) -> None:
        positive(self, "train", "steps", "batch_size", "lr", "clip_grad", "checkpoint_every")
        for name in ("warmup_steps", "weight_decay", "l2", "evaluate_every"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "a number of at least 0")
        one_of("train.weighting", self.weighting, ("softmax", "uniform"))
        one_of("train.dtype", self.dtype, DTYPES[1:])
        bounded = self.weighting == "softmax" or self.l2 > 0
        require(bounded, "train.l2", self.l2, "a number above 0 with train.weighting uniform")
        micro, batch = self.micro_batch_size, self.batch_size
        divides = micro is None or (micro > 0 and batch % micro == 0)
        require(divides, "train.micro_batch_size", micro, f"null or a divisor of train.batch_size = {batch}")


@dataclass
class RewardModelRunConfig:
    """The training of a process reward model: ``nemo-edo train --config-name reward_model``."""

    job: str = REWARD_MODEL
    """Tells this kind of config from a run's."""
    name: str = "reward_model"
    """The folder is ``output_dir/name``."""
    output_dir: str = "runs"
    """Parent folder of the runs."""
    seed: int = 42
    """Seed of the random weights, the sampled steps, their order, and which questions are held out."""
    threads: Optional[int] = None
    """CPU threads; null: torch's choice."""
    model: RewardBaseConfig = field(default_factory=RewardBaseConfig)
    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    bootstrap: int = 2000
    """Resamples of the questions for the 95 % intervals."""

    def __post_init__(self) -> None:
        one_of("job", self.job, (REWARD_MODEL,))
        folder_name("name", self.name)
        require(self.threads is None or self.threads > 0, "threads", self.threads, "null or a number above 0")
        require(self.seed >= 0, "seed", self.seed, "a number of at least 0")
        require(self.bootstrap > 0, "bootstrap", self.bootstrap, "a number above 0")
        if (self.model.path is None) == (self.model.architecture is None):
            raise ValueError("model.path and model.architecture: give one of them")
        if self.data.run is None:
            raise ValueError("data.run: give the folder of a run that has stored responses")


@dataclass
class ScoreConfig:
    """How ``nemo-edo score`` computes."""

    job: str = SCORE
    """Tells this kind of config from a run's."""
    device: str = "auto"
    """In process: cpu, cuda, cuda:1; auto: a GPU where there is one."""
    dtype: str = "auto"
    """float32 or bfloat16; auto: bfloat16 on a GPU, otherwise float32. The head computes in float32."""
    batch_tokens: int = 16384
    """In process: tokens of a forward pass, padding included."""
    part_size: int = 1024
    """Responses that are scored and put on disk at a time: what a killed command loses, at most."""
    step_separator: Optional[str] = None
    """What separates two steps of a response; null: what the model was trained with."""
    too_long: str = "error"
    """Responses that do not fit the model's context. error: they end the command before anything is computed; zero:
    each of their steps has score 0, and they are counted."""
    serve: bool = False
    """Start vLLM servers with the model (``servers``) in place of computing in process."""
    servers: ServersConfig = field(default_factory=ServersConfig)

    def __post_init__(self) -> None:
        one_of("job", self.job, (SCORE,))
        one_of("dtype", self.dtype, DTYPES)
        one_of("too_long", self.too_long, ("error", "zero"))
        for name in ("batch_tokens", "part_size"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        require(self.step_separator != "", "step_separator", self.step_separator, "null, or a text")
        urls = self.servers.urls
        require(not urls or not self.serve, "servers.urls", list(urls), "none with serve: it starts its own servers")
