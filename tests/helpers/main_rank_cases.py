"""What the main rank does for all. Run by a WorkerPool with a short ``wait_s``."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.parallel import main_rank


def shares() -> dict:
    """Seven tasks, and how many of them this rank has called."""
    called: list[int] = []

    def task(number: int) -> int:
        called.append(number)
        return number**2

    return {"results": main_rank.in_shares([partial(task, number) for number in range(7)]), "called": called}


def give_up() -> None:
    raise PartlyGenerated("2 of 3 are there", ["a", "b"])


def long_work(wait_s: float) -> dict:
    """Work for twice as long as the ranks wait for each other, and work that raises an error."""

    def work() -> str:
        time.sleep(2 * wait_s)
        return "done"

    with mock.patch.object(main_rank, "MEET_EVERY_S", wait_s / 10):
        found: dict = {"long": main_rank.on_main_for_long(work)}
        if main_rank.is_main():
            with ThreadPoolExecutor() as pool:
                found["alone"] = pool.submit(main_rank.on_main_for_long, lambda: "not asking the others").result()
        try:
            main_rank.on_main_for_long(give_up)
        except UserError as error:
            found["error"] = (type(error).__name__, str(error), error.responses)
    return found
