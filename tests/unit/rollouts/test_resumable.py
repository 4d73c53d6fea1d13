"""Responses on disk are not generated again, and nothing else is taken for them."""

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from helpers.responses import scored

from nemo_edo.errors import PartlyGenerated, PartlyScored, RunStopped, UserError
from nemo_edo.interfaces import PartWatch
from nemo_edo.rollouts import resumable
from nemo_edo.rollouts.resumable import Parts
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, Rollout, ScoredRollout

REQUESTS = [GenerationRequest(f"p-{i}", 0, (i, 7), seed=i) for i in range(7)]
ITERATION = 3


class Killed(Exception):
    pass


def answer(one: GenerationRequest) -> Rollout:
    return scored(one.problem_id, one.sample_index, prompt_ids=one.prompt_ids, policy_version=ITERATION,
                  seed=one.seed).rollout


class Engine:
    """Generates responses, a part at a time, until it is killed in the given one."""

    def __init__(self, killed_in: int | None = None) -> None:
        self.parts, self.killed_in = [], killed_in

    def generate(self, requests, sampling) -> list[Rollout]:
        if len(self.parts) == self.killed_in:
            raise Killed
        self.parts.append([request.problem_id for request in requests])
        return [answer(one) for one in requests]


class Streaming(Engine):
    """Hands over one response after the other, in this order, and then ends with the error."""

    takes_all = True

    def __init__(self, order=(), error: Exception | None = None) -> None:
        super().__init__()
        self.order, self.error = order, error

    def generate(self, requests, sampling, arrivals) -> list[Rollout]:
        rollouts = super().generate(requests, sampling)
        for place in self.order:
            arrivals.add([rollouts[place]])
        if self.error is not None:
            raise self.error
        return rollouts


class Silent(PartWatch):
    """Tells nobody."""


SCORER = SimpleNamespace(
    score=lambda rollouts, problems: [ScoredRollout(one, 1.0, "2", True, "correct") for one in rollouts])


def ask(store: RolloutStore, engine, requests=REQUESTS, *, part_size: int = 3, versions: range | None = None,
        scorer=SCORER, watch: PartWatch | None = None):
    """All responses, as a collection and an evaluation ask for them."""
    parts = Parts(store, ITERATION, versions, part_size=part_size, watch=watch or Silent())
    return parts.responses(requests, engine, scorer, None, [])


def test_a_killed_generation_loses_one_part_at_most_ends_as_one_that_was_not_and_is_not_repeated(tmp_path):
    whole = ask(RolloutStore(tmp_path / "whole"), Engine())
    store = RolloutStore(tmp_path / "killed")
    with pytest.raises(Killed):
        ask(store, Engine(killed_in=2))
    engine = Engine()
    assert ask(store, engine) == whole
    store.write(ITERATION, whole)
    assert ask(store, engine, part_size=4) == whole
    assert engine.parts == [["p-6"]]


def test_what_has_ended_is_on_disk_while_others_are_generated_and_they_alone_are_asked_for_later(tmp_path, monkeypatch):
    """Whatever order it ended in, twice, and although the process is killed; each response is a sign of life."""
    monkeypatch.setattr(resumable, "WRITTEN_EVERY_S", 0.0)
    whole = ask(RolloutStore(tmp_path / "whole"), Engine())
    store, signs, watch = RolloutStore(tmp_path / "killed"), [], Silent()
    watch.alive = lambda: signs.append(1)
    for order in ([5, 0], [2]):  # of the requests that are left: p-5, p-0, then p-3
        with pytest.raises(Killed):
            ask(store, Streaming(order, Killed()), watch=watch)
        until = time.monotonic() + 60
        while len(store.stored(ITERATION)) < len(signs) and time.monotonic() < until:
            time.sleep(0.01)  # another thread writes
    assert [item.rollout.problem_id for item in store.stored(ITERATION)] == ["p-5", "p-0", "p-3"]
    engine = Streaming()
    assert ask(store, engine) == whole
    assert engine.parts == [["p-1", "p-2", "p-4", "p-6"]]


@pytest.mark.parametrize("engine", [Engine, Streaming])
def test_a_run_is_alive_while_it_scores(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(resumable, "ALIVE_EVERY_S", 0.01)
    watch, signs = Silent(), []
    watch.alive = lambda: signs.append(time.monotonic())

    def score(rollouts, problems):
        time.sleep(0.2)
        return SCORER.score(rollouts, problems)

    ask(RolloutStore(tmp_path), engine(), part_size=9, scorer=SimpleNamespace(score=score), watch=watch)
    assert signs[-1] - signs[0] > 0.1 and len(signs) > 5


def test_a_run_that_is_asked_to_stop_keeps_what_has_ended(tmp_path):
    with pytest.raises(RunStopped):
        ask(RolloutStore(tmp_path), Streaming([6, 1], RunStopped("asked")))
    assert [item.rollout.problem_id for item in RolloutStore(tmp_path).stored(ITERATION)] == ["p-6", "p-1"]


@pytest.mark.parametrize(("error", "told"), [
    (UserError("no such rule"), "^no such rule$"),
    (PartlyScored("no judge is left", [SCORER.score([answer(REQUESTS[0])], [])[0]]),
     "^no judge is left. 1 responses of iteration 3 are kept in .*; rerun")])
def test_a_scorer_that_fails_meanwhile_ends_the_generation_with_its_reason(tmp_path, monkeypatch, error, told):
    monkeypatch.setattr(resumable, "WRITTEN_EVERY_S", 0.0)

    def generate(requests, sampling, arrivals):
        arrivals.add([answer(requests[0])])
        until = time.monotonic() + 60
        while time.monotonic() < until:
            arrivals.stop_if_asked()
            time.sleep(0.01)
        raise AssertionError("nothing ended it")

    def fail(rollouts, problems):
        raise error

    patient = SimpleNamespace(takes_all=True, generate=generate)
    with pytest.raises(UserError, match=told):
        ask(RolloutStore(tmp_path), patient, scorer=SimpleNamespace(score=fail))


@pytest.mark.parametrize(("changed", "told"), [
    ({"problem_id": "p-9"}, "problem_id p-0, .* p-9"),
    ({"prompt_ids": (4,)}, r"prompt_ids \(0, 7\), .* \(4,\)"),
    ({"seed": 9}, "seed 0, .* 9")])
def test_responses_on_disk_to_other_requests_are_refused_with_both_sides(tmp_path, changed: dict, told: str):
    store = RolloutStore(tmp_path)
    ask(store, Engine())
    with pytest.raises(UserError, match=told):
        ask(store, Engine(), [replace(REQUESTS[0], **changed), *REQUESTS[1:]])


@pytest.mark.parametrize(("versions", "told"), [
    (None, "the engine: .* iteration 3 has policy version 2, .* version 3; generation.stale=correct"),
    (range(1), "the engine: .* has policy version 2, .* version 0$"),
    (range(1, 2), "the engine: .* has policy version 2, .* version 1$")])
def test_responses_of_another_policy_are_refused_before_they_are_written_and_on_disk(tmp_path, versions, told):
    class Stale(Engine):
        def generate(self, requests, sampling):
            return [replace(one, policy_version=2) for one in super().generate(requests, sampling)]

    store = RolloutStore(tmp_path)
    with pytest.raises(UserError, match=told):
        ask(store, Stale(), versions=versions)
    assert store.stored(ITERATION) == []
    assert len(ask(store, Stale(), versions=range(4))) == len(REQUESTS)
    with pytest.raises(UserError, match="has policy version 2, .* version 3"):
        ask(store, Engine())


def test_what_an_engine_had_each_time_it_gave_up_is_scored_and_kept_and_only_the_rest_is_generated_later(tmp_path):
    """The first part is complete; of the second, p-3 to p-5, an engine has two responses, and then none more."""
    def generate(places, requests, sampling):
        rollouts = [answer(one) for one in requests]
        if requests[0].problem_id == "p-0":
            return rollouts
        raise PartlyGenerated("no server is left", [rollouts[place] for place in places])

    whole = ask(RolloutStore(tmp_path / "whole"), Engine())
    store = RolloutStore(tmp_path / "given up")
    for places in ([2, 0], []):
        with pytest.raises(UserError, match="no server is left. 5 responses of iteration 3 .*given up"):
            ask(store, SimpleNamespace(generate=partial(generate, places)))
    engine = Engine()
    assert ask(store, engine) == whole
    assert engine.parts == [["p-4", "p-6"]]


@pytest.mark.parametrize("part_size", [1, 3, 99])
@pytest.mark.parametrize("engine", [Streaming([0, 3, 1, 6, 4, 2], RunStopped("asked")), Engine(killed_in=2)])
def test_a_scorer_that_compares_a_problems_responses_gets_all_of_them_at_once(tmp_path, monkeypatch, part_size, engine):
    """However they end, and in whatever parts they are generated and written."""
    monkeypatch.setattr(resumable, "WRITTEN_EVERY_S", 0.0)
    requests = [GenerationRequest(f"p-{at // 3}", at % 3, (at // 3, 7), seed=at) for at in range(9)]
    asked = []

    def score(rollouts, problems):
        asked.append([one.problem_id for one in rollouts])
        return SCORER.score(rollouts, problems)

    together, store = SimpleNamespace(score=score, by_group=True), RolloutStore(tmp_path)
    with suppress(Killed, RunStopped):
        ask(store, engine, requests, part_size=part_size, scorer=together)
    found = ask(store, Engine(), requests, part_size=part_size, scorer=together)
    assert [(one.rollout.problem_id, one.rollout.sample_index) for one in found] == [
        (one.problem_id, one.sample_index) for one in requests]
    assert all(names.count(name) == 3 for names in asked for name in names)
