"""What nemo_edo and TRL both do in ``against_trl.py``."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from llama import SMOLLM2


@dataclass(frozen=True)
class Job:
    architecture: dict[str, int]
    samples: int
    new_tokens: int
    end: int
    """The stop token; 64 is outside the vocabulary, so nothing stops early."""
    ours: dict[str, object]
    """How nemo_edo splits a minibatch into micro-batches."""
    rows: tuple[int, ...]
    """TRL's per_device_train_batch_size: those that are tried. A step accumulates as many as it needs."""
    prompt_tokens: tuple[int, int] = (10, 10)
    """Fewest and most."""
    group: int = 10
    steps: int = 4

    @property
    def minibatch(self) -> int:
        return self.samples // self.steps

    @property
    def trial(self) -> Job:
        """A small part of it, on which TRL's micro-batches are compared."""
        layers = min(2, self.architecture["num_hidden_layers"])
        small = {**self.architecture, "num_hidden_layers": layers}
        return replace(self, architecture=small, samples=self.minibatch, steps=1)

    @property
    def prompts(self) -> list[list[int]]:
        generator, tokens = random.Random(0), range(2, self.architecture.get("vocab_size", 64))
        count = self.samples // self.group
        return [generator.choices(tokens, k=generator.randint(*self.prompt_tokens)) for _ in range(count)]


SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
SHARING = {"packing": True, "share_prompts": True, "keep_groups": True}
LARGE = {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 5}
JOBS = {
    "even": Job(SMALL, 1280, 28, 64, {"micro_batch_tokens": 4800, **SHARING}, rows=(40, 80, 160, 320)),
    "uneven": Job(LARGE, 160, 192, 1, {"micro_batch_tokens": 2048, **SHARING}, rows=(10, 20, 40)),
    "real": Job(
        SMOLLM2,
        *(128, 64, 49152),
        {"micro_batch_tokens": 2048, **SHARING},
        rows=(4, 8, 16, 32),
        prompt_tokens=(40, 150),
        group=8,
    ),
}
