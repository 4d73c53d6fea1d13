"""What the first of two gloo processes does for both: this file, run again as each of them, saves what came of it."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nemo_edo.errors import PartlyDrawn, UserError
from nemo_edo.parallel import main_rank

PROCESSES, WAIT_S = 2, 8.0
"""How long the processes wait for each other."""


def longer_than_they_wait() -> str:
    time.sleep(2 * WAIT_S)
    return "done"


def give_up() -> None:
    raise PartlyDrawn("2 of 3 were drawn", ["a", "b"])


def meet(rank: int, folder: Path) -> None:
    """Processes that are all there: on a busy machine one may need longer for its imports than they wait."""
    (folder / f"ready_{rank}").touch()
    while not all((folder / f"ready_{other}").exists() for other in range(PROCESSES)):
        time.sleep(0.05)


def run_process(rank: int, folder: Path) -> None:
    meet(rank, folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES,
                            timeout=timedelta(seconds=WAIT_S))
    main_rank.MEET_EVERY_S = WAIT_S / 10
    found: dict = {"long": main_rank.on_main_for_long(longer_than_they_wait)}
    try:
        main_rank.on_main_for_long(give_up)
    except UserError as error:
        found["error"] = [type(error).__name__, str(error), error.drawn]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_work_that_takes_longer_than_ranks_wait_ends_with_its_result_or_error_on_all_of_them(tmp_path: Path):
    command = [sys.executable, __file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(PROCESSES)]
    assert [process.wait(120) for process in running] == [0] * PROCESSES
    for rank in range(PROCESSES):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"long": "done", "error": ["PartlyDrawn", "2 of 3 were drawn", ["a", "b"]]}


if __name__ == "__main__":
    run_process(int(sys.argv[1]), Path(sys.argv[2]))
