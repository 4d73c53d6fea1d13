"""GRPO with a custom reward: the policy learns to stop early.

python examples/own_reward.py

The same reward for the whole quickstart, in this folder: nemo-edo train name=brief rewards.function=own_reward:brief
"""

import json
import tempfile
from pathlib import Path

from nemo_edo.cli import main as nemo_edo

SHORT = 40
SETTINGS = [
    "name=brief", "rewards.function=own_reward:brief", "sft.steps=0", "~arms", "data.arithmetic.train_problems=16",
    "data.arithmetic.test_problems=8", "evaluation.samples=2", "evaluation.rollouts=1", "sampling.max_new_tokens=24",
    "grpo.iterations=6", "grpo.problems_per_iteration=16", "grpo.minibatch_size=80", "grpo.micro_batch_size=80",
    "grpo.optimizer.lr=5e-3", "replicate_baseline=false",
]  # fmt: skip


def brief(*, response: str, finished: bool) -> dict[str, float]:
    """1 for a response that ends within SHORT characters; "score" is the reward, the rest is only logged."""
    return {"score": float(finished and len(response) < SHORT), "characters": len(response)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        status = nemo_edo(["train", "--config-name", "quickstart", f"output_dir={folder}", *SETTINGS])
        if status:
            raise SystemExit(status)
        lines = [json.loads(line) for line in (Path(folder) / "brief/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "collection":
            print(f"{line['iteration']}: reward {line['reward']:.2f}, {line['reward/characters']:.1f} characters")


if __name__ == "__main__":
    main()
