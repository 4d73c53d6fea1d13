"""The exploration term's cost in a training step: GRPO's steps with it and with alpha = 0, in one process.

Steps alternate, and the order changes from pair to pair. The result is the mean of the pairs' ratios of CPU seconds
with a 95 % normal interval, which one slow pair widens rather than hides. The minibatch is the quickstart's: 320
sequences of 10 + 30 tokens.

    OMP_NUM_THREADS=1 python tools/benchmarks/exploration_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from llama import write_model

from nemo_edo.utils.quiet import quiet_libraries

ROWS, PROMPT, RESPONSE, MICRO_BATCH = 320, 10, 30, 160
ARCHITECTURES = {
    "quickstart": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "443k": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2},
}
WEIGHT = 0.02
"""Weight of the exploration term, large enough to move the policy."""


def build(folder: Path, threads: int):
    from nemo_edo.config import GRPOConfig, ParallelismConfig, PrecisionConfig
    from nemo_edo.models import MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    model = MegatronGPTGRPOModel(
        model_config(
            folder,
            parallelism=ParallelismConfig(),
            precision=PrecisionConfig(),
            seed=0,
            training=GRPOConfig(alpha=0.0, beta=0.01, micro_batch_size=MICRO_BATCH),
            threads=threads,
        )
    )
    model.start_training(10**6)
    return model


def minibatch(model):
    """Random sequences with log-probabilities of a slightly different policy."""
    from nemo_edo.types import TrainingBatch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 64, (ROWS, PROMPT + RESPONSE), generator=generator)
    mask = torch.zeros(ROWS, PROMPT + RESPONSE - 1)
    mask[:, PROMPT - 1 :] = 1
    batch = TrainingBatch(tokens=tokens, mask=mask)
    near = model.get_inference_log_probs(batch)
    return batch.with_fields(
        old_logprobs=near + 0.05 * torch.randn(mask.shape, generator=generator),
        ref_logprobs=near + 0.05 * torch.randn(mask.shape, generator=generator),
        advantages=torch.randn(ROWS, generator=generator),
    )


def step_seconds(policy, batch, weight: float) -> float:
    begun = time.process_time()
    policy.train_step(batch, exploration_weight=weight)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), default="443k")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    quiet_libraries()
    from nemo_edo.worker.remote import policy_over

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **ARCHITECTURES[args.model])
        model = build(Path(folder), args.threads)
    policy = policy_over(model)
    batch, taken = minibatch(model), {0.0: [], WEIGHT: []}
    for pair in range(args.pairs + 2):
        for weight in (0.0, WEIGHT) if pair % 2 else (WEIGHT, 0.0):
            seconds = step_seconds(policy, batch, weight)
            if pair >= 2:  # the first pairs warm up
                taken[weight].append(seconds)
    ratios = [with_term / without for without, with_term in zip(*taken.values(), strict=True)]
    mean, error = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    without, with_term = (1e3 * statistics.median(seconds) for seconds in taken.values())
    print(f"{args.model}, {args.pairs} pairs of steps, {args.threads} threads, torch {torch.__version__}, CPU time")
    print(f"median step {without:.1f} ms without, {with_term:.1f} ms with the exploration term")
    print(f"ratio of a pair: median {statistics.median(ratios):.4f}, mean {mean:.4f} +- {error:.4f}")


if __name__ == "__main__":
    main()
