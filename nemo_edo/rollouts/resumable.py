"""Responses generated in parts, each on disk before the next begins: a killed process loses one part at most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, Problem, Rollout, SamplingParams, ScoredRollout
from nemo_edo.utils.phases import PhaseClock


class Parts:
    """The parts of one iteration's responses: those that an earlier process has put on disk, and those that are
    generated now. After the last part, ``store.write`` with all responses makes one file of them."""

    def __init__(self, store: RolloutStore, iteration: int, versions: range | None = None) -> None:
        """versions: those of the policies that may have generated the responses; None: ``iteration`` alone."""
        self._store = store
        self._iteration = iteration
        self._versions = range(iteration, iteration + 1) if versions is None else versions
        self._stored = store.stored(iteration)
        self._unfinished = {_request_of(item): item for item in store.unfinished(iteration)}
        """Responses of a part that an engine has given up on."""
        self.earlier = [*self._stored, *self._unfinished.values()]
        """What an earlier process has generated and scored."""
        self._taken = 0
        """Responses that were asked for, and are on disk."""
        self._parts = self._tokens = 0
        self._seconds = 0.0

    @property
    def speed(self) -> dict[str, float]:
        """Seconds in the engine and response tokens per second; empty where nothing was generated."""
        return {"sampling_s": self._seconds, "tokens_per_s": self._tokens / self._seconds} if self._tokens else {}

    def on_disk(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """The next part's responses; empty where it has to be generated. Raises UserError where they answer other
        requests, or are of another policy."""
        part, where = self._stored[self._taken : self._taken + len(requests)], str(self._store.folder)
        if part:
            _require_answers(part, requests, self._iteration, where)
            require_version(part, self._iteration, self._versions, where)
            self._count(part)
        return part

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        engine: GenerationEngine,
        scorer: Scorer,
        sampling: SamplingParams,
        problems: Sequence[Problem],
        clock: PhaseClock | None = None,
    ) -> list[ScoredRollout]:
        """The next part's responses, which then are on disk: those that an engine had before it gave up on the part,
        and the others now. clock: gets the phases generate and score.

        Raises UserError where a response is of another policy, and where the engine or the scorer gives up: the
        responses that it has by then are on disk."""
        clock = clock or PhaseClock()
        missing = [request for request in requests if request not in self._unfinished]
        begun, scored = time.monotonic(), []
        try:
            try:
                with clock.phase("generate"):
                    rollouts = engine.generate(missing, sampling) if missing else []
            except PartlyGenerated as partly:
                kept = self._scorable(partly.responses, requests, scorer)
                raise PartlyGenerated(str(partly), scorer.score(kept, problems)) from partly
            self._seconds += time.monotonic() - begun
            self._tokens += sum(len(rollout.response_ids) for rollout in rollouts)
            with clock.phase("score"):
                scored = scorer.score(rollouts, problems) if rollouts else []
        except PartlyGenerated as partly:
            kept = [*self._unfinished.values(), *partly.responses]
            self._store.write_unfinished(self._iteration, kept)
            raise UserError(
                f"{partly}. {self._taken + len(kept)} responses of iteration {self._iteration} are kept in "
                f"{self._store.folder}; rerun the command to resume"
            ) from partly
        new = iter(scored)
        part = [self._unfinished[request] if request in self._unfinished else next(new) for request in requests]
        require_version(part, self._iteration, self._versions, "the engine")
        self._store.write_part(self._iteration, self._parts, part)
        self._count(part)
        return part

    def _scorable(
        self, rollouts: Sequence[Rollout], requests: Sequence[GenerationRequest], scorer: Scorer
    ) -> Sequence[Rollout]:
        """The rollouts that a scorer can score now: one that compares a problem's responses needs all of them."""
        if not getattr(scorer, "by_group", False):
            return rollouts
        asked = Counter(request.problem_id for request in requests)
        there = Counter(rollout.problem_id for rollout in rollouts)
        return [rollout for rollout in rollouts if there[rollout.problem_id] == asked[rollout.problem_id]]

    def _count(self, part: Sequence[ScoredRollout]) -> None:
        self._taken += len(part)
        self._parts += 1


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
