"""What rank 0 does for all ranks of a run: it generates ahead, reads and writes the rollouts, and logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_edo.algorithms.ahead import Ahead
from nemo_edo.parallel.main_rank import is_main, on_main, on_main_for_long
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.metrics_log import MetricsLog, opened
from nemo_edo.types import ScoredRollout


class AheadOnMain:
    """An ``algorithms.ahead.Ahead`` of rank 0, whose state every rank learns when it asks."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead

    @property
    def speed(self) -> dict[str, float]:
        return self._ahead.speed

    def begin(self, iteration: int) -> None:
        if is_main():
            self._ahead.begin(iteration)

    def is_done(self) -> bool:
        return on_main(self._ahead.is_done)

    def finish(self) -> None:
        on_main_for_long(self._ahead.finish)

    def close(self) -> None:
        """Tells the other ranks nothing: an error may have ended one of them."""
        self._ahead.close()


class SharedRolloutStore(RolloutStore):
    """A RolloutStore that rank 0 reads and writes for all ranks: what it finds cannot change while another one looks,
    and a file that all ranks have the content of is written once."""

    def stored(self, iteration: int) -> list[ScoredRollout]:
        return on_main(lambda: super(SharedRolloutStore, self).stored(iteration))

    def require_stored(self, iteration: int) -> None:
        """Raises UserError, on every rank, unless the iteration's shards are there and readable."""
        on_main(lambda: super(SharedRolloutStore, self).read(iteration) and None)

    def unfinished(self, iteration: int) -> list[ScoredRollout]:
        return on_main(lambda: super(SharedRolloutStore, self).unfinished(iteration))

    def write(self, iteration: int, scored: Sequence[ScoredRollout], *, rank: int, world_size: int) -> Path:
        write = super().write
        return on_main(lambda: write(iteration, scored, rank=rank, world_size=world_size))

    def write_part(self, iteration: int, part: int, scored: Sequence[ScoredRollout]) -> Path:
        write = super().write_part
        return on_main(lambda: write(iteration, part, scored))

    def write_unfinished(self, iteration: int, scored: Sequence[ScoredRollout]) -> Path:
        write = super().write_unfinished
        return on_main(lambda: write(iteration, scored))


class SharedMetricsLog(MetricsLog):
    """A MetricsLog that rank 0 writes for all ranks, and that fails on all of them."""

    def __init__(self, path: Path, *settings: Any, **more: Any) -> None:
        on_main(lambda: opened(path).close())
        super().__init__(path, *settings, **more)

    def __call__(self, kind: str, *, arm: str, **values: Any) -> None:
        add = super().__call__
        on_main(lambda: add(kind, arm=arm, **values))
