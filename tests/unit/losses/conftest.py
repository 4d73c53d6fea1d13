from types import SimpleNamespace

import pytest
import torch


def _random_batch(seed: int, sequences: int = 6, tokens: int = 5) -> SimpleNamespace:
    """Float64 log-probabilities, advantages and masks of random lengths, some of them 0; the first row is full."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, tokens + 1, (sequences,), generator=generator)
    lengths[0] = tokens
    old = -normal(sequences, tokens).abs() - 0.1
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
