"""Responses drawn in parts, each on disk before the next is begun: a process that is killed loses one at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_edo.data.batching import minibatches
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import UserError
from nemo_edo.types import GenerationRequest, ScoredRollout

Draw = Callable[[Sequence[GenerationRequest]], list[ScoredRollout]]
"""Answers requests: one scored response each, in order."""


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
    ) -> None:
        """iteration: also the version of the policy that draws. writes: True on the one rank that writes what all of
        them hold. before_part: called before each part that is drawn, while nothing is at stake."""
        self._store = store
        self._iteration = iteration
        self._draw = draw
        self._part_size = part_size
        self._writes = writes
        self._before_part = before_part
        self._on_disk = store.drawn(iteration)
        self._taken = 0
        """Responses of ``_on_disk`` that were asked for."""
        self._parts = 0

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        """Raises UserError where what is on disk answers other requests."""
        parts = [self._part(part) for part in minibatches(requests, self._part_size)]
        return [scored for part in parts for scored in part]

    def _part(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        part = self._on_disk[self._taken : self._taken + len(requests)]
        if part:
            _require_answers(part, requests, self._iteration, str(self._store.folder))
            self._taken += len(part)
        else:
            self._before_part()
            part = self._draw(requests)
            if self._writes:
                self._store.write_part(self._iteration, self._parts, part)
        self._parts += 1
        return part


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
    require_version(scored, t, where)


def require_version(scored: Sequence[ScoredRollout], t: int, where: str) -> None:
    """Raises UserError unless all responses are of policy version ``t``."""
    strange = next((item.rollout for item in scored if item.rollout.policy_version != t), None)
    if strange is not None:
        raise UserError(
            f"{where}: a response of iteration {t} is of policy version {strange.policy_version} there; version {t} "
            "is asked for here"
        )
