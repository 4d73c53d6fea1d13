"""What the first of two gloo processes does for both, and what they share."""

import pytest
from helpers.worker_pool import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
WAIT_S = 8.0
"""How long the processes wait for each other."""


def test_ranks_share_tasks_and_work_longer_than_they_wait_ends_with_its_result_or_error_on_all_of_them():
    with WorkerPool(2, wait_s=WAIT_S) as pool:
        shares = pool.run("helpers.main_rank_cases:shares")
        ranks = pool.run("helpers.main_rank_cases:long_work", wait_s=WAIT_S)
    assert ranks[0].pop("alone") == "not asking the others"
    assert ranks == [{"long": "done", "error": ("PartlyGenerated", "2 of 3 are there", ["a", "b"])}] * 2
    assert [one["results"] for one in shares] == [[0, 1, 4, 9, 16, 25, 36]] * 2
    assert [one["called"] for one in shares] == [[0, 2, 4, 6], [1, 3, 5]]
