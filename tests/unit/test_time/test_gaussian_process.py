import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import PosteriorVariance


def embeddings(seed, count, dim, scale=1.0, kind="independent"):
    """[N, D] float64 with norms of about ``scale``; the collinear ones differ from each other by 1e-4 of it."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    direction = torch.randn(dim, generator=generator, dtype=torch.float64)
    return scale * (noise if kind == "independent" else direction / direction.norm() + 1e-4 * noise)


def regression(observed, phi, prior_precision, noise, targets):
    """(variance with noise, mean) of Bayesian linear regression, as least squares on the observations stacked on the
    prior's pseudo-observations: another route than the class, and exact where A itself is too ill-conditioned."""
    dim = phi.shape[-1]
    prior = math.sqrt(prior_precision) * torch.eye(dim, dtype=torch.float64)
    q, r = torch.linalg.qr(torch.cat([observed / math.sqrt(noise), prior]))
    variance = torch.linalg.solve_triangular(r.mT, phi.mT, upper=False).square().sum(0) + noise
    rhs = q.mT @ torch.cat([targets / math.sqrt(noise), torch.zeros(dim, dtype=torch.float64)])
    return variance, phi @ torch.linalg.solve_triangular(r, rhs[:, None], upper=True)[:, 0]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), precision=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
       noise=st.sampled_from([1e-6, 1e-2, 1.0, 10.0]), scale=st.sampled_from([0.1, 1.0, 1e3]),
       kind=st.sampled_from(["independent", "collinear"]))
def test_variance_and_mean_are_those_of_least_squares_over_the_whole_range(seed, precision, noise, scale, kind):
    observed, phi = embeddings(seed, 60, 6, scale, kind), embeddings(seed + 1, 8, 6, scale)
    targets = observed @ embeddings(seed + 2, 1, 6)[0] / scale + embeddings(seed + 3, 60, 1)[:, 0]
    memory = PosteriorVariance(6, precision, noise)
    for rows in (0, slice(1, 20), slice(20, 60)):  # a vector and blocks
        memory.observe(observed[rows], targets[rows])
    variance, mean = regression(observed, phi, precision, noise, targets)
    assert memory.count == 60
    torch.testing.assert_close(memory.variance(phi), variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(memory.mean(phi), mean, rtol=1e-8, atol=1e-8 * float(mean.abs().max()))


def test_float32_results_stay_exact_after_10000_long_nearly_collinear_embeddings():
    observed = embeddings(0, 10_000, 8, 1e3, "collinear").float()
    phi = torch.cat([observed[:5], embeddings(1, 5, 8, 1e3).float()])
    memory = PosteriorVariance(8, 1e-6, 1e-6, dtype=torch.float32)
    memory.observe(observed)
    expected, _ = regression(observed.double(), phi.double(), 1e-6, 1e-6, torch.zeros(10_000).double())
    variance = memory.variance(phi)
    assert variance.dtype == torch.float32
    torch.testing.assert_close(variance, expected.float(), rtol=2e-7, atol=0)
    assert (variance >= 1e-6).all()


def test_before_any_observation_variance_and_mean_are_the_prior():
    phi = embeddings(0, 3, 4)
    memory = PosteriorVariance(4, 0.25, 0.5)
    prior = phi.square().sum(1) / 0.25 + 0.5
    torch.testing.assert_close(memory.variance(phi), prior)
    torch.testing.assert_close(memory.variance(phi, include_noise=False), prior - 0.5)
    torch.testing.assert_close(memory.mean(phi), torch.zeros(3, dtype=torch.float64))
    memory.observe(embeddings(1, 3, 4), torch.ones(3))
    memory.reset()
    assert memory.count == 0
    torch.testing.assert_close(memory.variance(phi), prior)
    memory.observe(phi)  # after a reset, observations without targets are fine again
    assert (memory.variance(phi) < prior).all()


def test_targets_fit_their_observations_and_come_with_all_of_them_or_with_none():
    for target in (torch.ones(2), torch.ones(1, 3), 1.0, torch.tensor([1.0, math.nan, 0.0])):
        with pytest.raises(ValueError, match="target"):
            PosteriorVariance(3, 1.0, 1.0).observe(torch.eye(3), target)
    without, with_target = PosteriorVariance(2, 1.0, 1.0), PosteriorVariance(2, 1.0, 1.0)
    without.observe(torch.ones(2))
    with_target.observe(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="target is given"):
        without.observe(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="target is missing"):
        with_target.observe(torch.ones(2))
    with pytest.raises(ValueError, match="no mean"):
        without.mean(torch.ones(2))
