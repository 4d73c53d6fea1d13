from itertools import product
from types import SimpleNamespace

import pytest
import torch


def _random_batch(seed: int, sequences: int = 6, tokens: int = 5) -> SimpleNamespace:
    """Float64 log-probabilities, advantages and masks of random lengths.

    The first three rows are full, of one token, and empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

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


@pytest.fixture(scope="session")
def random_batch():
    return _random_batch


class EnumerablePolicy:
    """A softmax at every node of a prefix tree, float64: all responses over {0, 1, end} of at most three tokens.

    Expectations over its responses are exact sums, so what is checked is the theory, signs included, and not luck."""

    LENGTH, VOCABULARY, END = 3, 3, 2

    def __init__(self) -> None:
        self.responses = [
            y
            for length in range(1, self.LENGTH + 1)
            for y in product(range(self.VOCABULARY), repeat=length)
            if self.END not in y[:-1] and (y[-1] == self.END or length == self.LENGTH)
        ]
        prefixes = {y[:t] for y in self.responses for t in range(len(y))}
        self.row = {prefix: row for row, prefix in enumerate(sorted(prefixes))}
        self.lengths = torch.tensor([len(y) for y in self.responses], dtype=torch.float64)
        self.mask = (torch.arange(self.LENGTH) < self.lengths[:, None]).double()

    def random_logits(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(self.row), self.VOCABULARY, generator=generator, dtype=torch.float64)
        return logits.requires_grad_()

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[responses, LENGTH], with NaN in the padding."""
        table = logits.log_softmax(-1)
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        rows = [
            [table[self.row[y[:t]], y[t]] if t < len(y) else nan for t in range(self.LENGTH)] for y in self.responses
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def probabilities(self, logprobs: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask == 1, logprobs, 0.0).sum(1).exp()


@pytest.fixture(scope="session")
def policy():
    return EnumerablePolicy()
