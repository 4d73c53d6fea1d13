import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from nemo_edo.generation import sampling as module
from nemo_edo.generation.sampling import choose_tokens, request_uniforms
from nemo_edo.types import SamplingParams

LOWEST, HIGHEST = 0.0, 1 - 2.0**-24
"""The first and the last of the float32 uniforms in [0, 1)."""


def sampling(temperature: float = 1.0, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=1)


def random_logits(rows: int, columns: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def sampled(logits: torch.Tensor, uniforms, params: SamplingParams) -> torch.Tensor:
    """Tokens for one row of logits at many uniforms."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float32)
    return choose_tokens(logits.expand(len(uniforms), -1), uniforms, params)[0]


def nucleus(probs: torch.Tensor, top_p: float) -> set[int]:
    """The smallest set of most likely tokens whose probability reaches top_p (Holtzman et al. 2020)."""
    kept, total = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if total >= top_p:
            break
        kept.add(token)
        total += float(probs[token])
    return kept


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.7])
def test_frequencies_are_the_probabilities_of_exactly_the_nucleus(temperature, top_p):
    logits = random_logits(1, 12, scale=1.5)
    uniforms = request_uniforms([42], 50_000)[0]
    found = torch.bincount(sampled(logits, uniforms, sampling(temperature, top_p)), minlength=12)
    probs = (logits[0].double() / temperature).softmax(-1)
    kept = sorted(nucleus(probs, top_p))
    assert found.sum() == found[kept].sum()
    expected = probs[kept] / probs[kept].sum() * len(uniforms)
    assert chisquare(found[kept].numpy(), expected.numpy()).pvalue > 0.01


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_keeps_exactly_the_nucleus(top_p, seed):
    logits = random_logits(1, 20, seed=seed)
    uniforms = torch.linspace(0, HIGHEST, 200_000)
    found = set(sampled(logits, uniforms, sampling(1.0, top_p)).tolist())
    probs = logits[0].softmax(-1)
    expected = nucleus(probs, top_p)
    assert found <= expected
    share = {token: float(probs[token] / probs[list(expected)].sum()) for token in expected}
    assert {token for token in expected if share[token] > 1e-5} <= found  # rarer ones fall between the uniforms


@pytest.mark.parametrize("params", [sampling(), sampling(0.5), sampling(1.0, 0.9)], ids=str)
@pytest.mark.parametrize("columns", [7, 1000, 30_000])
def test_tokens_of_probability_zero_are_never_chosen(params, columns):
    """At the lowest and highest uniforms too, whatever rounding does to sums; the ends of the vocabulary are zero."""
    logits = random_logits(16, columns)
    logits[:, :: 3] = -torch.inf
    logits[:, -2:] = -1e4  # exp underflows to 0
    logits[0, :] = -torch.inf
    logits[0, columns // 2] = 0.0
    possible = (logits / params.temperature).softmax(-1) > 0
    for uniform in (LOWEST, 1e-30, 0.5, 1 - 2.0**-20, HIGHEST):
        tokens, logprobs = choose_tokens(logits, torch.full((16,), uniform), params)
        assert possible.gather(1, tokens[:, None]).all()
        assert torch.isfinite(logprobs).all()
        assert tokens[0] == columns // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("params", "scale"), [
    (sampling(), 1.0), (sampling(0.7), 0.7), (sampling(0.7, 0.5), 0.7), (sampling(0.0), 1.0)], ids=str)
def test_logprobs_are_those_of_the_temperature_scaled_softmax_before_any_cut(params, scale, dtype):
    logits = random_logits(40, 25).to(dtype)
    tokens, logprobs = choose_tokens(logits, request_uniforms([3], 40)[0], params)
    expected = torch.log_softmax(logits.double() / scale, dim=-1).gather(1, tokens[:, None]).squeeze(1)
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 28, 29])
def test_uniforms_are_those_of_a_separate_generator_per_seed_whatever_the_other_seeds(length):
    seeds = [0, 7, 2**63, 2**64 - 1, 2**64, 2**100 + 5]
    own = [np.random.Generator(np.random.Philox(key=seed)).random(length, dtype=np.float32) for seed in seeds]
    assert request_uniforms(seeds, length).tolist() == np.stack(own).tolist()
    assert len({tuple(row) for row in np.stack(own).tolist()}) == len(seeds)


@pytest.mark.parametrize(("scale", "sorted_whole"), [(6.0, 0), (0.5, 1)])
def test_the_nucleus_of_the_likely_tokens_is_that_of_a_whole_sort_with_its_order_among_equals(
        monkeypatch, scale, sorted_whole):
    """Logits in steps, so that many are equal, also to the least likely of those that are looked at."""
    logits = (scale * random_logits(30, 200, scale=1.0)).round()
    uniforms = request_uniforms([3], 30)[0]
    monkeypatch.setattr(module, "LIKELY", 200)
    expected = choose_tokens(logits, uniforms, sampling(1.0, 0.8))
    monkeypatch.setattr(module, "LIKELY", 40)
    sizes, sort = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda x, **how: sizes.append(x.shape[1]) or sort(x, **how))
    found = choose_tokens(logits, uniforms, sampling(1.0, 0.8))
    assert sizes.count(200) == sorted_whole
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
