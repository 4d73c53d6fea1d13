from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def random_batch():
    """Of a seed: float64 log-probabilities, advantages and masks; the first rows are full, of one token, and empty."""

    def make(seed: int, sequences: int = 6, tokens: int = 5) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        lengths = torch.randint(0, tokens + 1, (sequences,), generator=generator)
        lengths[:3] = torch.tensor([tokens, 1, 0])
        old = -normal(sequences, tokens).abs() - 2
        return SimpleNamespace(
            old=old,
            logprobs=(old + 0.3 * normal(sequences, tokens)).requires_grad_(),
            ref=old + 0.3 * normal(sequences, tokens),
            advantages=normal(sequences),
            mask=(torch.arange(tokens) < lengths[:, None]).double(),
            lengths=lengths,
        )

    return make


class EnumerablePolicy:
    """A softmax at every node of a prefix tree, float64: all responses over {0, 1, end} of at most three tokens.

    Expectations over its responses are exact sums, so what is checked is the theory, signs included, and not luck."""

    def __init__(self) -> None:
        end, length = 2, 3
        self.responses = [y for size in range(1, length + 1) for y in product(range(3), repeat=size)
                          if end not in y[:-1] and (y[-1] == end or size == length)]
        self.mask = torch.tensor([[float(t < len(y)) for t in range(length)] for y in self.responses]).double()
        self.prefixes = sorted({y[:t] for y in self.responses for t in range(len(y))})
        self.places = torch.tensor([[3 * self.prefixes.index(y[:t]) + y[t] if t < len(y) else 0 for t in range(length)]
                                    for y in self.responses])

    def random_logits(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(len(self.prefixes), 3, generator=generator, dtype=torch.float64).requires_grad_()

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[responses, tokens], with NaN in the padding."""
        return torch.where(self.mask == 1, logits.log_softmax(-1).flatten()[self.places], torch.nan)

    def probabilities(self, logprobs: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask == 1, logprobs, 0.0).sum(1).exp()


@pytest.fixture(scope="session")
def policy():
    return EnumerablePolicy()
