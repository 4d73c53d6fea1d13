"""NeMo-Aligner's interface, the same for every model class."""

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, SFTConfig
from nemo_edo.types import GenerationRequest, SamplingParams, TrainingBatch

OPTIMIZER = OptimizerConfig(lr=1e-3)
TEMPERATURE = 0.7  # of conftest.py
CONFIGS = {
    "sft": SFTConfig(micro_batch_size=2, optimizer=OPTIMIZER),
    "grpo": GRPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, exploration_coefficient=0.3, beta=0.1),
    "idpo": IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, exploration_coefficient=0.3, beta=0.1),
}


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(make_model, kind):
    return make_model(CONFIGS[kind])


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


@pytest.fixture(scope="module")
def batch(tiny, pairs, kind):
    return pairs if kind == "idpo" else tiny.random_batch(rows=5)


def has_gradient(model) -> bool:
    return any(bool(parameter.main_grad.any()) for chunk in model.built.chunks for parameter in chunk.parameters())


def test_a_training_step_goes_from_cleared_gradients_to_moved_weights(model, batch, start):
    model.eval()
    model.get_loss_and_metrics(batch, forward_only=False)
    assert has_gradient(model)
    model.prepare_for_training_step()
    assert not has_gradient(model) and all(chunk.training for chunk in model.built.chunks)

    loss, metrics = model.get_loss_and_metrics(batch, forward_only=True)
    assert loss == metrics["loss"] and not has_gradient(model)
    assert model.get_loss_and_metrics(batch, forward_only=False)[0] == pytest.approx(loss, rel=1e-6)
    assert has_gradient(model) and all(map(torch.equal, model.policy.snapshot(), start))

    report = model.finish_training_step()
    assert report["lr"] == OPTIMIZER.lr and report["grad_norm"] > 0
    assert not any(map(torch.equal, model.policy.snapshot(), start))


def test_train_step_is_the_three_calls_in_a_row(model, batch, start):
    metrics = step(model, batch)
    with pytest.raises(ValueError, match="none of the batch's [58] rows has a response token"):
        step(model, batch.with_fields(mask=torch.zeros_like(batch.mask)))
    weights = model.policy.snapshot()
    model.policy.load(start)
    model.start_training(10)
    model.prepare_for_training_step()
    _, separate = model.get_loss_and_metrics(batch, forward_only=False)
    assert metrics == {**separate, **model.finish_training_step()}
    assert all(map(torch.equal, model.policy.snapshot(), weights))


def test_a_validation_step_gives_the_metrics_and_changes_nothing(model, batch, start):
    model.prepare_for_training_step()
    expected = model.get_loss_and_metrics(batch, forward_only=True)[1]
    model.prepare_for_validation_step()
    assert not any(chunk.training for chunk in model.built.chunks)
    assert model.validation_step(batch) == pytest.approx(expected, rel=1e-6)
    model.finish_validation_step()
    assert all(chunk.training for chunk in model.built.chunks)
    assert not has_gradient(model) and all(map(torch.equal, model.policy.snapshot(), start))


def test_infer_answers_every_request_from_the_current_weights(model, tiny, batch):
    with pytest.raises(RuntimeError, match="set model.engine"):
        model.prepare_for_inference()
    model.engine = tiny.build_engine(model.policy)
    step(model, batch)  # not the weights that the engine was built over
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


def test_it_is_a_model_of_nemo_whose_parameters_are_megatrons(model):
    from nemo.core.classes import ModelPT

    assert isinstance(model, ModelPT)
    own, megatrons = ({id(parameter) for module in modules for parameter in module.parameters()}
                      for modules in ([model], model.built.chunks))
    assert own == megatrons != set()


def test_a_training_config_with_an_unknown_key_is_an_error_that_names_it(model):
    from omegaconf import OmegaConf, errors

    settings = OmegaConf.create(OmegaConf.to_container(model.cfg))
    settings.training.alhpa = 0.1
    with pytest.raises(errors.ConfigKeyError, match="alhpa"):
        type(model)(settings)


def test_the_loss_of_sft_is_the_mean_negative_log_likelihood_of_response_tokens(make_model, tiny):
    model, batch = make_model(CONFIGS["sft"]), tiny.random_batch()
    logprobs, entropies = over(model).logprobs(batch)
    terms, metrics = model.loss(logprobs, entropies, batch, 0.0)
    assert metrics == {}
    assert float(terms["sft"].sum) == pytest.approx(-float((logprobs * batch.mask).sum()), rel=1e-6)
    assert float(terms["sft"].count) == model.loss_counts(batch)["sft"] == float(batch.mask.sum())
