"""Writes a run folder as a finished run leaves it, with made-up but plausible numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from nemo_edo.config import EvaluationConfig, GRPOConfig, ModelConfig, RunConfig, SFTConfig
from nemo_edo.config.run import REPLICATE

# label, alpha, exploration weight, floor, entropy coefficient; how fast the arm learns, the entropy it keeps
ARMS = {
    "grpo": ("GRPO", 0.0, 0.0, None, 0.0, 1.0, 0.145),
    "edo_paper": ("ED-GRPO, the paper's alpha", 1e-3, 1e-6, None, 0.0, 0.98, 0.15),
    "edo_floor": ("ED-GRPO 0.3, floor -0.1", None, 0.3, -0.1, 0.0, 0.8, 0.2),
    "entropy_bonus": ("GRPO + entropy bonus 0.03", 0.0, 0.0, None, 0.03, 0.95, 0.185),
}
SAMPLES = 10
STEPS_PER_ITERATION = 4
ATTACK = "<script>document.title = 'attacked'; window.attacked = true</script>"


def write_run_folder(folder: Path, *, arms: Sequence[str] = tuple(ARMS), iterations: int = 12, problems: int = 120,
                     interim: bool = True, start: bool = True, attack: str = ATTACK, seed: int = 42,
                     alphas: dict[str, float] | None = None, replicate: bool = False) -> Path:
    """``alphas``: more arms, of ED-GRPO (or GRPO, with 0) that differ in alpha alone.
    ``attack`` is put wherever a run's own text reaches the report: a response, a question, a label, the config."""
    rng = np.random.default_rng(0 if seed == 42 else seed)
    (folder / "evaluations").mkdir(parents=True)
    shown = {arm: ARMS[arm] for arm in arms}
    for arm, alpha in (alphas or {}).items():
        shown[arm] = (f"ED-GRPO α={alpha:g}" if alpha else "GRPO", alpha, alpha * 0.001, None, 0.0, 1.0, 0.145)
    if replicate:
        shown[REPLICATE] = ("GRPO, replicate", *ARMS["grpo"][1:])
    _write_config(folder, attack, seed)
    _write_json(folder / "summary.json", _summary(shown, iterations, attack, seed))
    lines = [{"kind": "sft_step", "arm": "warmup", "step": step, "loss": 3.5 * 0.97 ** step + 0.4, "lr": 1e-3,
              "grad_norm": 1.0, "time": {"step_s": 0.1}} for step in range(1, 101)] if start else []
    names = ["warmup", *shown] if start else list(shown)
    for arm, (*_, speed, entropy) in shown.items():
        lines += _arm_lines(arm, speed, entropy, iterations, interim, rng)
        results = _evaluation(arm, 0.32 + 0.42 * speed, entropy, problems, rng)
        _write_json(folder / "evaluations" / f"{arm}.json", results)
    lines.append({"kind": "phases", "arm": names[-1], "time": {"wall_s": 13.5, "train_s": 9.0, "log_pi_old_s": 4.0}})
    if start:
        _write_json(folder / "evaluations" / "warmup.json", _evaluation("warmup", 0.32, 0.33, problems, rng))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    _write_json(folder / "samples.json", [_sample(place, names, attack) for place in range(3)])
    return folder


def _write_json(path: Path, record: object) -> None:
    path.write_text(json.dumps(record), encoding="utf-8")


def _write_config(folder: Path, attack: str, seed: int) -> None:
    config = RunConfig(name="quickstart", seed=seed, sft=SFTConfig(steps=100), grpo=GRPOConfig(iterations=12),
                       evaluation=EvaluationConfig(bootstrap=200), exp_manager={"note": attack},
                       model=ModelConfig(architecture={"model_type": "qwen2", "num_hidden_layers": 2,
                                                       "hidden_size": 128}))
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")


def _summary(arms: dict[str, tuple], iterations: int, attack: str, seed: int) -> dict:
    settings = {
        arm: {"label": label + (attack if arm == "entropy_bonus" else ""), "alpha": alpha, "beta": 0.001,
              "exploration_weight": weight, "log_ratio_floor": floor, "entropy_coefficient": bonus,
              "iterations": iterations}
        for arm, (label, alpha, weight, floor, bonus, *_) in arms.items()}
    return {"name": "quickstart", "seed": seed, "versions": {"nemo_edo": "0.1.0", "torch": "2.13.0"}, "arms": settings,
            "baseline": "grpo" if "grpo" in arms and len(arms) > 1 else None,
            "time": {"total_s": 412.3, "warmup_s": 61.0, "training_s": 290.5, "evaluation_s": 60.8}}


def _arm_lines(arm: str, speed: float, entropy: float, iterations: int, interim: bool,
               rng: np.random.Generator) -> list[dict]:
    lines, steps = [], iterations * STEPS_PER_ITERATION
    for t in range(iterations):
        learned = 1 - np.exp(-3 * speed * t / iterations)
        accuracy = 0.32 + 0.45 * learned + rng.normal(0, 0.008)
        now = 0.33 + (entropy - 0.33) * learned
        lines.append({"kind": "collection", "arm": arm, "iteration": t, "policy_version": t, "reward": accuracy,
                      "entropy": now + rng.normal(0, 0.003), "kl": 0.4 * learned, "distinct_4": 0.2 + 1.2 * now,
                      "well_formed": 0.97 + 0.02 * learned, "response_length": 24.0, "time": {"generate_s": 1.0}})
        if interim and t % 3 == 0:
            lines.append({"kind": "evaluation", "arm": arm, "iteration": t, "final": False, "time": {}, "metrics": {
                "greedy_accuracy": {"mean": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05}}})
        for within in range(STEPS_PER_ITERATION):
            step = t * STEPS_PER_ITERATION + within + 1
            lines.append({"kind": "train_step", "arm": arm, "iteration": t, "step": step, "loss": 0.01,
                          "policy_loss": 0.01, "kl": 0.4 * learned, "exploration": -0.01 * within * speed,
                          "entropy": 0.33 + (entropy - 0.33) * step / steps + rng.normal(0, 0.004),
                          "log_ratio": 0.0, "clip_fraction": 0.05, "floor_fraction": 0.02 * within,
                          "grad_norm": 0.8, "lr": 1e-3, "time": {"step_s": 0.2}})
    return lines


def _evaluation(arm: str, accuracy: float, entropy: float, problems: int, rng: np.random.Generator) -> dict:
    """Problems of mixed difficulty: the chance of a correct response is Beta distributed around the accuracy."""
    chance = rng.beta(4 * accuracy, 4 * (1 - accuracy), problems)
    correct = rng.binomial(SAMPLES, chance)
    ones = [1] * problems
    metrics = {
        "greedy_accuracy": (rng.random(problems) < chance, ones), "accuracy": (correct, [SAMPLES] * problems),
        f"vote@{SAMPLES}": (correct >= 4, ones), "distinct_4": (np.clip(0.2 + 1.2 * entropy + rng.normal(
            0, 0.05, problems), 0, 1), ones),
        "entropy": (entropy * 240 + rng.normal(0, 4, problems), [240] * problems),
        "well_formed": (np.full(problems, SAMPLES), [SAMPLES] * problems),
        "response_length": (np.full(problems, 24.0 * SAMPLES), [SAMPLES] * problems),
    }
    for k in range(1, SAMPLES + 1):
        none = np.array([np.prod((SAMPLES - c - np.arange(k)).clip(0) / (SAMPLES - np.arange(k))) for c in correct])
        metrics[f"pass@{k}"] = (1 - none, ones)
    return {"arm": arm, "problems": [f"test-{index}" for index in range(problems)],
            "metrics": {name: {"sum": np.asarray(sums, dtype=float).tolist(), "count": list(counts)}
                        for name, (sums, counts) in metrics.items()}}


def _sample(place: int, arms: Sequence[str], attack: str) -> dict:
    good = {"text": "6 + 3 = 9 ; 1 + 1 = 2 ; 9 + 2 = 11 ; #### 11", "reward": 1.0}
    other = {"text": "3 + 1 = 4 ; 4 + 6 = 10 ; 10 + 1 = 11 ; #### 11", "reward": 1.0}
    bad = {"text": f"6 + 3 = 8 ; 1 + 1 = 2 ; 8 + 2 = 10 ; #### 10 {attack if place == 0 else ''}", "reward": 0.0}
    return {"question": "6 + 3 + 1 + 1" + (attack if place == 1 else ""), "answer": "11",
            "responses": {arm: [good, bad, other] for arm in arms}}
