"""ED-GRPO with a reward of one's own, through the model classes: NeMo-Aligner's life cycle without the main job.

The reward here is 1 for a short response: a policy that has learned nothing yet learns to stop.

python examples/own_reward.py
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from nemo_edo import factory
from nemo_edo.algorithms.grpo import build_groups
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.configuration import compose_run
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import SamplingParams, ScoredRollout

ITERATIONS, PROBLEMS, SAMPLES, LONG = 6, 16, 8, 12


def score(rollout) -> ScoredRollout:
    length = len(rollout.response_ids)
    return ScoredRollout(rollout, float(length < LONG), None, rollout.finished, f"{length} tokens")


def main() -> None:
    cfg = compose_run("quickstart", ["sft.steps=0", "grpo.optimizer.lr=5e-3", "grpo.micro_batch_size=64"])
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        factory.write_builtin_files(cfg, run)  # a tiny model with random weights, and problems
        data = factory.load_data(cfg, run)
        model = factory.build_model(cfg, run, replace(cfg.grpo, alpha=None, exploration_coefficient=0.01))
        model.engine = factory.build_engine(cfg, model, data)
        model.freeze_reference()
        model.start_training(total_steps=2 * ITERATIONS)
        for t in range(ITERATIONS):
            requests = sampling_requests(data.train[:PROBLEMS], data.prompts, SAMPLES, cfg.seed, t)
            model.prepare_for_inference()
            scored = [score(rollout) for rollout in model.infer(requests, SamplingParams(1.0, 1.0, 24))]
            model.finish_inference()
            collected = build_groups(scored, model, model.settings, pad_id=data.pad_id)
            for rows in (slice(0, None, 2), slice(1, None, 2)):  # two optimizer steps for each collection
                metrics = model.train_step(collected.batch.rows(rows))
            reward, length = collected.statistics["reward"], collected.statistics["response_length"]
            print(f"{t}: reward {reward:.2f}, {length:.1f} tokens, exploration {metrics['exploration']:.4f}")


if __name__ == "__main__":
    main()
