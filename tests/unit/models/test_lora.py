"""The model classes with LoRA: what they train, and what their reference is."""

from dataclasses import replace

import pytest
import torch
from helpers.tiny_models import over, step

from nemo_edo.config import GRPOConfig, IDPOConfig, LoRAConfig, MicroBatchConfig, OptimizerConfig, SFTConfig
from nemo_edo.megatron.lora import adapters_off

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
        step(model, batch)
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


def test_the_reference_is_the_policy_after_the_warm_up_and_that_without_adapters(
    arm, tiny, warmed_up, make_model, pairs, as_collected
):
    model = arm()
    assert model.reference is None, "a reference that stays needs no copy of the weights"
    settings = {"micro_batching": MicroBatchConfig(2), "temperature": 0.7}
    after_warm_up, before = (tiny.logprobs(policy, pairs, **settings)[0] for policy in (warmed_up.policy,
                                                                                 make_model(SFT).policy))
    assert (after_warm_up - before).abs().max() > 0.1, "the warm-up has changed nothing"
    reference = over(model).reference_logprobs(pairs)
    torch.testing.assert_close(reference, after_warm_up, rtol=0, atol=2e-5)
    assert torch.equal(over(model).logprobs(pairs)[0], reference)
    trained(model, as_collected(model, pairs))
    assert torch.equal(over(model).reference_logprobs(pairs), reference)
    own = over(model).logprobs(pairs)[0]
    assert (own - reference).abs().max() > 1e-2
    with pytest.raises(KeyError), adapters_off(model.policy.chunks):
        assert torch.equal(over(model).logprobs(pairs)[0], reference)
        raise KeyError
    assert torch.equal(over(model).logprobs(pairs)[0], own), "adapters stay off after an error"


@pytest.mark.parametrize(("kind", "share"), [("previous", 0.0), ("ema", 0.75)])
def test_a_reference_that_moves_is_one_of_adapters_alone(arm, tiny, pairs, as_collected, kind, share):
    model = arm(reference=kind)
    start, base = model.policy.snapshot(), tiny.exported(model.policy, merged=False)
    trained(model, as_collected(model, pairs))
    now, own = model.policy.snapshot(), over(model).logprobs(pairs)[0]
    model.move_reference(kind, 0.75)
    for reference, old, new in zip(model.reference, start, now, strict=True):
        torch.testing.assert_close(reference, share * old + (1 - share) * new, rtol=0, atol=1e-6)
    assert all(map(torch.equal, model.policy.snapshot(), now))
    after = tiny.exported(model.policy, merged=False)
    assert all(torch.equal(base[key], after[key]) for key in base), "moving a reference has merged adapters"
    if kind == "previous":
        assert torch.equal(over(model).reference_logprobs(pairs), own)


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
