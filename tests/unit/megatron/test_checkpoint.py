import pytest
import torch
from megatron.core import dist_checkpointing

from nemo_edo.config import OptimizerConfig, ParallelismConfig
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
    """Moments, step counters and main weights (fp32), in the order of the parameters."""
    (inner,) = policy.optimizer.chained_optimizers
    parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
    states = [inner.optimizer.state[parameter] for parameter in parameters]
    moments = [torch.as_tensor(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().clone() for tensor in [*parameters, *moments]]


@pytest.fixture(params=[("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)],
                ids=["fp32", "bf16", "fp32, distributed", "bf16, distributed"])
def kind(request) -> dict:
    dtype, distributed_optimizer = request.param
    return {"dtype": dtype, "parallelism": ParallelismConfig(use_distributed_optimizer=distributed_optimizer)}


@pytest.fixture
def trained(tiny, tiny_qwen2, kind):
    policy = tiny.build_policy(tiny_qwen2, **kind)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(policy, tiny, [0, 1])
    return policy


@pytest.fixture(params=[[], [5]], ids=["into a new one", "into a trained one"])
def other(request, tiny, tmp_path, kind):
    """A policy with other weights, as a new process has it, and with steps of its own behind it."""
    policy = tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1), **kind)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    train(policy, tiny, request.param)
    return policy


def test_a_loaded_policy_has_the_saved_weights_to_the_last_bit(trained, other, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint")
    checkpoint.load(other, tmp_path / "checkpoint")
    assert all(map(torch.equal, other.snapshot(), trained.snapshot()))


def test_a_policy_loaded_with_its_optimizer_goes_on_as_the_saved_one_to_the_last_bit(trained, other, tiny, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint", with_optimizer=True)
    checkpoint.load(other, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, optimizer_tensors(other), optimizer_tensors(trained)))
    assert train(other, tiny, [2, 3]) == train(trained, tiny, [2, 3])
    assert all(map(torch.equal, other.snapshot(), trained.snapshot()))


def test_saving_changes_nothing_that_training_goes_on_with(trained, tiny, tiny_qwen2, kind, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint", with_optimizer=True)
    train(trained, tiny, [2])
    unsaved = tiny.build_policy(tiny_qwen2, **kind)
    unsaved.reset_optimizer(OPTIMIZER, total_steps=8)
    train(unsaved, tiny, [0, 1, 2])
    assert all(map(torch.equal, trained.snapshot(), unsaved.snapshot()))


@pytest.mark.parametrize("kind", [("bf16", False), ("bf16", True)], indirect=True, ids=["bf16", "distributed"])
def test_a_step_after_loading_weights_alone_starts_from_them(trained, other, tiny, tmp_path):
    """Not from the optimizer's own fp32 copies of what was there before."""
    checkpoint.save(trained, tmp_path / "checkpoint")
    checkpoint.load(other, tmp_path / "checkpoint")
    train(other, tiny, [2])
    for after, loaded in zip(other.snapshot(), trained.snapshot(), strict=True):
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
