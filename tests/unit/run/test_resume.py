"""Checkpoints that a killed run resumes from: which are kept, which one is used, and what is in them."""

import math
import os
import shutil
import warnings
import weakref
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_models
from helpers.controller import remote

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.guards import Alarm, respond
from nemo_edo.algorithms.services import Position
from nemo_edo.config import CheckpointConfig, MicroBatchConfig, OptimizerConfig
from nemo_edo.data.batching import read_batch
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.losses import sft_loss
from nemo_edo.run.resume import SavedProgress
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import TrainingBatch
from nemo_edo.worker.worker import Worker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A policy whose optimizer has taken a step, on the worker of this process."""
    policy = tiny_models.build_policy(tiny_models.write_tiny_model(tmp_path_factory.mktemp("model")))
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=8)
    batch = tiny_models.random_batch(rows=2)
    tiny_models.train_step(
        policy, batch, lambda logprobs, entropies, micro, _: ({"sft": sft_loss(logprobs, micro.mask)}, {}),
        loss_counts={"sft": float(batch.mask.sum())}, micro_batching=MicroBatchConfig(2), temperature=1.0,
    )
    return remote(policy)


PROGRESS = "checkpoints/grpo.progress"


class Log:
    """A MetricsLog that grows by a byte from mark to mark."""

    bytes = 99

    @property
    def mark(self) -> dict[str, int]:
        self.bytes += 1
        return {"metrics_bytes": self.bytes}


def collected(number: float) -> Collected:
    batch = TrainingBatch(tokens=torch.full((2, 3), int(number)), mask=torch.ones(2, 2))
    return Collected(batch, [[0], [1]], {"number": number})


@pytest.fixture
def begin(model, tmp_path):
    """begin(every_steps=..., keep=...): a process's progress of the same training, resumed."""

    def start(*, keeps_reference: bool = False, **settings) -> SavedProgress:
        config = CheckpointConfig(**{"asynchronous": False, **settings})
        stop = SimpleNamespace(received=False, is_asked=lambda: stop.received)
        run = SimpleNamespace(folder=RunFolder(tmp_path), cfg=SimpleNamespace(checkpoint=config), stop=stop,
                              log=Log())
        progress = SavedProgress(run, model, "grpo", keeps_reference=keeps_reference)
        progress.resume()
        return progress

    return start


def mark(model, value: float) -> None:
    """Gives the policy weights that tell its checkpoint from others."""
    policy = model.workers.local.model.policy
    policy.load([torch.full_like(weight, value) for weight in policy.snapshot()])


def walk(progress: SavedProgress, model, steps: int, *, per_iteration: int = 3) -> None:
    """So many steps on from ``progress.start``, through iterations of a few steps each."""
    here = progress.start
    for taken in range(here.steps_taken, here.steps_taken + steps):
        t, step = divmod(taken, per_iteration)
        if not step:
            progress.reached(Position(t, 0, taken))
            progress.keep(collected(t))
        mark(model, taken + 1)
        progress.reached(Position(t, step + 1, taken + 1, {"kind": "constant", "steps": taken + 1}))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / PROGRESS).iterdir())


def weights(model) -> set[float]:
    return {weight.unique().item() for weight in model.workers.local.model.policy.snapshot()}


def test_the_last_k_checkpoints_the_one_before_their_iteration_and_the_batches_that_they_need_are_kept(
    begin, model, tmp_path
):
    walk(begin(every_steps=1, keep=2), model, 5)
    batches = [f"batch_0000{i}.safetensors" for i in range(3)]
    assert files(tmp_path) == [*batches[:2], "step_00000003", "step_00000004", "step_00000005"]
    (tmp_path / PROGRESS / "step_00000006.part").mkdir()  # what a kill left
    progress = begin(every_steps=1, keep=1)
    assert progress.start.steps_taken == 5
    walk(progress, model, 2)
    assert files(tmp_path) == [*batches[1:], "step_00000006", "step_00000007"]


def test_an_iteration_begins_with_a_checkpoint_however_rare_they_are(begin, model, tmp_path):
    walk(begin(every_steps=100), model, 4)
    assert files(tmp_path) == ["step_00000003"]
    assert begin().start == Position(1, 0, 3)


def test_the_next_iteration_begins_without_the_last_ones_batch_in_memory(begin):
    progress, kept = begin(), collected(1)
    progress.keep(kept)
    kept = weakref.ref(kept)
    progress.reached(Position(1, 0, 0))
    assert kept() is None


def test_a_save_at_once_writes_only_what_is_new_and_a_failure_keeps_its_batch_and_weights(begin, model, tmp_path):
    progress = begin(every_steps=100)
    walk(progress, model, 2)
    progress.save(Position(0, 2, 2))
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000002"]
    marker = tmp_path / PROGRESS / "step_00000002" / "marker"
    marker.touch()
    progress.save(Position(0, 2, 2))
    assert marker.exists()
    batch = collected(3).batch
    path = Path(progress.keep_failure(Position(0, 3, 3), batch, {"loss": 0.5}))
    assert path == tmp_path / "failures" / "grpo_step_00000002.safetensors"
    assert path.with_suffix("").is_dir()
    read, about = read_batch(path)
    assert torch.equal(read.tokens, batch.tokens) and about == {"metrics": {"loss": 0.5}}


def test_a_reference_that_moves_is_restored_with_the_checkpoint(begin, model):
    remote_model, model = model, model.workers.local.model
    model.reference = [torch.full_like(weight, 7.0) for weight in model.policy.snapshot()]
    walk(begin(every_steps=1, keeps_reference=True), remote_model, 1)
    model.reference = None
    begin(keeps_reference=True)
    assert {weight.unique().item() for weight in model.reference} == {7.0}
    model.reference = None


def test_the_newest_checkpoint_gives_position_metrics_weights_and_batch(begin, model, capsys):
    progress = begin(every_steps=1)
    assert (progress.start, progress.metrics_mark) == (Position(), None)
    walk(progress, model, 5)
    mark(model, 99)
    progress = begin(every_steps=1)
    assert progress.start == Position(1, 2, 5, {"kind": "constant", "steps": 5})
    assert progress.metrics_mark["metrics_bytes"] == 104
    assert weights(model) == {5.0}
    assert progress.kept().statistics == {"number": 1}
    assert "another layout" not in capsys.readouterr().out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


IN_A_CHECKPOINT = ("metadata.json", "about.json", "checksums.json", ".metadata", "__0_0.distcp")
WAYS = (flip, halve, Path.unlink)
DAMAGES = [(f"step_00000005/{name}", damage, 4) for name in IN_A_CHECKPOINT for damage in WAYS]
DAMAGES += [("batch_00001.safetensors", damage, 3) for damage in WAYS]
DAMAGES += [("step_00000005", shutil.rmtree, 4)]


def test_whatever_is_damaged_the_run_resumes_from_the_newest_that_is_whole(begin, model, tmp_path):
    """The last two checkpoints share a batch: without it, the one before their iteration is the newest."""
    walk(begin(every_steps=1, keep=2), model, 5)
    progress, whole = tmp_path / PROGRESS, shutil.copytree(tmp_path / PROGRESS, tmp_path / "whole")
    for file, damage, found in DAMAGES:
        shutil.rmtree(progress)
        shutil.copytree(whole, progress)
        damage(progress / file)
        mark(model, 99)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "/.*; resuming from before it")
            assert begin().start.steps_taken == found, (file, damage)
        assert weights(model) == {float(found)}, (file, damage)


def test_training_replaces_damaged_checkpoints_and_only_then_removes_them(begin, model, tmp_path):
    walk(begin(every_steps=1, keep=2), model, 5)
    before = files(tmp_path)
    flip(tmp_path / PROGRESS / "batch_00001.safetensors")
    with pytest.warns(UserWarning, match="batch_00001.safetensors has other content than was written; resuming from"):
        progress = begin(every_steps=1, keep=2)
    assert files(tmp_path) == [*before[:3], "step_00000004.damaged", "step_00000005.damaged"]
    walk(progress, model, 2)
    assert files(tmp_path) == before
    assert begin().start.steps_taken == 5


def test_where_every_checkpoint_is_damaged_the_run_begins_anew_with_the_weights_that_it_begins_with(
    begin, model, tmp_path
):
    walk(begin(every_steps=1, keep=2), model, 5)
    for batch in (tmp_path / PROGRESS).glob("batch_*"):
        flip(batch)
    mark(model, 99)
    with pytest.warns(UserWarning, match="batch_0000[01].safetensors has other content than was written"):
        assert begin().start == Position()
    assert weights(model) == {99.0}
    assert len(files(tmp_path)) == 5  # nothing is removed


def test_a_first_checkpoint_that_cannot_be_written_is_an_error_that_leaving_the_training_keeps(
    begin, model, monkeypatch
):
    progress, answers = begin(every_steps=1), iter([UserError("the disk is full"), True])

    def is_saved(worker, wait: bool) -> bool:
        if isinstance(answer := next(answers), UserError):
            raise answer
        return answer

    monkeypatch.setattr(Worker, "begin_save", lambda *_: None)
    monkeypatch.setattr(Worker, "is_saved", is_saved)
    with pytest.raises(UserError, match="the disk is full"):
        walk(progress, model, 1)
    progress.settle()


def test_a_request_to_stop_saves_what_is_not_saved_and_ends_the_training(begin, model, tmp_path):
    progress = begin(every_steps=100)
    progress._run.stop.received = True
    with pytest.raises(RunStopped):
        progress.reached(Position())
    progress._run.stop.received = False
    walk(progress, model, 1)
    assert not (tmp_path / PROGRESS).exists()
    progress._run.stop.received = True
    with pytest.raises(RunStopped, match="up to step 1"):
        progress.reached(Position(0, 1, 1))
    assert begin().start == Position(0, 1, 1)


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
    assert weights(model) == {2.0}


def test_a_request_to_stop_waits_for_what_is_written_in_the_background(begin, model, tmp_path, held_writer):
    progress = begin(every_steps=1, asynchronous=True)
    walk(progress, model, 1)
    progress._run.stop.received = True
    Timer(1.0, held_writer, ["step_00000001.part"]).start()
    with pytest.raises(RunStopped):
        progress.reached(Position(0, 1, 1, {"kind": "constant", "steps": 1}))
    assert files(tmp_path) == ["batch_00000.safetensors", "step_00000001"]


def test_weights_that_are_not_finite_are_not_saved_and_the_last_checkpoint_stays(begin, model, tmp_path):
    progress = begin(every_steps=1)
    walk(progress, model, 1)
    before = files(tmp_path)
    mark(model, math.nan)
    alarm = Alarm("guards.max_skipped_steps", "the loss is nan", 1.0, 1.0, "stop", times=1)
    told = "not all weights are finite numbers after step 2.*resumes from step 1"
    for save in (
        lambda: progress.reached(Position(0, 2, 2)),
        lambda: respond([alarm], Position(0, 2, 2), {}, log=lambda *_, **__: None, progress=progress),
    ):
        with pytest.raises(StoppedByGuard, match=told):
            save()
    assert files(tmp_path) == before
    assert begin().start.steps_taken == 1
    assert weights(model) == {1.0}


def test_a_batch_comes_back_to_the_last_bit(begin):
    batch = TrainingBatch(
        tokens=torch.tensor([[2**40, 1, 2], [3, 4, 5]]), mask=torch.tensor([[1.0, 0.0], [0.1, 1.0]]),
        advantages=torch.tensor([1 / 3, -0.0]), old_logprobs=torch.tensor([[math.nan, -math.inf], [1e-40, -1e30]]),
        pair_role=torch.tensor([1, -1]),
    )
    statistics = {"reward": 1 / 3, "entropy": math.nan, "kl": 5e-324}
    progress = begin()
    progress.keep(Collected(batch, [[0, 1], []], statistics))
    progress.save(Position(0, 1, 1))
    read = begin().kept()
    assert read.batch.tensors().keys() == batch.tensors().keys()
    for name, tensor in batch.tensors().items():
        assert read.batch.tensors()[name].dtype == tensor.dtype
        assert read.batch.tensors()[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert read.items == [[0, 1], []]
    assert repr(read.statistics) == repr(statistics)
