"""How long a checkpoint with the optimizer's state delays training: blocking, and in the background.

In one process, or in those of torchrun, rounds of training steps alternate: without a checkpoint, with a blocking one,
and with one written in the background. A checkpoint costs a round's time beyond that of a round without one; "call" is
the time until the next step may begin.

    python tools/benchmarks/checkpoint.py --threads 2
    torchrun --nproc-per-node 2 tools/benchmarks/checkpoint.py --distributed-optimizer
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import one_step
import torch
from llama import write_model

from nemo_edo.utils.quiet import quiet_libraries

ROWS, TOKENS = 4, 64
ARCHITECTURE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
"""103 million weights, almost none of them embeddings."""
HOW = ("none", "waited for", "in the background")


def build_policy(folder: Path, threads: int | None, distributed: bool):
    from nemo_edo.config import OptimizerConfig, ParallelismConfig, PrecisionConfig
    from nemo_edo.megatron.bridge import build_model
    from nemo_edo.megatron.platform import device_and_groups
    from nemo_edo.megatron.policy import MegatronPolicy

    parallelism, precision = ParallelismConfig(use_distributed_optimizer=distributed), PrecisionConfig()
    device = device_and_groups(parallelism, seed=0, threads=threads)
    if torch.distributed.get_rank() == 0:
        write_model(folder, **ARCHITECTURE)
    torch.distributed.barrier()
    policy = MegatronPolicy(build_model(folder, parallelism, precision, device), parallelism, precision, device)
    policy.reset_optimizer(OptimizerConfig(), total_steps=1000)
    return policy


def train_step(policy) -> None:
    from nemo_edo.config import MicroBatchConfig
    from nemo_edo.losses import sft_loss
    from nemo_edo.types import TrainingBatch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 64, (ROWS, TOKENS), generator=generator)
    batch = TrainingBatch(tokens=tokens, mask=torch.ones(ROWS, TOKENS - 1))
    one_step.train_step(
        policy,
        batch,
        lambda logprobs, entropies, micro, _: ({"sft": sft_loss(logprobs, micro.mask)}, {}),
        loss_counts={"sft": float(batch.mask.sum())},
        micro_batching=MicroBatchConfig(ROWS),
    )


def one_round(policy, folder: Path, how: str, steps: int) -> tuple[float, float]:
    """(seconds of the call, seconds of the round)."""
    from nemo_edo.megatron import checkpoint

    torch.distributed.barrier()
    begun, writing = time.perf_counter(), None
    if how != "none":
        writing = checkpoint.begin_save(policy, folder, with_optimizer=True)
        writing.is_finished(wait=how == "waited for")
    call = time.perf_counter() - begun
    for _ in range(steps):
        train_step(policy)
        if writing is not None:
            writing.is_finished()
    if writing is not None:
        writing.is_finished(wait=True)
    return call, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--distributed-optimizer", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    folder = (args.folder or Path(tempfile.gettempdir())) / f"checkpoint-benchmark-{os.getuid()}"
    policy = build_policy(folder / "model", args.threads, args.distributed_optimizer)
    train_step(policy)
    figures = {how: [] for how in HOW}
    for _ in range(args.rounds):
        for how in HOW:
            figures[how].append(one_round(policy, folder / "checkpoint", how, args.steps))
    if torch.distributed.get_rank() == 0:
        size = sum(path.stat().st_size for path in (folder / "checkpoint").rglob("*"))
        print(f"{size / 1e9:.2f} GB, {args.steps} steps in a round; medians over {args.rounds} rounds")
        plain = statistics.median(whole for _, whole in figures["none"])
        for how, rounds in figures.items():
            call, whole = (statistics.median(values) for values in zip(*rounds, strict=True))
            print(
                f"{how:18s} call {call:6.2f} s   round {whole:6.2f} s   beyond a round without {whole - plain:6.2f} s"
            )
        shutil.rmtree(folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
