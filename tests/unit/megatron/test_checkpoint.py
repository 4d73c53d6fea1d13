import os
import shutil
import signal
import time

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException

from nemo_edo.config import OptimizerConfig, ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import background, checkpoint
from nemo_edo.megatron.checksums import DamagedCheckpoint
from nemo_edo.megatron.forward_backward import MicroBatching

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)


def train(policy, tiny, seeds) -> list[dict[str, float]]:
    metrics = []
    for seed in seeds:
        batch = tiny.random_batch(rows=3, seed=seed)
        metrics.append(
            policy.train_step(
                batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
                loss_counts={"sft": float(reduction_count(batch.mask, "token-mean"))},
                micro_batching=MicroBatching(2), temperature=1.0,
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


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    checkpoint.save(policy, folder, extra={"position": {"step": 3}, "note": "α"})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_extra_comes_back_as_it_was_given(saved):
    assert checkpoint.load_extra(saved) == {"position": {"step": 3}, "note": "α"}


def test_a_later_save_of_the_same_name_takes_the_earlier_ones_place(policy, copy):
    checkpoint.save(policy, copy, extra={"new": True})
    assert checkpoint.load_extra(copy) == {"new": True}
    checkpoint.load(policy, copy)
    assert list(copy.parent.iterdir()) == [copy]


def test_saving_leaves_no_process_behind(policy, tmp_path):
    before = psutil.Process().children(recursive=True)
    checkpoint.save(policy, tmp_path / "checkpoint")
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


# --- in the background --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [("fp32", False), ("bf16", True)], indirect=True, ids=["fp32", "bf16, distributed"])
@pytest.mark.parametrize("other", [[]], indirect=True)
def test_training_that_goes_on_does_not_reach_what_is_being_written(trained, other, tiny, tmp_path, held_writer):
    weights, state = trained.snapshot(), optimizer_tensors(trained)
    writing = checkpoint.begin_save(trained, tmp_path / "checkpoint", with_optimizer=True)
    train(trained, tiny, [2, 3])
    assert not writing.is_finished()
    assert not (tmp_path / "checkpoint").exists()
    held_writer("checkpoint.part")
    assert writing.is_finished(wait=True)
    checkpoint.load(other, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, other.snapshot(), weights))
    assert all(map(torch.equal, optimizer_tensors(other), state))
    assert not all(map(torch.equal, trained.snapshot(), weights))


def test_what_was_written_in_the_background_is_finished_without_a_wait_once_it_is_there(policy, tmp_path):
    writing = checkpoint.begin_save(policy, tmp_path / "checkpoint")
    deadline = time.monotonic() + 60
    while not writing.is_finished():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    checkpoint.load(policy, tmp_path / "checkpoint")
    assert writing.is_finished(wait=True)


def test_a_writer_that_fails_is_an_error_that_tells_of_it_and_leaves_no_checkpoint(policy, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(filesystem_async, "_write_item", fail)
    with pytest.raises(CheckpointException, match="no space left on device"):
        checkpoint.save(policy, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def slow_writer_with_a_process_of_its_own(*_) -> None:
    if not os.fork():
        time.sleep(60)
    time.sleep(60)


def test_writers_end_with_the_process_that_they_write_for():
    """They hold the end of a pipe, of which as many are left as there are processes."""
    reading, writing = os.pipe()
    trainer = os.fork()
    if not trainer:
        written_for = os.getpid()
        if not os.fork():
            background._write(slow_writer_with_a_process_of_its_own, written_for, None)
        time.sleep(0.5)  # until the writer has begun one of its own
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(trainer, 0)
    begun = time.monotonic()
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert time.monotonic() - begun < 20


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "told"), [
    (lambda folder: flip_a_bit(max(folder.glob("*.distcp"))), r"\.distcp has other content than was written"),
    (lambda folder: flip_a_bit(folder / "about.json"), "about.json has other content"),
    (lambda folder: max(folder.glob("*.distcp")).unlink(), r"\.distcp is missing"),
    (lambda folder: (folder / "about.json").unlink(), "about.json is missing"),
    (lambda folder: (folder / "metadata.json").unlink(), "metadata.json is missing"),
    (lambda folder: (folder / "checksums.json").unlink(), "checksums.json cannot be read"),
    (lambda folder: (folder / "checksums.json").write_text('{"a": '), "checksums.json cannot be read"),
    (lambda folder: (folder / "more").write_text(""), "more is not one of its files"),
])
def test_any_damage_is_noticed_before_anything_is_loaded(policy, copy, damage, told: str):
    damage(copy)
    before = policy.snapshot()
    with pytest.raises(DamagedCheckpoint, match=rf"{copy} is damaged: .*{told}"):
        checkpoint.load(policy, copy)
    assert all(map(torch.equal, policy.snapshot(), before))


def test_a_checkpoint_of_another_architecture_is_refused_with_both_sides(tiny, saved, tmp_path):
    wider = tiny.build_policy(tiny.write_tiny_model(tmp_path / "wider", intermediate_size=128))
    with pytest.raises(UserError, match="of another model: intermediate_size is 96 there and 128 here"):
        checkpoint.load(wider, saved)


def test_weights_alone_are_no_place_to_go_on_from(policy, saved):
    with pytest.raises(UserError, match="holds weights alone, no state of an optimizer"):
        checkpoint.load(policy, saved, with_optimizer=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_reference_comes_back_to_the_last_bit_and_leaves_the_weights_alone(tiny, tiny_qwen2, tmp_path, dtype: str):
    """In fp32 even beside bf16 weights: moves below the spacing of bf16 add up in it."""
    policy = tiny.build_policy(tiny_qwen2, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    reference = [torch.randn(weight.shape, generator=generator) for weight in policy.snapshot()]
    before = policy.snapshot()
    checkpoint.save(policy, tmp_path / "checkpoint", reference=reference)
    checkpoint.load(policy, tmp_path / "checkpoint")
    assert all(map(torch.equal, policy.snapshot(), before))
    loaded = checkpoint.load_reference(policy, tmp_path / "checkpoint")
    assert [weight.dtype for weight in loaded] == [torch.float32] * len(reference)
    assert all(map(torch.equal, loaded, reference))
