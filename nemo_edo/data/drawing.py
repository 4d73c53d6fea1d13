"""Responses drawn in parts, each on disk before the next is begun: a process that is killed loses one at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_edo.data.batching import minibatches
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import PartlyDrawn, UserError
from nemo_edo.interfaces import Scorer
from nemo_edo.types import GenerationRequest, Problem, Rollout, ScoredRollout

Draw = Callable[[Sequence[GenerationRequest]], list[ScoredRollout]]
"""Answers requests: one scored response each, in order."""


def draw_scored(draw: Callable[[], list[Rollout]], scorer: Scorer, problems: Sequence[Problem]) -> list[ScoredRollout]:
    """What ``draw`` returns, scored. So are the responses of an engine that gives up: PartlyDrawn then holds these. A
    scorer that gives up raises PartlyDrawn itself, with what it has scored."""
    try:
        drawn = draw()
    except PartlyDrawn as partly:
        raise PartlyDrawn(str(partly), scorer.score(partly.drawn, problems)) from partly
    return scorer.score(drawn, problems)


class DrawnInParts:
    """A ``Draw`` that finds on disk what an earlier process has drawn of the same iteration.

    ``store.write`` with everything that was drawn, once that is done, makes one file of the parts.
    """

    def __init__(
        self,
        store: RolloutStore,
        iteration: int,
        draw: Draw,
        *,
        part_size: int,
        writes: bool,
        before_part: Callable[[], None] = lambda: None,
        versions: range | None = None,
    ) -> None:
        """writes: True on the one rank that writes what all of them hold. before_part: called before each part that is
        drawn, while nothing is at stake. versions: of the policies that may have drawn; None: ``iteration`` alone."""
        self._store = store
        self._iteration = iteration
        self._draw = draw
        self._part_size = part_size
        self._writes = writes
        self._before_part = before_part
        self._versions = range(iteration, iteration + 1) if versions is None else versions
        self._on_disk = store.drawn(iteration)
        self._unfinished = {_request_of(item): item for item in store.unfinished(iteration)}
        """Responses of a part that an engine has given up on."""
        self._taken = 0
        """Responses that were asked for, and are on disk."""
        self._parts = 0

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """Raises UserError where what is on disk answers other requests, and where responses are of another policy."""
        parts = [self._part(part) for part in minibatches(requests, self._part_size)]
        return [scored for part in parts for scored in part]

    def _part(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        part = self._on_disk[self._taken : self._taken + len(requests)]
        if part:
            _require_answers(part, requests, self._iteration, str(self._store.folder))
            require_version(part, self._iteration, self._versions, str(self._store.folder))
            self._taken += len(part)
        else:
            self._before_part()
            part = self._drawn(requests)
            require_version(part, self._iteration, self._versions, "the engine")
            if self._writes:
                self._store.write_part(self._iteration, self._parts, part)
            self._taken += len(part)
        self._parts += 1
        return part

    def _drawn(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """Raises UserError where the engine gives up; what it has by then is on disk."""
        there = self._unfinished
        missing = [request for request in requests if request not in there]
        try:
            drawn = iter(self._draw(missing) if missing else [])
        except PartlyDrawn as partly:
            kept = [*there.values(), *partly.drawn]
            if self._writes:
                self._store.write_unfinished(self._iteration, kept)
            raise UserError(
                f"{partly}. {self._taken + len(kept)} responses of iteration {self._iteration} are kept in "
                f"{self._store.folder}; started again, the run goes on from there"
            ) from partly
        return [there[request] if request in there else next(drawn) for request in requests]


def _request_of(item: ScoredRollout) -> GenerationRequest:
    rollout = item.rollout
    return GenerationRequest(rollout.problem_id, rollout.sample_index, rollout.prompt_ids, rollout.seed)


def _require_answers(
    scored: Sequence[ScoredRollout], requests: Sequence[GenerationRequest], t: int, where: str
) -> None:
    """What was found on disk are the very responses that are asked for."""
    if len(scored) != len(requests):
        raise UserError(f"{where}: iteration {t} has {len(scored)} of a part's {len(requests)} responses there")
    for item, request in zip(scored, requests, strict=True):
        for name in ("problem_id", "sample_index", "prompt_ids", "seed"):
            there, here = getattr(item.rollout, name), getattr(request, name)
            if there != here:
                raise UserError(
                    f"{where}: iteration {t} has a response with {name} {there} there where {here} is asked for here; "
                    "they are another run's, or problems or settings have changed: remove them to draw others"
                )


def require_version(scored: Sequence[ScoredRollout], t: int, versions: range, where: str) -> None:
    """Raises UserError unless all responses of iteration ``t`` are of policy versions among ``versions``."""
    strange = next((item.rollout for item in scored if item.rollout.policy_version not in versions), None)
    if strange is None:
        return
    oldest, newest = versions[0], versions[-1]
    asked = f"version {newest}" if oldest == newest else f"one from {oldest} to {newest}"
    advice = (
        ""
        if strange.policy_version > newest or oldest == 0
        else "; generation.stale=correct trains on responses of earlier policies, with importance correction"
    )
    raise UserError(
        f"{where}: a response of iteration {t} is of policy version {strange.policy_version} there; {asked} is asked "
        f"for here{advice}"
    )
