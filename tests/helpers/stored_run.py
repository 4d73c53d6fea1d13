"""A run's folder of the built-in task as far as reward models look into it: problems, tokenizer, scored responses."""

import random
from pathlib import Path

from nemo_edo.builtin_task.arithmetic import make_problems
from nemo_edo.builtin_task.model import write_base_model
from nemo_edo.config import (
    ArithmeticConfig,
    RewardBaseConfig,
    RewardDataConfig,
    RewardModelRunConfig,
    RewardTrainConfig,
)
from nemo_edo.config.compose import compose_run, resolved_yaml
from nemo_edo.data.problems import write_problems
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem, Rollout, ScoredRollout

DATA = ArithmeticConfig(num_operands=3, train_problems=24, test_problems=8, warmup_problems=8)
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.15}
EACH = 5
"""Responses to a problem."""


def write_stored_run(path: Path, *, iterations: int = 2, arms: tuple[str, ...] = ("grpo",)) -> Path:
    """``iterations`` of each arm's training responses, and its and the start's evaluation responses. A tenth of the
    steps are wrong by one, at random; nothing was trained, and there are no weights."""
    overrides = ["data.arithmetic.num_operands=3", "data.arithmetic.train_problems=24",
                 "data.arithmetic.test_problems=8", "data.arithmetic.warmup_problems=8",
                 f"grpo.iterations={iterations}", f"name={path.name}", f"output_dir={path.parent}",
                 f"arms=[{','.join(arms)}]", "replicate_baseline=false"]
    cfg = compose_run("quickstart", overrides)
    folder = RunFolder(path)
    made = make_problems(DATA, folder.data)
    for split, problems in made.items():
        path_there = folder.data / f"{split}.jsonl"
        write_problems(path_there, problems, benchmark="arithmetic", split=split, source={}, skipped=0)
    write_base_model(folder.base, cfg.model.architecture, DATA)
    (path / "config.yaml").write_text(resolved_yaml(cfg))
    train, test = made["train"], made["test"]
    rng = random.Random(f"stored run {path.name}")
    for arm in arms:
        for iteration in range(iterations):
            _write(RolloutStore(folder.rollouts(arm)), iteration, train, EACH, rng)
    for policy, iteration in (("warmup", 0), *((arm, iterations) for arm in arms)):
        for kind, each in (("greedy", 1), ("sampled", EACH)):
            _write(RolloutStore(folder.evaluated(policy, kind)), iteration, test, each, rng)
        folder.write_evaluation(Evaluation(policy, tuple(problem.id for problem in test), {}))
    return path


def _write(store: RolloutStore, iteration: int, problems: list[Problem], each: int, rng: random.Random) -> None:
    scored = [_response(problem, sample, iteration, rng) for problem in problems for sample in range(each)]
    store.write(iteration, scored)


def _response(problem: Problem, sample: int, iteration: int, rng: random.Random) -> ScoredRollout:
    left, lines = [int(number) for number in problem.question.split(" + ")], []
    while len(left) > 1:
        rng.shuffle(left)
        first, second = left.pop(), left.pop()
        left.append(first + second + (rng.random() < 0.3))
        lines.append(f"{first} + {second} = {left[-1]}")
    text = "\n".join([*lines, f"#### {left[0]}"])
    ids = tuple(rng.randrange(3, 90) for _ in range(5))
    rollout = Rollout(problem.id, sample, (1, 2), ids, (-0.5,) * 5, text, True, iteration, rng.randrange(2**40))
    right = str(left[0]) == problem.answer
    return ScoredRollout(rollout, float(right), str(left[0]), True, "right" if right else "wrong")


def reward_config(run: Path, out: Path, *, architecture: dict = LLAMA, data: dict | None = None, **train):
    """Of a tiny reward model, trained for a few steps on the run's responses."""
    settings = {"steps": 6, "batch_size": 4, "lr": 1e-3, "warmup_steps": 1, "evaluate_every": 3, "checkpoint_every": 2}
    chosen = {"run": str(run), "steps": "arithmetic", "max_tokens": 64, "validation_share": 0.25, **(data or {})}
    return RewardModelRunConfig(
        name="rm", output_dir=str(out), seed=3, model=RewardBaseConfig(architecture=architecture),
        data=RewardDataConfig(**chosen), train=RewardTrainConfig(**{**settings, **train}), bootstrap=50,
    )
