import pytest
from helpers.tiny_models import over

from nemo_edo.config import OptimizerConfig, SFTConfig


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(SFTConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3)))


def test_the_loss_is_the_mean_negative_log_likelihood_of_response_tokens(model, tiny):
    batch = tiny.random_batch()
    logprobs, entropies = over(model).logprobs(batch)
    terms, metrics = model.loss(logprobs, entropies, batch, 0.0)
    term = terms["sft"]
    assert metrics == {}
    assert float(term.sum) == pytest.approx(-float((logprobs * batch.mask).sum()), rel=1e-6)
    assert float(term.count) == model.loss_counts(batch)["sft"] == float(batch.mask.sum())
