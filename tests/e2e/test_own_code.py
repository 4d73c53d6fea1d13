"""A user's own modules in the working directory: data and reward of a whole run."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CODE = """
import os

def make(size):
    rows = [{"question": f"{i} + {i} = ", "answer": str(2 * i), "difficulty": i} for i in range(2 * size)]
    return {"train": rows[:size], "test": rows[size:]}

def score(*, response, metadata):
    if metadata["difficulty"] == 2 and not os.path.exists("corrected"):
        raise RuntimeError("the sandbox is down")
    return {"score": len(response) % 5 / 4, "difficulty": metadata["difficulty"]}
"""
SETTINGS = [
    "data=source", "data.source=own_code:make", "data.source_args.size=4", "rewards.function=own_code:score",
    "rewards.success_at=0.7", "sft.steps=0", "~arms",
    "replicate_baseline=false", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10",
    "generation.part_size=4", "grpo.iterations=1", "grpo.minibatch_size=8", "grpo.micro_batch_size=8",
    "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
]  # fmt: skip


def test_a_reward_that_fails_stops_the_run_which_resumes_once_it_is_corrected(tmp_path: Path, nemo_edo):
    (tmp_path / "own_code.py").write_text(CODE)
    command = ("train", "name=own", f"output_dir={tmp_path}", *SETTINGS)
    stopped = nemo_edo(*command, cwd=tmp_path)
    saved = tmp_path / "own" / "failures" / "reward_train-3_sample_0.json"
    assert stopped.returncode == 2 and json.loads(saved.read_text())["metadata"] == {"difficulty": 2}
    assert "rewards.function (own_code:score), response 0 to problem train-3 (own_code:make train 3): raised " \
           "RuntimeError: the sandbox is down" in stopped.stderr  # fmt: skip
    assert re.search(r"[48] responses of iteration 0 are kept in", stopped.stderr)

    (tmp_path / "corrected").touch()
    nemo_edo.succeed(*command, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    [collection] = [line for line in lines if line["kind"] == "collection"]
    evaluated = [line["metrics"] for line in lines if line["kind"] == "evaluation"]
    assert collection["reward/difficulty"] == 1.5
    assert all(metrics["reward"]["mean"] != metrics["accuracy"]["mean"] for metrics in evaluated)

    (tmp_path / "own_code.py").unlink()  # what is stored needs no code of the user's
    said = nemo_edo.succeed("evaluate", str(tmp_path / "own"), "--stored")
    assert f"mean reward {evaluated[0]['reward']['mean']:.3f}" in " ".join(said.split())
