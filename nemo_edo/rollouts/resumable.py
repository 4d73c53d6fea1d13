"""Responses that are scored and put on disk while others are generated: a killed process loses only what had not ended.

An engine with ``takes_all`` hands over responses as they end, any other one a part's responses together.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from nemo_edo.data.batching import minibatches
from nemo_edo.errors import Partly, PartlyGenerated, PartlyScored, RunStopped, UserError
from nemo_edo.interfaces import GenerationEngine, PartWatch, Scorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, Problem, Rollout, SamplingParams, ScoredRollout
from nemo_edo.utils.phases import PhaseClock

WRITTEN_EVERY_S = 60.0
"""Fewer responses than a part are put on disk after so many seconds."""

ALIVE_EVERY_S = 10.0


class Parts:
    """One iteration's responses: those that an earlier process has put on disk, and those that are generated now. At
    the end, ``store.write`` with all responses makes one file of them."""

    def __init__(
        self, store: RolloutStore, iteration: int, versions: range | None = None, *, watch: PartWatch,
        part_size: int = 2048, clock: PhaseClock | None = None,
    ) -> None:  # fmt: skip
        """versions: those of the policies that may have generated the responses; None: ``iteration`` alone. part_size:
        responses that are scored and written at a time, at most. clock: where the time of generation and scoring is
        counted."""
        self.part_size, self.watch, self.clock = part_size, watch, clock or PhaseClock()
        self.store, self.iteration = store, iteration
        self.versions = range(iteration, iteration + 1) if versions is None else versions
        self.earlier = store.stored(iteration)
        """What an earlier process has generated and scored, in the order in which it was asked for up to whole calls
        of ``responses``."""
        self._taken = self._tokens = 0
        self._seconds = 0.0

    @property
    def speed(self) -> dict[str, float]:
        """Seconds in the engine and response tokens per second; empty where nothing was generated."""
        return {"sampling_s": self._seconds, "tokens_per_s": self._tokens / self._seconds} if self._tokens else {}

    def responses(
        self,
        requests: Sequence[GenerationRequest],
        engine: GenerationEngine,
        scorer: Scorer,
        sampling: SamplingParams,
        problems: Sequence[Problem],
    ) -> list[ScoredRollout]:
        """Scored responses to the requests, in their order; those that are not on disk are generated, and then are.

        The clock gets the phases generate and score; scoring is in the former while responses are generated.
        Raises UserError where responses on disk answer other requests or a response is of another policy, and where
        the engine or the scorer gives up, and RunStopped: the responses that have ended by then are on disk."""
        clock, found = self.clock, self._take(requests)
        missing = [request for request in requests if _key(request) not in found]
        # A scorer that compares a problem's responses gets them together.
        together = Counter(one.problem_id for one in missing) if getattr(scorer, "by_group", False) else {}
        arrivals = StoredArrivals(self, scorer, problems, together)
        streams = hasattr(engine, "takes_all")
        try:
            part_size = len(missing) if getattr(engine, "takes_all", False) else self.part_size
            for asked in minibatches(missing, max(1, part_size)):
                begun = time.monotonic()
                with clock.phase("generate"):
                    self.watch.begin_part()
                    try:
                        arrivals.add(engine.generate(asked, sampling, *([arrivals] if streams else [])))
                    except (Partly, RunStopped) as ended:
                        if isinstance(ended, PartlyGenerated):
                            arrivals.add(ended.responses)
                        arrivals.finish()
                        raise
                self._seconds += time.monotonic() - begun
                with clock.phase("score"):
                    arrivals.finish()
        except Partly as partly:
            raise UserError(
                f"{partly}. {self._taken + len(arrivals.scored)} responses of iteration {self.iteration} are kept in "
                f"{self.store.folder}; rerun the command to resume"
            ) from partly
        self._taken += len(arrivals.scored)
        self._tokens += sum(len(item.rollout.response_ids) for item in arrivals.scored.values())
        found |= arrivals.scored
        return [found[_key(request)] for request in requests]

    def _take(self, requests: Sequence[GenerationRequest]) -> dict[tuple, ScoredRollout]:
        """The responses on disk to these requests, by ``_key``. Raises UserError where those that come next answer
        others, or are of another policy."""
        stored, where = self.earlier[self._taken : self._taken + len(requests)], str(self.store.folder)
        asked = {_key(request): request for request in requests}
        for item, at_its_place in zip(stored, requests, strict=False):
            request = asked.get(_key(item.rollout), at_its_place)
            for name in ("problem_id", "sample_index", "prompt_ids", "seed"):
                there, here = getattr(item.rollout, name), getattr(request, name)
                if there != here:
                    raise UserError(
                        f"{where}: iteration {self.iteration} has a response with {name} {there}, but this run asks "
                        f"for {here}; they are another run's, or problems or settings have changed: remove them to "
                        "generate others"
                    )
        require_version(stored, self.iteration, self.versions, where)
        self._taken += len(stored)
        return {_key(item.rollout): item for item in stored}


class StoredArrivals:
    """``interfaces.Arrivals``: scores responses and puts them on disk in another thread."""

    def __init__(self, parts: Parts, scorer: Scorer, problems: Sequence[Problem], together: Mapping[str, int]) -> None:
        """together: for each problem whose responses wait for each other, their number. Those of a problem that lacks
        some at the end are not scored: they are generated again."""
        self.scored: dict[tuple, ScoredRollout] = {}
        """The responses that are on disk, by problem and sample."""
        self._parts, self._scorer, self._problems, self._together = parts, scorer, problems, together
        self._groups: dict[str, list[Rollout]] = {}
        self._known: set[tuple] = set()
        self._waiting: list[list[Rollout]] = []
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "score and write")
        self._writing: list[Future] = []

    def alive(self) -> None:
        self._parts.watch.alive()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Takes responses, of which it may have some already."""
        self.alive()
        with self._lock:
            new = [one for one in rollouts if _key(one) not in self._known]
            self._known |= {_key(one) for one in new}
            for one in new:
                group = self._groups.setdefault(one.problem_id, [])
                group.append(one)
                if len(group) >= self._together.get(one.problem_id, 1):
                    self._waiting.append(self._groups.pop(one.problem_id))
            now = time.monotonic()
            many = sum(map(len, self._waiting)) > self._parts.part_size
            if self._waiting and (many or now > self._since + WRITTEN_EVERY_S):
                self._since = now
                self._writing.append(self._pool.submit(self._write, self._next_part()))

    def stop_if_asked(self) -> None:
        """Raises RunStopped if the run is asked to stop, and what ended scoring or writing."""
        self._parts.watch.stop_if_asked()
        for future in list(self._writing):
            if future.done() and future.exception() is not None:
                future.result()

    def finish(self) -> None:
        """Everything that has arrived is on disk, or what prevents it is raised."""
        try:
            for future in self._writing:
                self._wait(future)
            while self._waiting:
                self._wait(self._pool.submit(self._write, self._next_part()))
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._pool, self._writing = ThreadPoolExecutor(1, "score and write"), []

    def _wait(self, future: Future) -> None:
        """Waits for scored responses, and reports progress meanwhile: scorers have their own time limits."""
        while not wait([future], timeout=ALIVE_EVERY_S).done:
            self.alive()
        future.result()

    def _next_part(self) -> list[Rollout]:
        """The next rollouts that wait: at most ``part_size``, but all that belong together."""
        taken: list[Rollout] = []
        while self._waiting and (not taken or len(taken) + len(self._waiting[0]) <= self._parts.part_size):
            taken += self._waiting.pop(0)
        return taken

    def _write(self, rollouts: Sequence[Rollout]) -> None:
        parts, gave_up = self._parts, None
        require_version(rollouts, parts.iteration, parts.versions, "the engine")
        try:
            scored = self._scorer.score(rollouts, self._problems)
        except PartlyScored as partly:
            scored, gave_up = partly.responses, partly
        if scored:
            parts.store.write_part(parts.iteration, scored)
        self.scored |= {_key(item.rollout): item for item in scored}
        if gave_up is not None:
            raise gave_up


def _key(one: GenerationRequest | Rollout) -> tuple[str, int]:
    return one.problem_id, one.sample_index


def require_version(found: Sequence[ScoredRollout | Rollout], t: int, versions: range, where: str) -> None:
    rollouts = (getattr(item, "rollout", item) for item in found)
    strange = next((rollout for rollout in rollouts if rollout.policy_version not in versions), None)
    if strange is None:
        return
    oldest, newest = versions[0], versions[-1]
    asked = f"version {newest}" if oldest == newest else f"a version from {oldest} to {newest}"
    advice = "; generation.stale=correct trains on responses of earlier policies, with importance correction"
    if strange.policy_version > newest or oldest == 0:
        advice = ""
    raise UserError(
        f"{where}: a response of iteration {t} has policy version {strange.policy_version}, but this iteration needs "
        f"{asked}{advice}"
    )
