"""One of two gloo processes meets a full disk: both end, and one message tells why."""

from pathlib import Path

import pytest
from helpers.worker_pool import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(("full", "rank", "told"), [
    ("full_as_a_writer_writes", 0, "step.part could not be written by rank 0: "),
    ("full_as_a_writer_writes", 1, "step.part could not be written by rank 1: "),
])
def test_both_processes_end_with_the_message_of_the_one_whose_disk_is_full(
    two: WorkerPool, tiny_model: Path, tmp_path: Path, full: str, rank: int, told: str
):
    first, second = two.run("helpers.full_disk_cases:saved", model=tiny_model, folder=tmp_path / "step", full=full,
                            rank=rank, limit_s=300)
    assert first == second and told in first
    assert not (tmp_path / "step").exists()
