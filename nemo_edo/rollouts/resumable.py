"""Responses generated in parts, each on disk before the next begins: a killed process loses one part at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_edo.data.batching import minibatches
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout

Answer = Callable[[Sequence[GenerationRequest]], list[ScoredRollout]]
"""Answers requests: one scored response each, in order."""


def generate_scored(
    requests: Sequence[GenerationRequest],
    *,
    engine: GenerationEngine,
    scorer: Scorer,
    sampling: SamplingParams,
    problems: Sequence[Problem],
) -> list[ScoredRollout]:
    """One scored response per request, in order.

    Raises PartlyGenerated, with scored responses, where the engine or the scorer gives up.
    """
    try:
        rollouts = engine.generate(requests, sampling)
    except PartlyGenerated as partly:
        raise PartlyGenerated(str(partly), scorer.score(partly.responses, problems)) from partly
    return scorer.score(rollouts, problems)


class InParts:
    """An ``Answer`` that finds on disk what an earlier process has generated for the same iteration.

    After the last part, ``store.write`` with all responses makes one file of them.
    """

    def __init__(
        self,
        store: RolloutStore,
        iteration: int,
        answer: Answer,
        *,
        part_size: int,
        before_part: Callable[[], None] = lambda: None,
        versions: range | None = None,
    ) -> None:
        """before_part: called before each part that is generated, when everything before it is on disk. versions: those
        of the policies that may have generated the responses; None: ``iteration`` alone."""
        self._store = store
        self._iteration = iteration
        self._answer = answer
        self._part_size = part_size
        self._before_part = before_part
        self._versions = range(iteration, iteration + 1) if versions is None else versions
        self._on_disk = store.stored(iteration)
        self._unfinished = {_request_of(item): item for item in store.unfinished(iteration)}
        """Responses of a part that an engine has given up on."""
        self.earlier = [*self._on_disk, *self._unfinished.values()]
        """What an earlier process has generated and scored."""
        self._taken = 0
        """Responses that were asked for, and are on disk."""
        self._parts = 0

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """Raises UserError where the responses on disk answer other requests, where any is of another policy, and where
        the engine or the scorer gives up: the responses that it has by then are on disk."""
        answered = []
        for part in minibatches(requests, self._part_size):
            found = self._found(part)
            if not found:
                self._before_part()
                try:
                    found = self._with_unfinished(part)
                except PartlyGenerated as partly:
                    raise self._kept(partly) from partly
                require_version(found, self._iteration, self._versions, "the engine")
                self._store.write_part(self._iteration, self._parts, found)
            answered += found
            self._taken += len(found)
            self._parts += 1
        return answered

    def _found(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """The part's responses on disk; empty where there are none."""
        part = self._on_disk[self._taken : self._taken + len(requests)]
        if part:
            _require_answers(part, requests, self._iteration, str(self._store.folder))
            require_version(part, self._iteration, self._versions, str(self._store.folder))
        return part

    def _with_unfinished(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """The part's responses: those that an engine had before it gave up, and the others now."""
        there = self._unfinished
        missing = [request for request in requests if request not in there]
        generated = iter(self._answer(missing) if missing else [])
        return [there[request] if request in there else next(generated) for request in requests]

    def _kept(self, partly: PartlyGenerated) -> UserError:
        kept = [*self._unfinished.values(), *partly.responses]
        self._store.write_unfinished(self._iteration, kept)
        return UserError(
            f"{partly}. {self._taken + len(kept)} responses of iteration {self._iteration} are kept in "
            f"{self._store.folder}; rerun the command to resume"
        )


def _request_of(item: ScoredRollout) -> GenerationRequest:
    rollout = item.rollout
    return GenerationRequest(rollout.problem_id, rollout.sample_index, rollout.prompt_ids, rollout.seed)


def _require_answers(
    scored: Sequence[ScoredRollout], requests: Sequence[GenerationRequest], t: int, where: str
) -> None:
    """The responses on disk answer the very requests that are made now."""
    if len(scored) != len(requests):
        raise UserError(f"{where}: iteration {t} has {len(scored)} of a part's {len(requests)} responses")
    for item, request in zip(scored, requests, strict=True):
        for name in ("problem_id", "sample_index", "prompt_ids", "seed"):
            there, here = getattr(item.rollout, name), getattr(request, name)
            if there != here:
                raise UserError(
                    f"{where}: iteration {t} has a response with {name} {there}, but this run asks for {here}; they "
                    "are another run's, or problems or settings have changed: remove them to generate others"
                )


def require_version(scored: Sequence[ScoredRollout], t: int, versions: range, where: str) -> None:
    """Raises UserError unless all responses of iteration ``t`` are of policy versions among ``versions``."""
    strange = next((item.rollout for item in scored if item.rollout.policy_version not in versions), None)
    if strange is None:
        return
    oldest, newest = versions[0], versions[-1]
    asked = f"version {newest}" if oldest == newest else f"a version from {oldest} to {newest}"
    advice = (
        ""
        if strange.policy_version > newest or oldest == 0
        else "; generation.stale=correct trains on responses of earlier policies, with importance correction"
    )
    raise UserError(
        f"{where}: a response of iteration {t} has policy version {strange.policy_version}, but this iteration needs "
        f"{asked}{advice}"
    )
