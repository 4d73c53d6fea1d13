"""NeMo-Aligner's interface, the same for every model class."""

import pytest
import torch

from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, SFTConfig
from nemo_edo.losses import dpo_loss, exploration_term, grpo_loss, sequence_logprobs, sft_loss
from nemo_edo.types import GenerationRequest, SamplingParams

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


@pytest.fixture(scope="module")
def expected_loss(tiny, tiny_qwen2, batch, kind) -> float:
    with torch.no_grad():
        log_probs, _ = tiny.dense_log_probs(tiny.load_dense(tiny_qwen2), batch.tokens, TEMPERATURE)
    if kind == "sft":
        return float(sft_loss(log_probs, batch.mask).mean())
    if kind == "idpo":
        of_rows = [sequence_logprobs(values, batch.mask) for values in (log_probs, batch.ref_logprobs)]
        policy_and_ref = [values[batch.pair_role == role] for values in of_rows for role in (1, -1)]
        explored = batch.mask * batch.exploration_weights[:, None]
        exploration = exploration_term(log_probs, batch.old_logprobs, explored, reduction="seq-sum")
        return float(dpo_loss(*policy_and_ref, beta=0.1).mean() + 0.3 * exploration.mean())
    terms = (log_probs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.mask, CONFIGS["grpo"])
    return float(grpo_loss(*terms)[0].mean())


def has_gradient(model) -> bool:
    return any(bool(parameter.main_grad.any()) for chunk in model.built.chunks for parameter in chunk.parameters())


# --- training -----------------------------------------------------------------------------------------------------


def test_get_loss_and_metrics_gives_the_dense_loss_twice_over(model, batch, expected_loss):
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert has_gradient(model)


def test_prepare_for_training_step_clears_gradients_and_sets_the_training_mode(model, batch):
    model.eval()
    model.get_loss_and_metrics(batch, forward_only=False)
    model.prepare_for_training_step()
    assert not has_gradient(model)
    assert all(chunk.training for chunk in model.built.chunks)


def test_forward_only_gives_the_same_loss_and_no_gradient(model, batch, expected_loss):
    model.prepare_for_training_step()
    loss, _ = model.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert not has_gradient(model)


def test_finish_training_step_moves_the_weights_and_reports_norm_and_rate(model, batch, start):
    model.prepare_for_training_step()
    model.get_loss_and_metrics(batch, forward_only=False)
    assert all(map(torch.equal, model.policy.snapshot(), start))
    report = model.finish_training_step()
    assert report["lr"] == OPTIMIZER.lr
    assert report["grad_norm"] > 0
    assert not any(map(torch.equal, model.policy.snapshot(), start))


def test_train_step_is_the_three_calls_in_a_row(model, batch, start):
    metrics = model.train_step(batch)
    weights = model.policy.snapshot()
    model.policy.load(start)
    model.start_training(10)
    model.prepare_for_training_step()
    _, separate = model.get_loss_and_metrics(batch, forward_only=False)
    assert metrics == {**separate, **model.finish_training_step()}
    assert all(map(torch.equal, model.policy.snapshot(), weights))


def test_start_training_takes_another_optimizer_config_where_one_is_given(model, batch):
    model.start_training(10, OptimizerConfig(lr=7e-4))
    assert model.train_step(batch)["lr"] == 7e-4


# --- validation ---------------------------------------------------------------------------------------------------


def test_a_validation_step_gives_the_metrics_and_changes_nothing(model, batch, start, expected_loss):
    model.prepare_for_training_step()
    model.prepare_for_validation_step()
    assert not any(chunk.training for chunk in model.built.chunks)
    metrics = model.validation_step(batch)
    model.finish_validation_step()
    assert all(chunk.training for chunk in model.built.chunks)
    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert not has_gradient(model)
    assert all(map(torch.equal, model.policy.snapshot(), start))


# --- inference ----------------------------------------------------------------------------------------------------


def test_prepare_for_inference_without_an_engine_is_an_error_that_says_what_to_set(model):
    with pytest.raises(RuntimeError, match="no generation engine: set model.engine"):
        model.prepare_for_inference()


def test_infer_answers_every_request_from_the_current_weights(model, tiny, batch):
    model.engine = tiny.build_engine(model.policy)
    model.train_step(batch)  # not the weights that the engine was built over
    requests = [GenerationRequest("problem", index, (3, 4, 5), seed=index) for index in range(3)]
    model.prepare_for_inference()
    assert not any(chunk.training for chunk in model.built.chunks)
    rollouts = model.infer(requests, SamplingParams(TEMPERATURE, 1.0, 4))
    model.finish_inference()
    assert all(chunk.training for chunk in model.built.chunks)
    assert [rollout.seed for rollout in rollouts] == [0, 1, 2]
    for rollout in rollouts:
        tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        inference = tiny.random_batch(rows=1, length=tokens.shape[1])
        inference = type(inference)(tokens=tokens, mask=torch.ones_like(tokens[:, 1:], dtype=torch.float32))
        log_probs = model.get_inference_log_probs(inference)[0, len(rollout.prompt_ids) - 1 :]
        torch.testing.assert_close(log_probs, torch.tensor(rollout.response_logprobs), rtol=0, atol=1e-4)


def test_get_inference_log_probs_are_those_of_transformers(model, tiny, tiny_qwen2, batch):
    with torch.no_grad():
        expected, entropies = tiny.dense_log_probs(tiny.load_dense(tiny_qwen2), batch.tokens, TEMPERATURE)
    counts = batch.mask.flip(1).cumsum(1).flip(1) > 0  # up to the last response token; what stands behind is padding
    for found in (model.get_inference_log_probs(batch), model.log_probs(batch)[0]):
        torch.testing.assert_close(found * counts, expected * counts, rtol=0, atol=1e-4)
    torch.testing.assert_close(model.log_probs(batch)[1] * counts, entropies * counts, rtol=0, atol=1e-4)


# --- NeMo ---------------------------------------------------------------------------------------------------------


def test_it_is_a_model_of_nemo_whose_parameters_are_megatrons(model):
    from nemo.core.classes import ModelPT

    assert isinstance(model, ModelPT)
    theirs = {id(parameter) for parameter in model.parameters()}
    assert theirs == {id(parameter) for chunk in model.built.chunks for parameter in chunk.parameters()}
    assert theirs


def test_a_training_config_with_an_unknown_key_is_an_error_that_names_it(model):
    from omegaconf import OmegaConf, errors

    settings = OmegaConf.create(OmegaConf.to_container(model.cfg))
    settings.training.alhpa = 0.1
    with pytest.raises(errors.ConfigKeyError, match="alhpa"):
        type(model)(settings)
