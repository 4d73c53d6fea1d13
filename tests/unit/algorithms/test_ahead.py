"""One step off: responses drawn while the iteration before trains, and the same numbers as without the haste."""

from __future__ import annotations

from dataclasses import replace
from threading import Event, current_thread
from threading import enumerate as threads

import pytest
import torch

from nemo_edo.algorithms.ahead import InBackground
from nemo_edo.algorithms.iteration import draw_ahead, run_iterations
from nemo_edo.config import BoundsConfig
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError

SETTINGS = {"problems": 3, "iterations": 4, "epochs": 2, "minibatch_size": 8, "alpha": 0.0}
DYNAMIC = {"problems": 12, "problems_per_iteration": 4, "iterations": 3, "minibatch_size": 8, "dynamic_sampling": True,
           "alpha": 0.0, "hopeless": ["p-1", "p-2", "p-5", "p-7"]}
LIMIT_S = 20.0


@pytest.fixture
def drawn_ahead(fake_iteration):
    """drawn_ahead(journal, around=..., **settings): an Iteration that draws in a thread; ``around(generate)`` makes the
    engine's generate another one."""

    def build(journal, *, around=lambda generate: generate, **settings):
        iteration = replace(fake_iteration(journal=journal, **settings), part_size=5, lag=1)
        iteration.engine.generate = around(iteration.engine.generate)
        return replace(iteration, ahead=InBackground(lambda t, stop: draw_ahead(iteration, t, stop)))

    return build


def run(iteration, journal) -> None:
    run_iterations(iteration, lambda t: journal.events.append(("evaluate", t)))


def drawing_threads() -> list:
    return [thread for thread in threads() if thread.name.startswith("draw ahead")]


def steps_of(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["kind"] == "train_step"]


def test_each_iteration_trains_on_samples_of_the_policy_before(drawn_ahead, new_journal):
    journal = new_journal()
    run(drawn_ahead(journal, **SETTINGS), journal)
    versions = [{one.rollout.policy_version for one in journal.collected(t)} for t in range(4)]
    assert versions == [{0}, {0}, {1}, {2}]
    collections = [line for line in journal.lines if line["kind"] == "collection"]
    assert [(line["policy_version"], line["staleness"]) for line in collections] == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert drawing_threads() == []


@pytest.mark.parametrize("settings", [SETTINGS, DYNAMIC], ids=["plain", "dynamic sampling"])
def test_the_numbers_are_those_of_a_synchronous_loop_on_the_same_samples(
    drawn_ahead, fake_iteration, new_journal, settings: dict
):
    ahead, synchronous = new_journal(), new_journal()
    run(drawn_ahead(ahead, folder="ahead", **settings), ahead)
    fed = replace(fake_iteration(journal=synchronous, folder="fed", **settings), given=ahead.store, keeps_stale=True)
    run(fed, synchronous)
    assert ahead.lines == synchronous.lines
    pairs = zip(ahead.policy.batches, synchronous.policy.batches, strict=True)
    assert all(torch.equal(one.tensors()[name], other.tensors()[name])
               for one, other in pairs for name in one.tensors())


def test_old_log_probs_are_the_training_policys_and_not_the_samplers(drawn_ahead, new_journal):
    journal = new_journal()
    run(drawn_ahead(journal, **SETTINGS), journal)
    for index, batch in enumerate(journal.policy.batches):
        expected = -0.01 * batch.tokens[:, 1:].float() - 0.1 * 4 * (index // 4)  # four steps an iteration
        torch.testing.assert_close(batch.old_logprobs, expected)


def test_the_next_samples_are_drawn_while_the_policy_trains_and_the_push_waits_for_them(drawn_ahead, new_journal):
    journal, trained = new_journal(), Event()

    def slow(generate):
        def after_a_step(requests, sampling):
            if current_thread().name.startswith("draw ahead"):
                assert trained.wait(LIMIT_S), "nothing was trained while this was to be drawn"
            return generate(requests, sampling)

        return after_a_step

    iteration = drawn_ahead(journal, around=slow, **{**SETTINGS, "iterations": 2})
    step = iteration.policy.train_step

    def train_step(*args, **kwargs):
        trained.set()
        return step(*args, **kwargs)

    iteration.policy.train_step = train_step
    run(iteration, journal)
    kinds = [event[0] for event in journal.events]
    push = journal.events.index(("push", 1))
    assert kinds[:push].count("generate") == 6 and kinds[push:].count("generate") == 0  # 12 responses, 5 a part, twice


class Broken(Exception):
    pass


def failing_in_background(error: Exception):
    def around(generate):
        def broken(requests, sampling):
            if current_thread().name.startswith("draw ahead"):
                raise error
            return generate(requests, sampling)

        return broken

    return around


def test_an_error_of_the_drawing_ends_the_run_before_the_next_push(drawn_ahead, new_journal):
    journal = new_journal()
    iteration = drawn_ahead(journal, around=failing_in_background(UserError("no server is left")), **SETTINGS)
    with pytest.raises(UserError, match="no server is left"):
        run(iteration, journal)
    assert ("push", 1) not in journal.events and drawing_threads() == []


def waiting(begun: Event, stop_seen: Event):
    """An Ahead that draws until it is told to stop."""

    def draw(t: int, stop: Event) -> dict[str, float]:
        begun.set()
        assert stop.wait(LIMIT_S)
        stop_seen.set()
        raise RunStopped

    return InBackground(draw)


@pytest.mark.parametrize("ends", ["asked to stop", "a guard", "an error"])
def test_a_run_that_ends_early_ends_the_drawing_too(fake_iteration, new_journal, new_memory, ends: str):
    journal, begun, stop_seen = new_journal(), Event(), Event()
    guards = {"sampler_gap": BoundsConfig(ceiling=1e-9, action="stop")} if ends == "a guard" else {}
    iteration = fake_iteration(journal=journal, **guards, **SETTINGS)
    memory = new_memory(stop_at=5 if ends == "asked to stop" else None)
    iteration = replace(iteration, ahead=waiting(begun, stop_seen), lag=1, progress=memory)
    if ends == "an error":
        iteration.policy.batches = None  # its first step fails
    expected = {"asked to stop": RunStopped, "a guard": StoppedByGuard, "an error": TypeError}[ends]
    with pytest.raises(expected):
        run(iteration, journal)
    assert begun.is_set() and stop_seen.is_set() and drawing_threads() == []


def test_nothing_is_saved_within_an_iteration_until_the_next_samples_are_there(drawn_ahead, new_journal, new_memory):
    """The policy that they are asked of is gone by then."""
    journal, memory, go_on = new_journal(), new_memory(), Event()

    def held(generate):
        def wait(requests, sampling):
            if current_thread().name.startswith("draw ahead"):
                assert go_on.wait(LIMIT_S)
            return generate(requests, sampling)

        return wait

    iteration = replace(drawn_ahead(journal, around=held, **{**SETTINGS, "iterations": 2}), progress=memory)
    release = iteration.ahead.finish

    def finish():
        go_on.set()
        release()

    iteration.ahead.finish = finish
    run(iteration, journal)
    within_the_first = [position for position in memory.positions if position.iteration == 0 and position.step]
    assert within_the_first == []
    assert [position.step for position in memory.positions if position.iteration == 1] == [0, 1, 2, 3, 4]


def test_a_run_stopped_at_any_place_and_gone_on_with_does_what_an_unbroken_one_does(
    drawn_ahead, new_journal, new_memory
):
    whole = new_journal()
    run(drawn_ahead(whole, folder="whole", **SETTINGS), whole)
    stop_at, finished = 0, False
    while not finished:
        stop_at += 1
        folder, first, memory = f"stopped {stop_at}", new_journal(), new_memory(stop_at=stop_at)
        try:
            run(replace(drawn_ahead(first, folder=folder, **SETTINGS), progress=memory), first)
            finished = True
        except RunStopped:
            start = memory.positions[-1]
            second, resumed = new_journal(), new_memory(start=start, collected=memory.collected)
            iteration = replace(drawn_ahead(second, folder=folder, **SETTINGS), progress=resumed)
            iteration.policy.batches.extend(first.policy.batches[: start.steps_taken])
            run(iteration, second)
            assert steps_of(second.lines) == steps_of(whole.lines)[start.steps_taken :]
            assert [second.store.drawn(t) for t in range(4)] == [whole.store.drawn(t) for t in range(4)]
    assert stop_at > 16
