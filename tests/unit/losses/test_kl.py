import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import kl_per_token

few = settings(max_examples=25, deadline=None, derandomize=True)
log_probabilities = st.floats(-40, 0, width=32)


@few
@given(log_p=log_probabilities, log_q=log_probabilities)
def test_each_estimator_is_its_formula(log_p, log_q):
    x, y = torch.tensor([log_p], dtype=torch.float64), torch.tensor([log_q], dtype=torch.float64)
    d = x - y
    torch.testing.assert_close(kl_per_token(x, y, "k1"), d)
    torch.testing.assert_close(kl_per_token(x, y, "k2"), d**2 / 2)
    torch.testing.assert_close(kl_per_token(x, y, "k3"), torch.exp(-d) - 1 + d, rtol=1e-12, atol=1e-14)
    for name in ("k1", "k3"):
        assert torch.equal(kl_per_token(x, y, f"{name}+"), kl_per_token(x, y, name))


@few
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(-8, 1))
def test_k3_is_never_negative_in_single_precision(seed, size):
    d = 10**size * torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
    assert (kl_per_token(d, torch.zeros_like(d), "k3") >= 0).all()


@few
@given(seed=st.integers(0, 2**32 - 1))
def test_expected_values_and_gradients_are_those_of_the_kl_that_the_docstring_names(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), ref_logits.log_softmax(0)
    kl = (log_p.exp() * (log_p - log_q)).sum()
    (reverse,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (forward,) = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), logits, retain_graph=True)
    gradients = {"k1": torch.zeros_like(logits), "k2": reverse, "k3": forward, "k1+": reverse, "k3+": reverse}
    for estimator, gradient in gradients.items():
        expected = (log_p.detach().exp() * kl_per_token(log_p, log_q, estimator)).sum()
        torch.testing.assert_close(torch.autograd.grad(expected, logits, retain_graph=True)[0], gradient)
        if estimator != "k2":  # which is biased
            torch.testing.assert_close(expected, kl)
