"""The recipe of examples/nemo in NeMo-Run: what it would start, on this machine and on Slurm."""

import os
import subprocess
from pathlib import Path

import pytest
from peer_environment import NoPackageIndex, peer_environment

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]


RECIPE = ROOT / "examples" / "nemo" / "nemo_run_recipe.py"


def in_nemo_run(folder: Path, *arguments: str | Path) -> str:
    try:
        python = peer_environment("nemo_run")
    except NoPackageIndex as error:
        pytest.skip(str(error))
    path = os.pathsep.join([str(ROOT), str(RECIPE.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(folder), "COLUMNS": "500"}
    done = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_partial_trains_on_this_machine(tmp_path: Path):
    assert "fdl_runner" in in_nemo_run(tmp_path, RECIPE, "--dryrun", "--processes", "2", "quickstart", "seed=2")
    said = in_nemo_run(tmp_path, "-c", "import nemo_run_recipe as r; print(r.partial('quickstart', ['seed=2'], 2))")
    for part in ("Partial[train(", "config_name='quickstart'", "overrides=['seed=2']", "processes=2"):
        assert part in said


def test_every_rank_of_a_slurm_job_gets_the_command_and_its_signal(tmp_path: Path):
    said = in_nemo_run(tmp_path, RECIPE, "--dryrun", "--slurm", "--account=a", "--partition=b", "--nodes=2",
                       "--image=x.sqsh", "--mounts=/models", "grpo_gsm8k", "seed=2")
    for part in ("--nodes=2", "--signal=TERM@600", "--nproc-per-node 8", "/models:/models", "x.sqsh",
                 "-m nemo_edo train --config-name grpo_gsm8k seed=2"):
        assert part in said
