import pytest
import torch
from helpers.synchronisations import counted

from nemo_edo.losses import (
    DPOLossConfig,
    GRPOLossConfig,
    NotFinite,
    ed_idpo_loss,
    entropy_bonus,
    exploration_term,
    grpo_loss,
    one_check,
    reduce_tokens,
    sft_loss,
    without_checks,
)

EVERYTHING = GRPOLossConfig(sampler_correction="tis", log_ratio_floor=-0.1, exploration_control="noise", alpha=1.0,
                            covariance_control="kl-cov", exploration_tokens=3, kl_importance="ratio")
PREFERENCES = DPOLossConfig(alpha=1.0, log_ratio_floor=-0.1)
OLD = -torch.linspace(0.1, 2, 24).view(4, 6)
MASK = torch.ones(4, 6).tril(2)


def grpo(logprobs):
    loss, metrics = grpo_loss(logprobs, OLD, OLD - 0.1, torch.tensor([1.0, -1.0, 0.5, 0.0]), MASK, EVERYTHING,
                              sampler_logprobs=OLD + 0.05, selected=OLD > -1,
                              exploration_factors=torch.tensor([1.0, 0.5, 0.0, 1.0]))
    return torch.stack([loss.mean(), *(term.mean() for term in metrics.values())])


def idpo(logprobs):
    preference, exploration, metrics = ed_idpo_loss(
        logprobs[:, 0], logprobs[:, 1], OLD[:, 0], OLD[:, 1], logprobs, OLD, MASK, PREFERENCES)
    return torch.stack([term.mean() for term in (preference, exploration, *metrics.values())])


LOSSES = {
    "grpo": grpo, "idpo": idpo, "sft": lambda x: sft_loss(x, MASK).mean(),
    "term": lambda x: exploration_term(x, OLD, MASK, reduction="seq-sum").mean(),
    "entropy": lambda x: entropy_bonus(-x, MASK, reduction="token-mean").mean(),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@pytest.fixture
def logprobs():
    torch.manual_seed(0)
    return (OLD - 0.1 * torch.rand(4, 6)).requires_grad_()


@every_loss
def test_a_loss_waits_for_the_device_once_and_never_without_checks(loss, logprobs):
    with counted() as asked:
        loss(logprobs)
    assert sum(asked.values()) == 1, asked
    with counted() as asked, without_checks():
        loss(logprobs)
    assert not asked


def test_several_losses_are_checked_together_and_the_first_fault_is_named(logprobs):
    with counted() as asked, one_check():
        for loss in LOSSES.values():
            loss(logprobs)
    assert sum(asked.values()) == 1, asked
    broken = OLD.clone()
    broken[2, 3] = torch.nan
    with pytest.raises(NotFinite, match=r"^logprobs_BT has NaN .* first at \[2, 3\]"), one_check():
        sft_loss(OLD, MASK)
        sft_loss(broken, MASK)
        sft_loss(OLD, 2 * MASK)


@every_loss
def test_losses_compile_without_a_graph_break(loss, logprobs):
    expected = loss(logprobs)
    found = torch.compile(loss, fullgraph=True, backend="eager")(logprobs)
    torch.testing.assert_close(found, expected)
    of_found, of_expected = (torch.autograd.grad(x.sum(), logprobs)[0] for x in (found, expected))
    torch.testing.assert_close(of_found, of_expected)


@every_loss
def test_losses_run_under_vmap_without_checks(loss, logprobs):
    batches = torch.stack([logprobs, logprobs - 0.3])
    with without_checks():
        found = torch.func.vmap(loss)(batches)
    torch.testing.assert_close(found, torch.stack([loss(x) for x in batches]))


def test_without_checks_a_value_that_does_not_fit_is_not_found_but_a_shape_is():
    with without_checks():
        assert reduce_tokens(OLD * torch.nan, MASK, "token-mean").sum.isnan()
        with pytest.raises(ValueError, match="^values_BT has shape"):
            reduce_tokens(OLD[1:], MASK, "token-mean")
