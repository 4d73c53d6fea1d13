"""NeMo-Aligner's interface, the same for every model class."""

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import SFTConfig
from nemo_edo.types import GenerationRequest, SamplingParams, TrainingBatch

TEMPERATURE = 0.7  # of conftest.py


@pytest.fixture(scope="module")
def shared(make_model, training):
    return make_model(training)


@pytest.fixture(scope="module")
def start(shared):
    return shared.policy.snapshot()


@pytest.fixture
def model(shared, start):
    """With the starting weights and a fresh optimizer."""
    shared.policy.load(start)
    shared.start_training(10)
    shared.engine = None
    return shared


def has_gradient(model) -> bool:
    return any(bool(parameter.main_grad.any()) for chunk in model.built.chunks for parameter in chunk.parameters())


def test_a_training_step_goes_from_cleared_gradients_to_moved_weights(model, pairs, start):
    model.eval()
    model.get_loss_and_metrics(pairs, forward_only=False)
    assert has_gradient(model)
    model.prepare_for_training_step()
    assert not has_gradient(model) and all(chunk.training for chunk in model.built.chunks)

    loss, metrics = model.get_loss_and_metrics(pairs, forward_only=True)
    assert loss == metrics["loss"] and not has_gradient(model)
    assert model.get_loss_and_metrics(pairs, forward_only=False)[0] == pytest.approx(loss, rel=1e-6)
    assert has_gradient(model) and all(map(torch.equal, model.policy.snapshot(), start))

    report = model.finish_training_step()
    assert report["lr"] == model.settings.optimizer.lr and report["grad_norm"] > 0
    assert not any(map(torch.equal, model.policy.snapshot(), start))


def test_train_step_is_the_three_calls_in_a_row(model, pairs, start):
    metrics = step(model, pairs)
    with pytest.raises(ValueError, match="none of the batch's 8 rows has a response token"):
        step(model, pairs.with_fields(mask=torch.zeros_like(pairs.mask)))
    weights = model.policy.snapshot()
    model.policy.load(start)
    model.start_training(10)
    model.prepare_for_training_step()
    _, separate = model.get_loss_and_metrics(pairs, forward_only=False)
    assert metrics == {**separate, **model.finish_training_step()}
    assert all(map(torch.equal, model.policy.snapshot(), weights))


def test_a_validation_step_gives_the_metrics_and_changes_nothing(model, pairs, start):
    model.prepare_for_training_step()
    expected = model.get_loss_and_metrics(pairs, forward_only=True)[1]
    model.prepare_for_validation_step()
    assert not any(chunk.training for chunk in model.built.chunks)
    assert model.validation_step(pairs) == pytest.approx(expected, rel=1e-6)
    model.finish_validation_step()
    assert all(chunk.training for chunk in model.built.chunks)
    assert not has_gradient(model) and all(map(torch.equal, model.policy.snapshot(), start))


def test_infer_answers_every_request_from_the_current_weights(model, tiny, pairs):
    with pytest.raises(RuntimeError, match="set model.engine"):
        model.prepare_for_inference()
    model.engine = tiny.build_engine(model.policy)
    step(model, pairs)  # not the weights that the engine was built over
    requests = [GenerationRequest("problem", index, (3, 4, 5), seed=index) for index in range(3)]
    model.prepare_for_inference()
    assert not any(chunk.training for chunk in model.built.chunks)
    rollouts = model.infer(requests, SamplingParams(TEMPERATURE, 1.0, 4))
    model.finish_inference()
    assert all(chunk.training for chunk in model.built.chunks)
    assert [rollout.seed for rollout in rollouts] == [0, 1, 2]
    for rollout in rollouts:
        tokens = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        inference = TrainingBatch(tokens=tokens, mask=torch.ones(1, tokens.shape[1] - 1))
        logprobs = model.get_inference_log_probs(inference)[0, len(rollout.prompt_ids) - 1 :]
        torch.testing.assert_close(logprobs, torch.tensor(rollout.response_logprobs), rtol=0, atol=1e-4)


def test_the_loss_of_sft_is_the_mean_negative_log_likelihood_of_response_tokens(make_model, tiny):
    model, batch = make_model(SFTConfig()), tiny.random_batch()
    logprobs, entropies = over(model).logprobs(batch)
    terms, metrics = model.loss(logprobs, entropies, batch, 0.0)
    assert metrics == {}
    assert float(terms["sft"].sum) == pytest.approx(-float((logprobs * batch.mask).sum()), rel=1e-6)
    assert float(terms["sft"].count) == model.loss_counts(batch)["sft"] == float(batch.mask.sum())
