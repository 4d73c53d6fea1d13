"""A model that nothing trains, evaluated in process: killed, resumed, and evaluated from what it stored."""

import json
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SETTINGS = ["--config-name=evaluate", "model=tiny_llama", "data=arithmetic", "precision=fp32", "threads=1",
            "data.arithmetic.test_problems=24", "evaluation.samples=6", "sampling.max_new_tokens=24",
            "generation.part_size=12", "evaluation.bootstrap=50"]  # fmt: skip


@pytest.fixture(scope="module")
def evaluate(folder, nemo_edo):
    """What an evaluation prints that has to end well."""
    return lambda *arguments: nemo_edo.succeed("evaluate", *arguments, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, nemo_edo) -> Path:
    """Two runs of one config: "whole", and "killed" once it had sampled some parts of its responses."""
    folder = tmp_path_factory.mktemp("evaluate")
    nemo_edo.succeed("evaluate", *SETTINGS, "name=whole", cwd=folder)
    after_some = ["nemo_edo.rollouts.store:RolloutStore.write_part", 5]  # the greedy responses are two
    killed = nemo_edo("evaluate", *SETTINGS, "name=killed", cwd=folder, before=[("helpers.kills:prepare", after_some)])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return folder


def test_a_killed_evaluation_resumes_and_ends_with_the_same_numbers(folder: Path, evaluate):
    killed, whole = (folder / "runs" / name for name in ("killed", "whole"))
    kept = {path.name: path.stat().st_ino for path in killed.rglob("part_*.parquet")}
    assert kept and not (killed / "test_time").exists()
    assert "unfinished run" in evaluate(*SETTINGS, "name=killed")
    for name in ("test_time", "evaluations"):
        results = [(run / name / "warmup.json").read_bytes() for run in (killed, whole)]
        assert results[0] == results[1]


def test_a_finished_evaluation_samples_nothing_again_and_says_what_it_found(folder: Path, evaluate):
    whole = folder / "runs" / "whole"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}
    output = evaluate(*SETTINGS, "name=whole")
    assert "pass@k" in output and before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}
    assert not (folder / "runs" / "whole.1").exists()


def test_the_report_and_the_stored_responses_are_of_one_model(folder: Path, evaluate):
    whole = folder / "runs" / "whole"
    page = (whole / "report.html").read_text()
    assert "Model as it is" in page and "Warm-up" not in page.split("</dl>")[0]
    assert "model as it is: 24 problems" in evaluate(str(whole), "--stored")
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    stored = json.loads((whole / "test_time" / "warmup.json").read_text())["metrics"]
    sampled = sum(stored["entropy_sampled"]["sum"]) / sum(stored["entropy_sampled"]["count"])
    assert (line["kind"], line["arm"]) == ("evaluation", "warmup")
    assert sampled == pytest.approx(line["metrics"]["entropy"]["mean"], rel=0.05)
