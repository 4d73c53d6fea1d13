"""Scores of tiny process reward models from real vLLM servers on the CPU, compared with those of this process. Writes
FOLDER/results.json for tests/servers/test_reward_server.py."""

import json
import os
import statistics
import sys
from pathlib import Path

import requests
import torch
from reward_models import score_rollouts, write_own_reward_model, write_qwen_prm, write_skywork_prm

from nemo_edo.config import ServersConfig
from nemo_edo.generation.replica import Replica
from nemo_edo.reward_models.formats import read_reward_folder
from nemo_edo.reward_models.process_reward import ProcessRewardModel
from nemo_edo.reward_models.vllm_pooling import POOLING, serving
from nemo_edo.types import Rollout

QUESTIONS = {"a": "What is 2 + 3?", "b": "Name a prime above 10, and say why it is one.", "c": "1 + 1"}
TEXTS = ["First, 2 + 3.\n\nThat is 5.\n\nThe answer is 5.", "11.", "It has no divisor but 1.\nAnd itself.\n\nSo 11.",
         "", "x" * 300]  # fmt: skip
ROLLOUTS = [Rollout(problem, sample, (1,), (2,), (-0.5,), text, True, 0, 0)
            for problem in QUESTIONS for sample, text in enumerate(TEXTS)]


def compare(folder: Path, work: Path) -> dict:
    """The gaps between the scores of both ways, and how many and how different the scores are."""
    about = read_reward_folder(folder)
    here = score_rollouts(ProcessRewardModel(folder), ROLLOUTS, QUESTIONS)
    settings, by_url = ServersConfig(max_in_flight=8), {}
    with serving(about, settings, work) as served:
        there = score_rollouts(served, ROLLOUTS, QUESTIONS)
        replica = served._replicas[0]
        without_key = requests.post(replica.url + POOLING, json={"input": [[1]]}).status_code
        if folder.name == "qwen":
            by_url = at_a_url(replica, about, work / "client", [scored.steps for scored in here])
    pairs = [pair for a, b in zip(here, there, strict=True) for pair in zip(a.steps, b.steps, strict=True)]
    return {
        "scores": len(pairs),
        "distinct": len({round(a, 6) for a, _ in pairs}),
        "gaps": [abs(a - b) for a, b in pairs],
        "spread": statistics.stdev(a for a, _ in pairs),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "without_key": without_key,
        "left_running": not replica.has_ended,
        "copied_code": [path.name for path in work.rglob("*.py")],
        "code_ran": (folder / "it_ran").exists(),
        **by_url,
    }


def at_a_url(replica: Replica, about, work: Path, expected: list) -> dict:
    """Scores from the same server, named by its URL, by a client that did not start it."""
    os.environ["REWARD_KEY"] = replica.key.value
    with serving(about, ServersConfig(urls=[replica.url], api_key_variable="REWARD_KEY"), work) as served:
        scores = score_rollouts(served, ROLLOUTS, QUESTIONS)
    pairs = [pair for a, b in zip(expected, scores, strict=True) for pair in zip(a, b.steps, strict=True)]
    return {"gaps_by_url": [abs(a - b) for a, b in pairs], "outlives_the_client": not replica.has_ended}


def main(folder: Path) -> None:
    models = {
        "qwen": write_qwen_prm(folder / "qwen"),
        "skywork": write_skywork_prm(folder / "skywork"),
        "encoder": write_own_reward_model(folder / "encoder", "modernbert"),
    }
    results = {name: compare(path, folder / "work" / name) for name, path in models.items()}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
