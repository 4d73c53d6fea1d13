import pytest

from nemo_edo.config import OptimizerConfig, SFTConfig
from nemo_edo.losses import sft_loss


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(SFTConfig(micro_batch_size=2, optimizer=OptimizerConfig(lr=1e-3)))


def test_the_loss_is_the_mean_negative_log_likelihood_of_response_tokens(model, tiny):
    batch = tiny.random_batch()
    log_probs, entropies = model.log_probs(batch)
    terms, metrics = model.loss(log_probs, entropies, batch)
    term = terms["sft"]
    assert metrics == {}
    assert float(term.sum) == pytest.approx(-float((log_probs * batch.mask).sum()), rel=1e-6)
    assert float(term.count) == model.loss_counts(batch)["sft"] == float(batch.mask.sum())


def test_training_steps_lower_the_loss(model, tiny):
    batch = tiny.random_batch()
    model.start_training(8)
    losses = [model.train_step(batch)["loss"] for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    after = float(sft_loss(model.get_inference_log_probs(batch), batch.mask).mean())
    assert after < losses[-1] < 0.5 * losses[0]
