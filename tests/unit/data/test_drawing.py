"""Responses in parts: what is on disk is not drawn again, and nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_edo.data.drawing import DrawnInParts, draw_scored
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import PartlyDrawn, UserError
from nemo_edo.types import GenerationRequest, Rollout, ScoredRollout

REQUESTS = [GenerationRequest(f"p-{i}", 0, (i, 7), seed=i) for i in range(7)]
ITERATION = 3


class Killed(Exception):
    pass


class Engine:
    """Answers requests, a part at a time, until it is killed in the given one."""

    def __init__(self, killed_in: int | None = None) -> None:
        self.parts: list[list[str]] = []
        self.killed_in = killed_in

    def __call__(self, requests) -> list[ScoredRollout]:
        if len(self.parts) == self.killed_in:
            raise Killed
        self.parts.append([request.problem_id for request in requests])
        return [ScoredRollout(answer(request), 1.0, "2", True, "correct") for request in requests]


def answer(request: GenerationRequest) -> Rollout:
    asked = (request.problem_id, request.sample_index, request.prompt_ids)
    return Rollout(*asked, (1,), (-0.5,), "x", True, ITERATION, request.seed)


def in_parts(store: RolloutStore, engine: Engine, **settings) -> DrawnInParts:
    return DrawnInParts(store, ITERATION, engine, **{"part_size": 3, "writes": True, **settings})


def test_a_killed_drawing_loses_one_part_at_most_and_ends_as_one_that_was_not(tmp_path):
    whole = in_parts(RolloutStore(tmp_path / "whole"), Engine())(REQUESTS)
    store = RolloutStore(tmp_path / "killed")
    with pytest.raises(Killed):
        in_parts(store, Engine(killed_in=2))(REQUESTS)
    engine = Engine()
    assert in_parts(store, engine)(REQUESTS) == whole
    assert engine.parts == [["p-6"]]


def test_what_was_drawn_to_its_end_is_not_drawn_again(tmp_path):
    store = RolloutStore(tmp_path)
    whole = in_parts(store, Engine())(REQUESTS)
    store.write(ITERATION, whole, rank=0, world_size=1)
    engine = Engine()
    assert in_parts(store, engine, part_size=4)(REQUESTS) == whole
    assert engine.parts == []


def test_before_each_part_that_is_drawn_there_is_a_place_to_stop(tmp_path):
    places: list[int] = []
    engine = Engine()
    in_parts(RolloutStore(tmp_path), engine, before_part=lambda: places.append(len(engine.parts)))(REQUESTS)
    assert places == [0, 1, 2]


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path):
    in_parts(RolloutStore(tmp_path / "store"), Engine(), writes=False)(REQUESTS)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("changed", "told"), [
    ({"problem_id": "p-9"}, "problem_id p-0 there where p-9 is asked for here"),
    ({"prompt_ids": (4,)}, r"prompt_ids \(0, 7\) there where \(4,\) is asked for here"),
    ({"seed": 9}, "seed 0 there where 9 is asked for here"),
])
def test_responses_on_disk_to_other_requests_are_refused_with_both_sides(tmp_path, changed: dict, told: str):
    store = RolloutStore(tmp_path)
    in_parts(store, Engine())(REQUESTS)
    with pytest.raises(UserError, match=told):
        in_parts(store, Engine())([replace(REQUESTS[0], **changed), *REQUESTS[1:]])


@pytest.mark.parametrize(("versions", "told"), [
    (None, "the engine: a response of iteration 3 is of policy version 2 there; version 3 is asked for here; "
           "generation.stale=correct"),
    (range(1), "the engine: .* is of policy version 2 there; version 0 is asked for here$"),
])
def test_responses_of_another_policy_are_refused_before_they_are_written(tmp_path, versions, told):
    class Stale(Engine):
        def __call__(self, requests):
            drawn = super().__call__(requests)
            return [replace(item, rollout=replace(item.rollout, policy_version=2)) for item in drawn]

    with pytest.raises(UserError, match=told):
        in_parts(RolloutStore(tmp_path), Stale(), versions=versions)(REQUESTS)
    assert RolloutStore(tmp_path).drawn(ITERATION) == []
    assert len(in_parts(RolloutStore(tmp_path), Stale(), versions=range(4))(REQUESTS)) == len(REQUESTS)


def test_stale_responses_on_disk_are_refused(tmp_path):
    in_parts(RolloutStore(tmp_path), Engine())(REQUESTS)
    with pytest.raises(UserError, match="is of policy version 3 there; version 2 is asked for here$"):
        in_parts(RolloutStore(tmp_path), Engine(), versions=range(2, 3))(REQUESTS)


def test_an_evaluation_that_came_to_its_end_is_discarded_and_one_that_did_not_is_kept(tmp_path):
    store = RolloutStore(tmp_path)
    whole = in_parts(store, Engine())(REQUESTS)
    store.discard_finished(ITERATION)
    assert len(store.drawn(ITERATION)) == len(whole)
    store.write(ITERATION, whole, rank=0, world_size=1)
    store.discard_finished(ITERATION)
    assert store.drawn(ITERATION) == []


class GivesUp(Engine):
    """An engine that answers two of the last part's requests alone."""

    def __call__(self, requests) -> list[ScoredRollout]:
        scored = super().__call__(requests)
        if len(self.parts) == 2:
            raise PartlyDrawn("2 of 3 responses were drawn, then: no server is left", [scored[2], scored[0]])
        return scored


def test_what_an_engine_had_when_it_gave_up_is_kept_and_only_the_rest_is_drawn_later(tmp_path):
    whole = in_parts(RolloutStore(tmp_path / "whole"), Engine())(REQUESTS)
    store = RolloutStore(tmp_path / "given up")
    told = "no server is left. 5 responses of iteration 3 are kept in .*given up; started again"
    with pytest.raises(UserError, match=told):
        in_parts(store, GivesUp())(REQUESTS)
    engine = Engine()
    assert in_parts(store, engine)(REQUESTS) == whole
    assert engine.parts == [["p-4"], ["p-6"]]


def test_an_engine_that_gives_up_twice_loses_nothing_of_the_first_time(tmp_path):
    store = RolloutStore(tmp_path)
    for given_up, kept in (([0, 2], 2), ([0], 3)):
        def draw(requests, given_up=given_up):
            scored = Engine()(requests)
            raise PartlyDrawn("gone", [scored[place] for place in given_up])

        with pytest.raises(UserError, match=f"{kept} responses of iteration 3"):
            in_parts(store, draw, part_size=7)(REQUESTS)
    engine = Engine()
    in_parts(store, engine, part_size=7)(REQUESTS)
    assert engine.parts == [["p-3", "p-4", "p-5", "p-6"]]


def test_responses_of_an_engine_that_gives_up_are_scored_as_well():
    class Scorer:
        def score(self, rollouts, problems):
            return [f"scored {rollout}" for rollout in rollouts]

    def give_up():
        raise PartlyDrawn("gone", ["a", "b"])

    with pytest.raises(PartlyDrawn, match="gone") as partly:
        draw_scored(give_up, Scorer(), [])
    assert partly.value.drawn == ["scored a", "scored b"]
