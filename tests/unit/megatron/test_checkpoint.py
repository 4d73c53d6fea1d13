import pytest
import torch
from megatron.core import dist_checkpointing

from nemo_edo.config import OptimizerConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import checkpoint

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)


def train(policy, tiny, seeds) -> list[dict[str, float]]:
    metrics = []
    for seed in seeds:
        batch = tiny.random_batch(rows=3, seed=seed)
        metrics.append(
            policy.train_step(
                batch, lambda log_probs, _, micro: (sft_loss(log_probs, micro.mask), {}),
                loss_count=float(reduction_count(batch.mask, "token-mean")), micro_batch_size=2, temperature=1.0,
            )
        )
    return metrics


def optimizer_tensors(policy) -> list[torch.Tensor]:
    """Moments and fp32 main weights, in the order of the parameters."""
    inner = policy.optimizer.chained_optimizers[0] if hasattr(policy.optimizer, "chained_optimizers") else policy.optimizer
    groups = inner.optimizer.param_groups
    main = [parameter.detach() for group in groups for parameter in group["params"]]
    moments = [
        inner.optimizer.state[parameter][name]
        for group in groups for parameter in group["params"] for name in ("exp_avg", "exp_avg_sq")
    ]
    return [tensor.clone() for tensor in [*main, *moments]]


@pytest.fixture(params=["fp32", "bf16"])
def dtype(request) -> str:
    return request.param


@pytest.fixture
def trained(tiny, tiny_qwen2, dtype):
    policy = tiny.build_policy(tiny_qwen2, dtype=dtype)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(policy, tiny, [0, 1])
    return policy


@pytest.fixture
def fresh(tiny, tmp_path, dtype):
    """A policy with other weights and another optimizer state."""
    policy = tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1), dtype=dtype)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(policy, tiny, [5])
    return policy


def test_a_loaded_policy_has_the_saved_weights_to_the_last_bit(trained, fresh, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint")
    checkpoint.load(fresh, tmp_path / "checkpoint")
    assert all(map(torch.equal, fresh.snapshot(), trained.snapshot()))


def test_a_loaded_policy_has_the_saved_optimizer_to_the_last_bit_and_goes_on_as_the_saved_one(
    trained, fresh, tiny, tmp_path
):
    checkpoint.save(trained, tmp_path / "checkpoint", with_optimizer=True)
    checkpoint.load(fresh, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, optimizer_tensors(fresh), optimizer_tensors(trained)))
    assert train(fresh, tiny, [2, 3]) == train(trained, tiny, [2, 3])
    assert all(map(torch.equal, fresh.snapshot(), trained.snapshot()))


def test_saving_changes_nothing_that_training_goes_on_with(trained, tiny, tiny_qwen2, dtype, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint", with_optimizer=True)
    train(trained, tiny, [2])
    unsaved = tiny.build_policy(tiny_qwen2, dtype=dtype)
    unsaved.reset_optimizer(OPTIMIZER, total_steps=8)
    train(unsaved, tiny, [0, 1, 2])
    assert all(map(torch.equal, trained.snapshot(), unsaved.snapshot()))


@pytest.mark.parametrize("dtype", ["bf16"], indirect=True)
def test_a_step_after_loading_weights_alone_starts_from_them(trained, fresh, tiny, tmp_path):
    """Not from the optimizer's own fp32 copies of what was there before."""
    checkpoint.save(trained, tmp_path / "checkpoint")
    checkpoint.load(fresh, tmp_path / "checkpoint")
    train(fresh, tiny, [2])
    for after, loaded in zip(fresh.snapshot(), trained.snapshot(), strict=True):
        assert (after - loaded).abs().max() < 0.02


# --- the folder ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_checkpoint_is_an_error_that_names_it(policy, tmp_path, exists):
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(UserError, match=rf"{folder} is not a checkpoint"):
        checkpoint.load(policy, folder)


def test_the_folder_appears_only_when_it_is_whole(policy, tmp_path, monkeypatch):
    """A save that breaks off at its end leaves no folder of that name, and does not stop the next one."""
    folder, really_save = tmp_path / "checkpoint", dist_checkpointing.save

    def breaks_off(*args, **kwargs):
        really_save(*args, **kwargs)
        assert not folder.exists()
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dist_checkpointing, "save", breaks_off)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(policy, folder)
    assert not folder.exists()
    checkpoint.save(policy, folder)
    checkpoint.load(policy, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
