"""One-step-off generation while the previous iteration trains, with the numbers of a synchronous loop."""

import time
from itertools import count
from threading import Event, current_thread
from threading import enumerate as threads

import pytest
import torch

import nemo_edo.algorithms.iteration as algorithm
from nemo_edo.algorithms import samples
from nemo_edo.errors import UserError

SETTINGS = {"problems": 3, "iterations": 4, "epochs": 2, "minibatch_size": 8, "alpha": 0.0}
DYNAMIC = {"problems": 12, "problems_per_iteration": 4, "iterations": 3, "minibatch_size": 8, "dynamic_sampling": True,
           "alpha": 0.0, "hopeless": ["p-1", "p-2", "p-5", "p-7"]}
LIMIT_S = 20.0


@pytest.fixture
def ahead_run(fake_iteration):
    """ahead_run(before=..., before_a_step=..., **settings): a FakeRun that generates in a thread, where ``before()`` is
    called ahead of the engine's generate, and ``before_a_step()`` ahead of the policy's train_step."""

    def build(*, before=lambda: None, before_a_step=lambda: None, **settings):
        iteration = fake_iteration(**settings).changed(part_size=5, lag=1)
        services = iteration.services
        generate, step = services.engine.generate, services.policy.train_step

        def generate_in_thread(requests, sampling):
            if current_thread().name.startswith("generate ahead"):
                before()
            return generate(requests, sampling)

        def train_step(batch, **given):
            before_a_step()
            return step(batch, **given)

        services.engine.generate, services.policy.train_step = generate_in_thread, train_step
        return iteration

    return build


@pytest.fixture
def ahead(monkeypatch) -> list[samples.Ahead]:
    """What generates ahead in the run that is to come."""
    made = []
    monkeypatch.setattr(algorithm, "Ahead", lambda *given: made.append(samples.Ahead(*given)) or made[-1])
    return made


def generating_threads() -> list:
    return [thread for thread in threads() if thread.name.startswith("generate ahead")]


def test_each_iteration_trains_on_samples_of_the_policy_before(ahead_run):
    journal = ahead_run(**SETTINGS).run()
    versions = [{one.rollout.policy_version for one in journal.store.read(t)} for t in range(4)]
    assert versions == [{0}, {0}, {1}, {2}]
    collections = journal.lines_of("collection")
    assert [(line["policy_version"], line["staleness"]) for line in collections] == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert generating_threads() == [] and journal.store.stored(4) == []
    assert all("sampling_s" in speed for kind, speed in journal.times if kind == "collection")


@pytest.mark.parametrize("settings", [SETTINGS, DYNAMIC], ids=["plain", "dynamic sampling"])
def test_the_numbers_are_those_of_a_synchronous_loop_on_the_same_samples(ahead_run, fake_iteration, settings):
    ahead = ahead_run(folder="ahead", **settings).run()
    synchronous = fake_iteration(folder="fed", **settings).changed(given=ahead.store, keeps_stale=True).run()
    assert ahead.lines == synchronous.lines
    pairs = zip(ahead.policy.batches, synchronous.policy.batches, strict=True)
    assert all(torch.equal(one.tensors()[name], other.tensors()[name])
               for one, other in pairs for name in one.tensors())


def test_the_next_samples_are_generated_while_the_policy_trains_and_the_push_waits_for_them(ahead_run):
    trained = Event()

    def after_a_step():
        assert trained.wait(LIMIT_S), "nothing was trained while this was to be generated"

    journal = ahead_run(before=after_a_step, before_a_step=trained.set, **{**SETTINGS, "iterations": 2}).run()
    kinds = [event[0] for event in journal.events]
    push = journal.events.index(("push", 1))
    assert kinds[:push].count("generate") == 6 and kinds[push:].count("generate") == 0  # 12 responses, 5 a part, twice


def test_an_error_of_generation_ahead_ends_the_run_after_the_step_in_which_it_occurs(ahead_run, ahead):
    def fail():
        raise UserError("no server is left")

    def until_it_has_ended():
        while not ahead[0].is_done():
            time.sleep(0.001)

    iteration = ahead_run(before=fail, before_a_step=until_it_has_ended, **SETTINGS)
    with pytest.raises(UserError, match="no server is left"):
        iteration.run()
    assert len(iteration.journal.policy.batches) == 1 and generating_threads() == []


def test_a_run_that_ends_early_ends_generation_ahead_too(ahead_run, ahead):
    begun = Event()

    def until_stopped():
        begun.set()
        while True:
            ahead[0].stop_if_asked()
            time.sleep(0.001)

    def fail():
        assert begun.wait(LIMIT_S)  # a run that ends before is another case
        raise TypeError

    with pytest.raises(TypeError):
        ahead_run(before=until_stopped, before_a_step=fail, **SETTINGS).run()
    assert generating_threads() == []


def test_nothing_is_saved_within_an_iteration_until_the_next_samples_are_there(ahead_run, new_memory, monkeypatch):
    """Otherwise a resumed run would have to generate them, and their policy is gone by then."""
    memory, may_generate, finish = new_memory(), Event(), samples.Ahead.finish

    def wait():
        assert may_generate.wait(LIMIT_S)

    monkeypatch.setattr(samples.Ahead, "finish", lambda ahead: may_generate.set() or finish(ahead))
    ahead_run(before=wait, **{**SETTINGS, "iterations": 2}).changed(progress=memory).run()
    assert [position for position in memory.positions if position.iteration == 0 and position.step] == []
    assert [position.step for position in memory.positions if position.iteration == 1] == [0, 1, 2, 3, 4]


def test_a_run_stopped_at_any_place_and_resumed_does_what_an_uninterrupted_one_does(go, new_memory):
    whole, _ = go(SETTINGS, new_memory(), folder="whole", lag=1)
    for stop_at in count(1):
        memory = new_memory(stop_at=stop_at)
        first, finished = go(SETTINGS, memory, folder=f"stopped {stop_at}", lag=1)
        if finished:
            break
        resumed = new_memory(start=memory.positions[-1], collected=memory.collected)
        second, _ = go(SETTINGS, resumed, folder=f"stopped {stop_at}", before=first, lag=1)
        assert second.lines_of("train_step") == whole.lines_of("train_step")[resumed.start.steps_taken :]
        assert [second.store.stored(t) for t in range(4)] == [whole.store.stored(t) for t in range(4)]
    assert stop_at > 16
