"""The model classes with LoRA: what they train, and what their reference is."""

from dataclasses import replace

import pytest
import torch

from nemo_edo.config import GRPOConfig, IDPOConfig, LoRAConfig, OptimizerConfig, SFTConfig

LORA = LoRAConfig(rank=4, alpha=8.0)
OPTIMIZER = OptimizerConfig(lr=5e-3, adam_eps=1e-3)
SFT = SFTConfig(micro_batch_size=2, optimizer=OPTIMIZER)
EXPLORING = [
    GRPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, alpha=0.25),
    IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, alpha=0.25),
]


def name(config) -> str:
    return type(config).__name__


def trained(model, batch, steps: int = 3):
    model.start_training(steps)
    for _ in range(steps):
        model.train_step(batch)
    return model


@pytest.fixture(scope="module")
def warmed_up(make_model, pairs):
    """A model whose warm-up has trained adapters."""
    return trained(make_model(SFT, LORA), pairs)


@pytest.fixture(scope="module", params=EXPLORING, ids=name)
def arm(request, make_model, warmed_up):
    """A function that makes an arm's model from the warm-up's weights, as from its checkpoint."""

    def make(**settings):
        model = make_model(replace(request.param, **settings), LORA)
        model.policy.load(warmed_up.policy.snapshot())
        model.freeze_reference()
        return model

    return make


def collected(model, batch):
    return batch.with_fields(old_logprobs=model.log_probs(batch)[0], ref_logprobs=model.reference_log_probs(batch))


@pytest.mark.parametrize("config", [SFT, *EXPLORING], ids=name)
def test_training_moves_the_adapters_and_no_frozen_weight(make_model, tiny, pairs, config):
    model = make_model(config, LORA)
    if config is not SFT:
        model.freeze_reference()
    base, start = tiny.exported(model.policy, merged=False), model.policy.snapshot()
    trained(model, pairs)
    after = tiny.exported(model.policy, merged=False)
    assert [key for key in base if not torch.equal(base[key], after[key])] == []
    assert not any(torch.equal(old, new) for old, new in zip(start, model.policy.snapshot(), strict=True))


def test_the_reference_is_the_policy_after_the_warm_up_and_that_without_adapters(arm, warmed_up, make_model, pairs):
    from megatron.bridge.peft.lora import LoRA

    model = arm()
    after_warm_up = warmed_up.policy.log_probs(pairs, micro_batching=model.micro_batching, temperature=0.7)[0]
    before = make_model(SFT).policy.log_probs(pairs, micro_batching=model.micro_batching, temperature=0.7)[0]
    assert (after_warm_up - before).abs().max() > 0.1, "the warm-up has changed nothing"
    reference = model.reference_log_probs(pairs)
    torch.testing.assert_close(reference, after_warm_up, rtol=0, atol=2e-5)
    assert torch.equal(model.log_probs(pairs)[0], reference)
    trained(model, collected(model, pairs))
    assert torch.equal(model.reference_log_probs(pairs), reference)
    assert (model.log_probs(pairs)[0] - reference).abs().max() > 1e-2
    with LoRA().disable_adapter(model.built.chunks):
        assert torch.equal(model.log_probs(pairs)[0], reference)


def test_a_reference_that_stays_is_no_copy_of_the_weights(arm):
    assert arm().reference is None


def test_adapters_are_on_again_after_an_error_under_the_reference(arm, pairs):
    model = trained(arm(), pairs)
    own = model.log_probs(pairs)[0]
    with pytest.raises(KeyError), model.policy.without_adapters():
        assert not torch.equal(model.log_probs(pairs)[0], own)
        raise KeyError
    assert torch.equal(model.log_probs(pairs)[0], own)


@pytest.mark.parametrize(("kind", "share"), [("previous", 0.0), ("ema", 0.75)])
def test_a_reference_that_moves_is_one_of_adapters_alone(arm, tiny, pairs, kind, share):
    model = arm(reference=kind)
    start, base = model.policy.snapshot(), tiny.exported(model.policy, merged=False)
    trained(model, collected(model, pairs))
    now, own = model.policy.snapshot(), model.log_probs(pairs)[0]
    model.move_reference(kind, 0.75)
    for reference, old, new in zip(model.reference, start, now, strict=True):
        torch.testing.assert_close(reference, share * old + (1 - share) * new, rtol=0, atol=1e-6)
    assert all(map(torch.equal, model.policy.snapshot(), now))
    after = tiny.exported(model.policy, merged=False)
    assert all(torch.equal(base[key], after[key]) for key in base), "moving a reference has merged adapters"
    if kind == "previous":
        assert torch.equal(model.reference_log_probs(pairs), own)


@pytest.mark.parametrize("config", [SFT, *EXPLORING], ids=name)
def test_a_restored_archive_has_the_policy_merged_under_new_adapters(make_model, tiny, pairs, tmp_path, config):
    model = make_model(config, LORA)
    if config is not SFT:
        model.freeze_reference()
    start = model.policy.snapshot()
    trained(model, pairs)
    model.save_to(str(tmp_path / "model.nemo"))
    restored = type(model).restore_from(str(tmp_path / "model.nemo"))
    assert restored.built.lora == LORA
    assert all(map(torch.equal, restored.policy.snapshot(), start))
    weights, expected = tiny.exported(restored.policy), tiny.exported(model.policy)
    assert [key for key in expected if not torch.equal(weights[key], expected[key])] == []
