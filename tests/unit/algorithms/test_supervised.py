"""The supervised warm-up: which solutions it learns, in which order."""

import pytest

from nemo_edo.algorithms.iteration import train_supervised
from nemo_edo.algorithms.services import Position
from nemo_edo.config import SFTConfig
from nemo_edo.errors import RunStopped


class Recorder:
    """A policy that keeps, for each step, which solutions were in the batch, by their prompts' first tokens."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.lines: list[tuple[str, dict]] = []

    def train_step(self, batch, *, exploration_weight, grad_norm_limit):
        self.steps.append(batch.tokens[:, 0].tolist())
        lengths = [1 + first % 3 for first in self.steps[-1]]
        assert batch.mask.sum(dim=1).tolist() == lengths, "the mask counts solution tokens only"
        return {"loss": 0.5, "grad_norm": 1.0, "skipped": 0.0}

    def learn(self, *, count: int, steps: int, batch_size: int = 4, progress=None) -> None:
        solutions = [((100 + index, 7), (8,) * (1 + (100 + index) % 3)) for index in range(count)]
        train_supervised(self, solutions, SFTConfig(steps=steps, batch_size=batch_size), pad_id=0, seed=42,
                         progress=progress, log=lambda kind, **values: self.lines.append((kind, values)))


@pytest.mark.parametrize(("count", "steps", "batch_size"), [(10, 7, 4), (10, 0, 4), (10, 1, 10), (3, 2, 128)])
def test_steps_are_as_many_as_configured_and_logged_and_batches_are_whole(count: int, steps: int, batch_size: int):
    """Fewer solutions than a batch make one batch of them all."""
    taken = Recorder()
    taken.learn(count=count, steps=steps, batch_size=batch_size)
    assert [len(set(rows)) for rows in taken.steps] == [min(count, batch_size)] * steps
    assert taken.lines == [("sft_step", {"step": step, "loss": 0.5, "grad_norm": 1.0, "skipped_steps": 0})
                           for step in range(steps)]


@pytest.mark.parametrize("count", [10, 12])
def test_every_epoch_visits_as_many_solutions_as_fill_batches_once_in_another_order(count: int):
    recorder, per_epoch = Recorder(), count // 4
    recorder.learn(count=count, steps=6 * per_epoch)
    taken = recorder.steps
    epochs = [tuple(sum(taken[start : start + per_epoch], [])) for start in range(0, len(taken), per_epoch)]
    assert all(len(set(epoch)) == 4 * per_epoch for epoch in epochs)
    assert len(set(epochs)) == 6
    # What an epoch leaves out because it fills no batch is another solution each time.
    assert set(sum(taken, [])) == {100 + index for index in range(count)}


@pytest.mark.parametrize("stop_at", [1, 2, 3, 7])
def test_a_warm_up_stopped_after_any_step_and_resumed_takes_the_steps_of_an_uninterrupted_one(new_memory, stop_at: int):
    whole, broken = Recorder(), Recorder()
    whole.learn(count=10, steps=8)
    with pytest.raises(RunStopped):
        broken.learn(count=10, steps=8, progress=new_memory(stop_at=stop_at))
    assert len(broken.steps) == stop_at
    broken.learn(count=10, steps=8, progress=new_memory(Position(step=stop_at, steps_taken=stop_at)))
    assert (broken.steps, broken.lines) == (whole.steps, whole.lines)
