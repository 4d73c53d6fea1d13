"""SearchLLM: the settings of ``nemo-edo search``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

from nemo_edo.config.checks import (
    FolderName,
    NonNegative,
    NonNegativeInt,
    NotEmpty,
    Positive,
    PositiveInt,
    Section,
    one_of,
)
from nemo_edo.config.reward_model import DTYPES

WIDTHS, MEANS = ("sd", "variance"), ("reward", "linear")


@dataclass
class SearchLLMConfig(Section):
    """The paper's Algorithm 2, a tree search over reasoning steps (``test_time.search_llm``)."""

    name: FolderName = "search"
    """The results are in search/ARM/NAME of the run's folder."""
    reward_model: Optional[str] = None
    """The process reward model's folder."""
    seed: Optional[NonNegativeInt] = None
    """Seed of the sampled steps; null: the run's."""
    steps: PositiveInt = 20
    """T: iterations, hence the largest number of steps of a solution."""
    branches: PositiveInt = 4
    """k: next steps sampled for each node that is expanded."""
    width: PositiveInt = 4
    """s: nodes that are expanded together."""
    exploration: NonNegative = 0.1
    """lambda: weight of the width, how uncertain a reward is, in f. 0: best first by the reward."""
    prior_precision: Positive = 1.0
    """Prior precision of the linear model's weights: about n^2 for embeddings of norm n."""
    noise_variance: Positive = 1.0
    """Noise variance of a reward around the linear model."""
    width_kind: Annotated[str, one_of(*WIDTHS)] = "sd"
    """sd: the standard deviation of a reward, noise included; variance: the variance without noise."""
    mean: Annotated[str, one_of(*MEANS)] = "reward"
    """r in f. reward: the reward model's; linear: the linear model's, fitted to the expanded nodes."""
    step_separator: Optional[NotEmpty] = None
    """What ends a step in the policy's text; null: what the reward model was trained with."""
    end_at_answer: bool = True
    """A solution ends with the step that states its final answer, even if its end token has not come. Not with
    data.answer_format pattern: what such a pattern finds in a step need not be final."""
    part_size: PositiveInt = 64
    """Problems that are searched together, and whose results are on disk before the next ones: what a killed command
    loses, at most."""
    trees: NonNegativeInt = 6
    """How many of the first problems have their trees kept for the report."""
    device: str = "auto"
    """Device of the reward model: cpu, cuda, cuda:1; auto: a GPU where there is one."""
    dtype: Annotated[str, one_of(*DTYPES)] = "auto"
    """Number format of the reward model: float32 or bfloat16; auto: bfloat16 on a GPU, otherwise float32."""
    batch_tokens: PositiveInt = 16384
    """Tokens of the reward model's forward pass, padding included."""
