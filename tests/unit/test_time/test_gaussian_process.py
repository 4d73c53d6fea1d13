import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import PosteriorVariance

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
precisions = st.sampled_from([1e-6, 1e-2, 1.0, 1e3])
noises = st.sampled_from([1e-6, 1e-2, 1.0, 10.0])
scales = st.sampled_from([0.1, 1.0, 1e3])
kinds = st.sampled_from(["independent", "collinear"])


def embeddings(seed, count, dim, scale=1.0, kind="independent"):
    """[N, D] float64 with norms of about ``scale``; the collinear ones differ from each other by 1e-4 of it."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    direction = torch.randn(dim, generator=generator, dtype=torch.float64)
    return scale * (noise if kind == "independent" else direction / direction.norm() + 1e-4 * noise)


def regression(observed, phi, prior_precision, noise, targets=None):
    """(variance with noise, mean) of Bayesian linear regression, as least squares on the observations stacked on the
    prior's pseudo-observations: another route than the class, and exact where A itself is too ill-conditioned."""
    dim = phi.shape[-1]
    prior = math.sqrt(prior_precision) * torch.eye(dim, dtype=torch.float64)
    q, r = torch.linalg.qr(torch.cat([observed / math.sqrt(noise), prior]))
    variance = torch.linalg.solve_triangular(r.mT, phi.mT, upper=False).square().sum(0) + noise
    targets = torch.zeros(len(observed), dtype=torch.float64) if targets is None else targets
    rhs = q.mT @ torch.cat([targets / math.sqrt(noise), torch.zeros(dim, dtype=torch.float64)])
    return variance, phi @ torch.linalg.solve_triangular(r, rhs[:, None], upper=True)[:, 0]


def test_the_variance_is_the_direct_inverse_of_the_precision_after_1000_observations():
    observed, phi = embeddings(0, 1000, 16), embeddings(1, 20, 16)
    memory = PosteriorVariance(16, 0.5, 0.1)
    memory.observe(observed)
    precision = observed.mT @ observed / 0.1 + 0.5 * torch.eye(16, dtype=torch.float64)
    expected = (phi @ torch.linalg.inv(precision) * phi).sum(1) + 0.1
    torch.testing.assert_close(memory.variance(phi), expected, rtol=1e-12, atol=0)
    without_noise = memory.variance(phi, include_noise=False)
    torch.testing.assert_close(without_noise, expected - 0.1, rtol=1e-11, atol=0)
    assert memory.count == 1000


@few
@given(seed=seeds, precision=precisions, noise=noises, scale=scales, kind=kinds)
def test_variance_and_mean_are_those_of_least_squares_over_the_whole_range(seed, precision, noise, scale, kind):
    observed, phi = embeddings(seed, 60, 6, scale, kind), embeddings(seed + 1, 8, 6, scale)
    targets = observed @ embeddings(seed + 2, 1, 6)[0] / scale + embeddings(seed + 3, 60, 1)[:, 0]
    memory = PosteriorVariance(6, precision, noise)
    memory.observe(observed, targets)
    variance, mean = regression(observed, phi, precision, noise, targets)
    torch.testing.assert_close(memory.variance(phi), variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(memory.mean(phi), mean, rtol=1e-8, atol=1e-8 * float(mean.abs().max()))


def test_float32_results_stay_exact_after_10000_long_nearly_collinear_embeddings():
    observed = embeddings(0, 10_000, 8, 1e3, "collinear").float()
    phi = torch.cat([observed[:5], embeddings(1, 5, 8, 1e3).float()])
    memory = PosteriorVariance(8, 1e-6, 1e-6, dtype=torch.float32)
    memory.observe(observed)
    expected, _ = regression(observed.double(), phi.double(), 1e-6, 1e-6)
    variance = memory.variance(phi)
    assert variance.dtype == torch.float32
    torch.testing.assert_close(variance, expected.float(), rtol=2e-7, atol=0)
    assert (variance >= 1e-6).all()


@few
@given(seed=seeds, precision=precisions, noise=noises, scale=scales, kind=kinds)
def test_an_observation_never_raises_a_variance(seed, precision, noise, scale, kind):
    phi = torch.cat([embeddings(seed, 6, 5, scale, kind), embeddings(seed + 1, 6, 5, scale)])
    memory = PosteriorVariance(5, precision, noise)
    before = memory.variance(phi)
    for phi_D in embeddings(seed + 2, 12, 5, scale, kind):
        memory.observe(phi_D)
        after = memory.variance(phi)
        assert (after <= before * (1 + 1e-9)).all() and (after >= noise).all()
        before = after


@few
@given(seed=seeds, precision=precisions, noise=noises, scale=scales)
def test_observing_phi_itself_shrinks_its_variance_by_the_closed_form(seed, precision, noise, scale):
    memory = PosteriorVariance(5, precision, noise)
    memory.observe(embeddings(seed, 4, 5, scale))
    phi = embeddings(seed + 1, 1, 5, scale)[0]
    before = memory.variance(phi, include_noise=False)
    memory.observe(phi)
    expected = before * noise / (noise + before)
    torch.testing.assert_close(memory.variance(phi, include_noise=False), expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(memory.variance(phi), expected + noise, rtol=1e-8, atol=0)


@few
@given(seed=seeds, precision=precisions, noise=noises)
def test_orthogonal_directions_keep_their_prior_variance(seed, precision, noise):
    basis, _ = torch.linalg.qr(embeddings(seed, 6, 6))
    memory = PosteriorVariance(6, precision, noise)
    memory.observe(basis[:4])
    torch.testing.assert_close(
        memory.variance(basis[4:]), torch.full((2,), 1 / precision + noise, dtype=torch.float64), rtol=1e-9, atol=0
    )


@few
@given(seed=seeds, precision=precisions, noise=noises, scale=scales, kind=kinds)
def test_neither_order_nor_blocks_matter(seed, precision, noise, scale, kind):
    observed, phi = embeddings(seed, 12, 5, scale, kind), embeddings(seed + 1, 7, 5, scale)
    shuffled = observed[torch.randperm(12, generator=torch.Generator().manual_seed(seed))]
    block, singly = PosteriorVariance(5, precision, noise), PosteriorVariance(5, precision, noise)
    block.observe(observed)
    for phi_D in shuffled:
        singly.observe(phi_D)
    assert block.count == singly.count == 12
    torch.testing.assert_close(block.variance(phi), singly.variance(phi), rtol=1e-8, atol=0)
    one_by_one = torch.stack([block.variance(phi_D) for phi_D in phi])
    torch.testing.assert_close(one_by_one, block.variance(phi), rtol=1e-9, atol=0)


def test_before_any_observation_variance_and_mean_are_the_prior():
    phi = embeddings(0, 3, 4)
    memory = PosteriorVariance(4, 0.25, 0.5)
    prior = phi.square().sum(1) / 0.25 + 0.5
    torch.testing.assert_close(memory.variance(phi), prior)
    torch.testing.assert_close(memory.mean(phi), torch.zeros(3, dtype=torch.float64))
    memory.observe(embeddings(1, 3, 4), torch.ones(3))
    memory.reset()
    assert memory.count == 0
    torch.testing.assert_close(memory.variance(phi), prior)
    memory.observe(phi)  # after a reset, observations without targets are fine again
    assert (memory.variance(phi) < prior).all()


def test_a_vector_gives_a_scalar_and_an_empty_block_changes_nothing():
    memory = PosteriorVariance(3, 1.0, 1.0)
    phi = torch.tensor([3.0, 0.0, 4.0])
    assert memory.variance(phi).shape == memory.mean(phi).shape == ()
    assert memory.variance(phi).item() == 26.0
    memory.observe(torch.zeros(0, 3))
    memory.observe(torch.zeros(3))  # tells nothing
    assert memory.variance(phi).item() == 26.0 and memory.count == 1
    assert memory.variance(torch.zeros(0, 3)).shape == (0,)


def test_one_target_moves_the_mean_by_the_gain():
    memory = PosteriorVariance(2, 1.0, 0.5)
    phi = torch.tensor([1.0, 2.0], dtype=torch.float64)
    memory.observe(phi, 3.0)
    assert memory.mean(phi).item() == pytest.approx(3.0 * 5 / 5.5)
    assert memory.mean(torch.tensor([2.0, -1.0])).item() == pytest.approx(0.0, abs=1e-15)


def test_half_precision_embeddings_and_gradients_stay_outside():
    phi = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    memory = PosteriorVariance(2, 1.0, 1.0)
    memory.observe(phi, phi.sum())
    variance = memory.variance(phi)
    assert variance.dtype == torch.float64 and not variance.requires_grad and not memory.mean(phi).requires_grad
    assert variance.item() == pytest.approx(5 / 6 + 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 1.0, 1.0), "dim"), ((2, 0.0, 1.0), "prior_precision"), ((2, math.inf, 1.0), "prior_precision"),
     ((2, math.nan, 1.0), "prior_precision"), ((2, 1.0, -1.0), "noise_variance"), ((2, 1.0, 0.0), "noise_variance")],
)
def test_settings_out_of_range_are_errors(arguments, named):
    with pytest.raises(ValueError, match=named):
        PosteriorVariance(*arguments)


@pytest.mark.parametrize("phi", [torch.zeros(4), torch.zeros(2, 4), torch.zeros(1, 2, 3), torch.tensor(1.0),
                                 torch.tensor([1.0, math.nan, 0.0]), torch.tensor([[1.0, 0.0, math.inf]])])
def test_embeddings_that_do_not_fit_are_errors(phi):
    memory = PosteriorVariance(3, 1.0, 1.0)
    for method in (memory.observe, memory.variance, memory.mean):
        with pytest.raises(ValueError, match="phi has"):
            method(phi)
    assert memory.count == 0


def test_an_embedding_whose_square_overflows_is_an_error():
    with pytest.raises(ValueError, match="overflows"):
        PosteriorVariance(2, 1.0, 1.0).observe(torch.tensor([1e200, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("target", [torch.ones(2), torch.ones(1, 3), 1.0, torch.tensor([1.0, math.nan, 0.0])])
def test_targets_that_do_not_fit_are_errors(target):
    with pytest.raises(ValueError, match="target"):
        PosteriorVariance(3, 1.0, 1.0).observe(torch.eye(3), target)


def test_targets_come_with_all_observations_or_with_none():
    without, with_target = PosteriorVariance(2, 1.0, 1.0), PosteriorVariance(2, 1.0, 1.0)
    without.observe(torch.ones(2))
    with_target.observe(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="target is given"):
        without.observe(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="target is missing"):
        with_target.observe(torch.ones(2))
    with pytest.raises(ValueError, match="no mean"):
        without.mean(torch.ones(2))


def test_lists_and_numpy_arrays_are_taken_as_tensors_are():
    results = []
    for convert in (torch.tensor, np.array, list):
        posterior = PosteriorVariance(2, 0.5, 0.25)
        posterior.observe(convert([1.0, 2.0]), 3.0)
        results.append((posterior.variance(convert([2.0, 1.0])), posterior.mean(convert([2.0, 1.0]))))
    assert results[0] == results[1] == results[2]
