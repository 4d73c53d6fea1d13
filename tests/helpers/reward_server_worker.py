"""Scores of tiny process reward models from real vLLM servers on the CPU, beside those in this process.

    python reward_server_worker.py FOLDER

FOLDER/results.json will hold what tests/servers/test_reward_server.py looks at.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
from reward_models import write_own_reward_model, write_qwen_prm, write_skywork_prm

from nemo_edo.config import ServersConfig
from nemo_edo.rewards.pooling_server import POOLING, build_reward_replicas, serving
from nemo_edo.rewards.process_reward import ProcessRewardModel, score_rollouts
from nemo_edo.rewards.reward_formats import read_reward_folder
from nemo_edo.types import Rollout

QUESTIONS = {"a": "What is 2 + 3?", "b": "Name a prime above 10, and say why it is one.", "c": "1 + 1"}
TEXTS = [
    "First, 2 + 3.\n\nThat is 5.\n\nThe answer is 5.",
    "11.",
    "It has no divisor but 1.\nAnd itself.\n\nSo 11.",
    "",
    "x" * 300,
]


def rollouts() -> list[Rollout]:
    return [
        Rollout(problem, sample, (1,), (2,), (-0.5,), text, True, 0, 0)
        for problem in QUESTIONS
        for sample, text in enumerate(TEXTS)
    ]


def compare(folder: Path, work: Path) -> dict:
    """The largest gap between the scores of both ways, and how many and how different the scores are."""
    about = read_reward_folder(folder)
    here = score_rollouts(ProcessRewardModel(folder), rollouts(), QUESTIONS)
    settings = ServersConfig(max_in_flight=8)
    with serving(about, settings, work) as served:
        there = score_rollouts(served, rollouts(), QUESTIONS)
        replica = served._replicas[0]
        without_key = httpx.post(replica.url + POOLING, json={"input": [[1]]}, trust_env=False).status_code
    pairs = [pair for a, b in zip(here, there, strict=True) for pair in zip(a.steps, b.steps, strict=True)]
    return {
        "scores": len(pairs),
        "distinct": len({round(a, 6) for a, _ in pairs}),
        "largest_gap": max(abs(a - b) for a, b in pairs),
        "without_key": without_key,
        "left_running": not replica.has_ended,
        "copied_code": [path.name for path in work.rglob("*.py")],
        "code_ran": (folder / "it_ran").exists(),
    }


def at_a_url(folder: Path, work: Path) -> dict:
    """Scores from a server that is there already, named by its URL."""
    about = read_reward_folder(folder)
    [started] = build_reward_replicas(about, ServersConfig(), work, 0)
    started.start()
    os.environ["REWARD_KEY"] = started._key
    try:
        settings = ServersConfig(urls=[started.url], api_key_variable="REWARD_KEY")
        with serving(about, settings, work / "client") as served:
            there = score_rollouts(served, rollouts(), QUESTIONS)
            alive = not started.has_ended
        here = score_rollouts(ProcessRewardModel(folder), rollouts(), QUESTIONS)
        gap = max(abs(a - b) for x, y in zip(here, there, strict=True) for a, b in zip(x.steps, y.steps, strict=True))
        return {"largest_gap": gap, "outlives_the_client": alive and not started.has_ended}
    finally:
        started.stop()


def main(folder: Path) -> None:
    models = {
        "qwen": write_qwen_prm(folder / "qwen"),
        "skywork": write_skywork_prm(folder / "skywork"),
        "decoder": write_own_reward_model(folder / "decoder"),
        "encoder": write_own_reward_model(folder / "encoder", "modernbert"),
    }
    results = {name: compare(path, folder / "work" / name) for name, path in models.items()}
    results["at_a_url"] = at_a_url(models["qwen"], folder / "work" / "url")
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
