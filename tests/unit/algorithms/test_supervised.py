"""The supervised warm-up: which solutions it learns, in which order."""

import pytest

from nemo_edo.algorithms.iteration import train_supervised
from nemo_edo.algorithms.services import Position
from nemo_edo.config import SFTConfig
from nemo_edo.errors import RunStopped


class Recorder:
    """A policy that keeps, for each step, which solutions were in the batch."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.batches: list = []
        self.lines: list[tuple[str, dict]] = []

    def train_step(self, batch, *, exploration_weight, grad_norm_limit):
        self.batches.append(batch)
        self.steps.append(batch.tokens[:, 0].tolist())
        return {"loss": 0.5, "grad_norm": 1.0, "skipped": 0.0}

    def log(self, kind: str, **values) -> None:
        self.lines.append((kind, values))


def solutions(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompt's first token says which solution it is."""
    return [((100 + index, 7), (8,) * (1 + index % 3)) for index in range(count)]


def learn(*, count: int, steps: int, batch_size: int, seed: int = 42) -> Recorder:
    recorder = Recorder()
    train_supervised(recorder, solutions(count), SFTConfig(steps=steps, batch_size=batch_size), pad_id=0, seed=seed,
                     log=recorder.log)
    return recorder


@pytest.mark.parametrize(("count", "steps", "batch_size"), [
    (10, 7, 4), (10, 0, 4), (10, 1, 10), (3, 5, 3), (100, 3, 8), (3, 2, 128)])
def test_steps_are_as_many_as_configured_and_logged_and_batches_are_whole(count: int, steps: int, batch_size: int):
    """Fewer solutions than a batch make one batch of them all."""
    taken = learn(count=count, steps=steps, batch_size=batch_size)
    assert [len(set(rows)) for rows in taken.steps] == [min(count, batch_size)] * steps
    assert taken.lines == [("sft_step", {"step": step, "loss": 0.5, "grad_norm": 1.0, "skipped_steps": 0})
                           for step in range(steps)]
    for batch in taken.batches:
        lengths = [1 + (first - 100) % 3 for first in batch.tokens[:, 0].tolist()]
        assert batch.mask.sum(dim=1).tolist() == lengths, "the mask counts solution tokens only"


@pytest.mark.parametrize("count", [10, 12])
def test_every_epoch_visits_as_many_solutions_as_fill_batches_once_in_another_order(count: int):
    per_epoch = count // 4
    taken = learn(count=count, steps=6 * per_epoch, batch_size=4).steps
    epochs = [tuple(sum(taken[start : start + per_epoch], [])) for start in range(0, len(taken), per_epoch)]
    assert all(len(set(epoch)) == 4 * per_epoch for epoch in epochs)
    assert len(set(epochs)) == 6
    # What an epoch leaves out because it fills no batch is another solution each time.
    assert set(sum(taken, [])) == {100 + index for index in range(count)}


@pytest.mark.parametrize("stop_at", range(1, 8))
def test_a_warm_up_stopped_after_any_step_and_resumed_takes_the_steps_of_an_uninterrupted_one(new_memory, stop_at: int):
    config, settings = SFTConfig(steps=8, batch_size=4), {"pad_id": 0, "seed": 3}
    whole, broken = Recorder(), Recorder()
    train_supervised(whole, solutions(10), config, log=whole.log, **settings)
    with pytest.raises(RunStopped):
        train_supervised(broken, solutions(10), config, log=broken.log, progress=new_memory(stop_at=stop_at),
                         **settings)
    assert len(broken.steps) == stop_at
    rest = new_memory(Position(step=stop_at, steps_taken=stop_at))
    train_supervised(broken, solutions(10), config, log=broken.log, progress=rest, **settings)
    assert (broken.steps, broken.lines) == (whole.steps, whole.lines)
