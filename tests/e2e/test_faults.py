"""Whatever befalls a run's folder and processes, nothing is lost and nothing is silently wrong."""

import shutil
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = ["--config-name=quickstart", "sft.steps=4", "sft.batch_size=8", "sampling.samples_per_prompt=2",
         "sampling.max_new_tokens=6", "data.arithmetic.train_problems=6", "data.arithmetic.test_problems=6",
         "data.arithmetic.warmup_problems=40", "evaluation.samples=2", "evaluation.rollouts=1",
         "evaluation.bootstrap=10", "generation.part_size=4", "checkpoint.every_steps=1", "grpo.iterations=2",
         "checkpoint.asynchronous=false",  # so that the last one is whole when the run is killed
         "grpo.minibatch_size=4", "grpo.micro_batch_size=4",
         "replicate_baseline=false", "~arms", "+arms={grpo: {alpha: 0.5}}"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, nemo_edo) -> Path:
    """A finished run's folder."""
    folder = tmp_path_factory.mktemp("runs")
    nemo_edo.succeed("train", *SMALL, f"output_dir={folder}", "name=whole")
    return folder / "whole"


def responses(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run / "evaluations").rglob("rank_*.parquet")}


def killed(nemo_edo, command: list[str], end: list) -> None:
    """A command that is killed at its END (helpers.kills)."""
    done = nemo_edo(*command, before=[("helpers.kills:prepare", end)])
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def test_an_evaluation_that_is_killed_leaves_the_stored_responses_until_it_has_its_own(
    whole: Path, tmp_path, nemo_edo
):
    whole = shutil.copytree(whole, tmp_path / "whole")
    stored, command = responses(whole), ["evaluate", str(whole), "evaluation.rollouts=2"]
    killed(nemo_edo, command, ["nemo_edo.rollouts.store:RolloutStore.write", 2])
    assert stored.items() <= responses(whole).items()
    nemo_edo.succeed("evaluate", str(whole), "--stored")
    nemo_edo.succeed(*command)
    assert stored.keys() == responses(whole).keys() and stored != responses(whole)


def test_an_export_that_is_killed_leaves_nothing_that_looks_whole_and_can_be_repeated(whole: Path, tmp_path, nemo_edo):
    out = tmp_path / "exported"
    command = ["export", str(whole), str(out), "--arm=grpo"]
    killed(nemo_edo, command, ["nemo_edo.megatron.hf_export:save_file", 1])
    assert not out.exists()
    nemo_edo.succeed(*command)
    assert (out / "model.safetensors").is_file() and (out / "config.json").is_file()
    assert list(tmp_path.iterdir()) == [out]
