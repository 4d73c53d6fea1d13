"""Checkpoints that a killed run goes on from: which are kept, which is used, and what they hold."""

from __future__ import annotations

import math
import os
import runpy
import signal
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.progress import Position
from nemo_edo.config import CheckpointConfig, OptimizerConfig
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.losses import sft_loss
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.progress import SavedProgress, SharedRolloutStore, StopSignal, read_collected, write_collected
from nemo_edo.types import TrainingBatch

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of a model class, what SavedProgress knows: a policy whose optimizer has taken a step, and a reference."""
    tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py")))
    policy = tiny.build_policy(tiny.write_tiny_model(tmp_path_factory.mktemp("model")))
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=8)
    batch = tiny.random_batch(rows=2)
    policy.train_step(
        batch, lambda log_probs, _, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
        loss_counts={"sft": float(batch.mask.sum())}, micro_batching=MicroBatching(2), temperature=1.0,
    )
    return SimpleNamespace(policy=policy, reference=None)


class Asked:
    """A StopSignal."""

    received = False

    def agreed(self) -> bool:
        return self.received


def collected(number: float) -> Collected:
    batch = TrainingBatch(tokens=torch.full((2, 3), int(number)), mask=torch.ones(2, 2))
    return Collected(batch, [[0], [1]], {"number": number})


@pytest.fixture
def begin(model, tmp_path):
    """begin(every_steps=..., keep=...): a process's progress of the same training, resumed."""

    def start(**settings) -> SavedProgress:
        metrics_size = iter(range(100, 1000)).__next__

        def failure(step: int) -> Path:
            return tmp_path / "failures" / f"grpo_step_{step:08d}.safetensors"

        progress = SavedProgress(model, tmp_path / "progress", CheckpointConfig(**settings), stop=Asked(),
                                 metrics_size=metrics_size, failure=failure)
        progress.resume()
        return progress

    return start


def mark(model, value: float) -> None:
    """Gives the policy weights that tell its checkpoint from others."""
    model.policy.load([torch.full_like(weight, value) for weight in model.policy.snapshot()])


def walk(progress: SavedProgress, model, steps: int, *, per_iteration: int = 3) -> None:
    """So many steps on from ``progress.start``, through iterations of a few steps each."""
    here = progress.start
    for taken in range(here.steps_taken, here.steps_taken + steps):
        t, step = divmod(taken, per_iteration)
        if not step:
            progress.reached(Position(t, 0, taken))
            progress.keep(t, collected(t))
        mark(model, taken + 1)
        progress.reached(Position(t, step + 1, taken + 1, {"kind": "constant", "steps": taken + 1}))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "progress").iterdir())


def test_a_training_without_checkpoints_begins_at_the_beginning(begin):
    progress = begin()
    assert (progress.start, progress.metrics_bytes) == (Position(), None)


def test_the_last_k_checkpoints_and_the_batches_that_they_need_are_kept(begin, model, tmp_path):
    walk(begin(every_steps=1, keep=2), model, 5)
    assert files(tmp_path) == ["batch_00001.safetensors", "step_00000004", "step_00000005"]
    walk(begin(every_steps=1, keep=1), model, 2)
    assert files(tmp_path) == ["batch_00002.safetensors", "step_00000007"]


def test_a_checkpoint_is_due_every_so_many_steps_and_before_each_iteration(begin, model, tmp_path):
    walk(begin(every_steps=2, keep=99), model, 7)
    assert [name for name in files(tmp_path) if name.startswith("step")] == [
        f"step_{taken:08d}" for taken in (2, 3, 5, 6)]


def test_the_newest_checkpoint_gives_position_metrics_weights_and_batch(begin, model, tmp_path):
    walk(begin(every_steps=1), model, 5)
    mark(model, 99)
    progress = begin(every_steps=1)
    assert progress.start == Position(1, 2, 5, {"kind": "constant", "steps": 5})
    assert progress.metrics_bytes == 104
    assert {weight.unique().item() for weight in model.policy.snapshot()} == {5.0}
    assert progress.kept(1).statistics == {"number": 1}


def test_a_batch_that_was_read_back_is_kept_with_later_checkpoints_of_its_iteration(begin, model, tmp_path):
    walk(begin(every_steps=1), model, 4)
    progress = begin(every_steps=1, keep=1)
    progress.reached(Position(1, 2, 5))
    assert files(tmp_path) == ["batch_00001.safetensors", "step_00000005"]
    assert begin().kept(1).batch.tokens.tolist() == [[1] * 3] * 2


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["step_00000005/metadata.json", "step_00000005/about.json"])
def test_where_the_newest_is_damaged_the_one_before_it_is_used_with_a_warning(begin, model, tmp_path, damaged: str):
    walk(begin(every_steps=1, keep=2), model, 5)
    damage(tmp_path / "progress" / damaged)
    with pytest.warns(UserWarning, match="step_00000005 is damaged: .* going on from before it"):
        progress = begin(keep=1)
    assert (progress.start.steps_taken, progress.metrics_bytes) == (4, 103)
    assert {weight.unique().item() for weight in model.policy.snapshot()} == {4.0}
    assert "step_00000005" not in files(tmp_path)  # else it would pass for the newest again


def test_where_the_batch_is_damaged_the_checkpoints_within_its_iteration_are_of_no_use(begin, model, tmp_path):
    walk(begin(every_steps=1, keep=3), model, 5)
    damage(tmp_path / "progress" / "batch_00001.safetensors")
    with pytest.warns(UserWarning, match="batch_00001.safetensors has other content"):
        progress = begin()
    assert progress.start == Position(0, 3, 3, {"kind": "constant", "steps": 3})


def test_where_all_are_damaged_the_training_begins_anew_with_a_warning_for_each(begin, model, tmp_path):
    walk(begin(every_steps=1, keep=2), model, 2)
    for folder in (tmp_path / "progress").glob("step_*"):
        damage(folder / "metadata.json")
    with pytest.warns(UserWarning) as warned:
        progress = begin()
    assert (progress.start, len(warned)) == (Position(), 2)


def test_what_a_kill_left_of_a_checkpoint_is_passed_over(begin, model, tmp_path):
    walk(begin(every_steps=1), model, 2)
    (tmp_path / "progress" / "step_00000003.part").mkdir()
    assert begin().start.steps_taken == 2


def test_a_request_to_stop_saves_what_is_not_saved_and_ends_the_training(begin, model, tmp_path):
    progress = begin(every_steps=100)
    walk(progress, model, 2)
    assert not (tmp_path / "progress").exists()
    progress._stop.received = True
    with pytest.raises(RunStopped, match="up to step 2"):
        progress.reached(Position(0, 2, 2))
    assert begin().start == Position(0, 2, 2)


def test_in_the_background_one_checkpoint_is_written_at_a_time_and_the_one_before_it_stays(
    begin, model, tmp_path, held_writer
):
    progress = begin(every_steps=1, keep=1, asynchronous=True)
    walk(progress, model, 1)
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000001.part"]
    mark(model, 2)
    held_writer("step_00000001.part")
    progress.reached(Position(0, 2, 2))
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000001", "step_00000002.part"]
    held_writer("step_00000002.part")
    progress.settle()
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000002"]
    mark(model, 99)
    assert begin().start == Position(0, 2, 2)
    assert {weight.unique().item() for weight in model.policy.snapshot()} == {2.0}


def test_a_request_to_stop_waits_for_what_is_written_in_the_background(begin, model, tmp_path, held_writer):
    progress = begin(every_steps=1, asynchronous=True)
    walk(progress, model, 1)
    progress._stop.received = True
    Timer(1.0, held_writer, ["step_00000001.part"]).start()
    with pytest.raises(RunStopped):
        progress.reached(Position(0, 1, 1, {"kind": "constant", "steps": 1}))
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000001"]


def test_a_request_to_stop_where_nothing_is_new_writes_nothing(begin, tmp_path):
    progress = begin()
    progress._stop.received = True
    with pytest.raises(RunStopped):
        progress.reached(Position())
    assert not (tmp_path / "progress").exists()


# --- an iteration's batch -----------------------------------------------------------------------------------------


def test_a_batch_comes_back_to_the_last_bit(tmp_path):
    batch = TrainingBatch(
        tokens=torch.tensor([[2**40, 1, 2], [3, 4, 5]]), mask=torch.tensor([[1.0, 0.0], [0.1, 1.0]]),
        advantages=torch.tensor([1 / 3, -0.0]), old_logprobs=torch.tensor([[math.nan, -math.inf], [1e-40, -1e30]]),
        pair_role=torch.tensor([1, -1]),
    )
    statistics = {"reward": 1 / 3, "entropy": math.nan, "kl": 5e-324}
    write_collected(Collected(batch, [[0, 1], []], statistics), tmp_path / "batch.safetensors")
    read = read_collected(tmp_path / "batch.safetensors")
    assert read.batch.tensors().keys() == batch.tensors().keys()
    for name, tensor in batch.tensors().items():
        assert read.batch.tensors()[name].dtype == tensor.dtype
        assert read.batch.tensors()[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert read.items == [[0, 1], []]
    assert repr(read.statistics) == repr(statistics)


@pytest.mark.parametrize("content", [b"", b"something else", bytes(100)])
def test_a_file_that_is_no_batch_is_an_error_that_names_it(tmp_path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="file is not a batch"):
        read_collected(tmp_path / "file")


def test_rank_0_reads_rollouts_for_all(model, tmp_path):
    assert SharedRolloutStore(tmp_path).drawn(0) == []
    (tmp_path / "iter_00000").mkdir()
    (tmp_path / "iter_00000" / "rank_0_of_1.parquet").write_text("")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        SharedRolloutStore(tmp_path).drawn(0)


# --- the signal ---------------------------------------------------------------------------------------------------


def test_sigterm_is_remembered_inside_the_block_and_what_it_was_before_behind_it(model):
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            assert not stop.agreed()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.agreed()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, earlier)
