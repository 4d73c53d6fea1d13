"""The supervised warm-up: which solutions it learns, in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from nemo_edo.algorithms.progress import Position
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import SFTConfig
from nemo_edo.errors import RunStopped


class Recorder:
    """A policy that keeps, for each step, which solutions were in the batch."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.batches: list = []
        self.lines: list[tuple[str, dict]] = []

    def train_step(self, batch, *, grad_norm_limit):
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


@pytest.mark.parametrize(("count", "steps", "batch_size"), [(10, 7, 4), (10, 1, 10), (3, 5, 3), (100, 3, 8)])
def test_steps_are_as_many_as_configured_and_batches_are_whole(count: int, steps: int, batch_size: int):
    taken = learn(count=count, steps=steps, batch_size=batch_size).steps
    assert [len(rows) for rows in taken] == [batch_size] * steps


def test_every_epoch_visits_each_solution_at_most_once():
    taken = learn(count=10, steps=12, batch_size=4).steps  # two whole batches an epoch
    for epoch in range(6):
        seen = Counter(taken[2 * epoch] + taken[2 * epoch + 1])
        assert max(seen.values()) == 1


def test_an_epoch_of_whole_batches_visits_every_solution():
    taken = learn(count=12, steps=3, batch_size=4).steps
    assert sorted(sum(taken, [])) == [100 + index for index in range(12)]


def test_every_solution_is_learned_in_the_long_run():
    """What an epoch leaves out because it fills no batch is another solution each time."""
    taken = learn(count=10, steps=40, batch_size=4).steps
    assert set(sum(taken, [])) == {100 + index for index in range(10)}


def test_the_seed_fixes_the_order():
    first, again, other = (learn(count=20, steps=8, batch_size=5, seed=seed).steps for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_epochs_go_through_the_solutions_in_other_orders():
    taken = learn(count=20, steps=2, batch_size=20).steps
    assert taken[0] != taken[1]


def test_fewer_solutions_than_a_batch_make_one_batch_of_them_all():
    taken = learn(count=3, steps=2, batch_size=128).steps
    assert [sorted(rows) for rows in taken] == [[100, 101, 102]] * 2


def test_the_mask_counts_solution_tokens_only():
    for batch in learn(count=6, steps=2, batch_size=3).batches:
        lengths = [1 + (first - 100) % 3 for first in batch.tokens[:, 0].tolist()]
        assert batch.mask.sum(dim=1).tolist() == lengths


def test_no_steps_train_nothing():
    assert learn(count=3, steps=0, batch_size=2).lines == []


def test_each_step_is_logged_with_its_number():
    assert learn(count=10, steps=3, batch_size=4).lines == [
        ("sft_step", {"step": step, "loss": 0.5, "grad_norm": 1.0, "skipped_steps": 0}) for step in range(3)]


class Stopping:
    """A Progress that stops the training when so many steps are taken."""

    def __init__(self, start: Position, stop_at: int | None = None) -> None:
        self.start = start
        self.stop_at = stop_at

    def reached(self, position: Position) -> None:
        assert position.step == position.steps_taken
        if position.steps_taken == self.stop_at:
            raise RunStopped


@pytest.mark.parametrize("stop_at", range(1, 8))
def test_a_warm_up_stopped_after_any_step_and_gone_on_with_takes_the_steps_of_an_unbroken_one(stop_at: int):
    config, settings = SFTConfig(steps=8, batch_size=4), {"pad_id": 0, "seed": 3}
    whole, broken = Recorder(), Recorder()
    train_supervised(whole, solutions(10), config, log=whole.log, **settings)
    with pytest.raises(RunStopped):
        train_supervised(broken, solutions(10), config, log=broken.log, progress=Stopping(Position(), stop_at),
                         **settings)
    assert len(broken.steps) == stop_at
    rest = Stopping(Position(step=stop_at, steps_taken=stop_at))
    train_supervised(broken, solutions(10), config, log=broken.log, progress=rest, **settings)
    assert (broken.steps, broken.lines) == (whole.steps, whole.lines)
