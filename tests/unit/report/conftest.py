from pathlib import Path

import pytest
from helpers.run_folder import write_run_folder


@pytest.fixture(scope="session")
def study(tmp_path_factory) -> Path:
    """Three seeds of three arms, one seed of another arm, and a run that has not finished."""
    folder = tmp_path_factory.mktemp("study")
    for seed in (1, 2, 3):
        write_run_folder(folder / f"seed={seed}", seed=seed, arms=("grpo", "edo_paper", "edo_floor"), problems=60)
    write_run_folder(folder / "one", seed=1, arms=(), alphas={"policy": 0.1}, problems=60)
    unfinished = write_run_folder(folder / "unfinished", seed=9, arms=("grpo",), problems=60)
    (unfinished / "summary.json").unlink()
    return folder
