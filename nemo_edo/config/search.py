"""SearchLLM: the settings of ``nemo-edo search``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from nemo_edo.config.checks import folder_name, one_of, positive, require
from nemo_edo.config.reward_model import DTYPES

WIDTHS, MEANS = ("sd", "variance"), ("reward", "linear")


@dataclass
class SearchLLMConfig:
    """The paper's Algorithm 2, a tree search over reasoning steps (``test_time.search_llm``)."""

    name: str = "search"
    """The results are in search/ARM/NAME of the run's folder."""
    reward_model: Optional[str] = None
    """The process reward model's folder."""
    seed: Optional[int] = None
    """Seed of the sampled steps; null: the run's."""
    steps: int = 20
    """T: iterations, hence the largest number of steps of a solution."""
    branches: int = 4
    """k: next steps sampled for each node that is expanded."""
    width: int = 4
    """s: nodes that are expanded together."""
    exploration: float = 0.1
    """lambda: weight of the width, how uncertain a reward is, in f. 0: best first by the reward."""
    prior_precision: float = 1.0
    """Prior precision of the linear model's weights: about n^2 for embeddings of norm n."""
    noise_variance: float = 1.0
    """Noise variance of a reward around the linear model."""
    width_kind: str = "sd"
    """sd: the standard deviation of a reward, noise included; variance: the variance without noise."""
    mean: str = "reward"
    """r in f. reward: the reward model's; linear: the linear model's, fitted to the expanded nodes."""
    step_separator: Optional[str] = None
    """What ends a step in the policy's text; null: what the reward model was trained with."""
    end_at_answer: bool = True
    """A solution ends with the step that states its final answer, even if its end token has not come. Not with
    data.answer_format pattern: what such a pattern finds in a step need not be final."""
    part_size: int = 64
    """Problems that are searched together, and whose results are on disk before the next ones: what a killed command
    loses, at most."""
    trees: int = 6
    """How many of the first problems have their trees kept for the report."""
    device: str = "auto"
    """Device of the reward model: cpu, cuda, cuda:1; auto: a GPU where there is one."""
    dtype: str = "auto"
    """Number format of the reward model: float32 or bfloat16; auto: bfloat16 on a GPU, otherwise float32."""
    batch_tokens: int = 16384
    """Tokens of the reward model's forward pass, padding included."""

    def __post_init__(self) -> None:
        folder_name("search.name", self.name)
        positive(self, "search", "steps", "branches", "width", "part_size", "batch_tokens")
        require(self.seed is None or self.seed >= 0, "search.seed", self.seed, "null or a number of at least 0")
        require(self.trees >= 0, "search.trees", self.trees, "a number of at least 0")
        weight = self.exploration
        require(math.isfinite(weight) and weight >= 0, "search.exploration", weight, "a finite number of at least 0")
        for name in ("prior_precision", "noise_variance"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"search.{name}", value, "a finite number above 0")
        one_of("search.width_kind", self.width_kind, WIDTHS)
        one_of("search.mean", self.mean, MEANS)
        one_of("search.dtype", self.dtype, DTYPES)
        require(self.step_separator != "", "search.step_separator", self.step_separator, "null, or a text")
