"""Attention and packing: the cost of a training step, with alternating variants in one process.

The variants take turns in rounds, so that a drift in the machine's speed affects all of them equally. Times are CPU
seconds with one thread, and each variant's best, since other work only slows a process down. The first comparison is
Megatron's attention with torch's, forward and backward, by length. The second is a whole training step by attention and
by batching: rows in order, a token budget, packed. The batches are the quickstart's minibatch (320 sequences of 40
tokens, 0.14M parameters) and 16 responses of 70 to 510 tokens (1M and 10M parameters).

    OMP_NUM_THREADS=1 python tools/benchmarks/attention.py
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import one_step
import torch
from llama import write_model

from nemo_edo.utils.quiet import quiet_libraries

HEADS, GROUPS, HEAD_SIZE = 8, 2, 64
SHAPES = ((40, 64), (128, 16), (512, 4), (2048, 1), (4096, 1))
"""Length and rows."""
MODELS = {
    "quickstart": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 2},
    "10M": {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 5},
}
MANY_LENGTHS = [random.Random(i).randint(16, 512) for i in range(16)]
BATCHES = {"quickstart": [40] * 320, "1M": MANY_LENGTHS, "10M": MANY_LENGTHS}
CUTS = {
    "quickstart": {"rows": (160,), "token budget": (320, 6400), "packed": (1, 6400, True)},
    **dict.fromkeys(("1M", "10M"), {"rows": (8,), "token budget": (16, 2048), "packed": (1, 2048, True)}),
}


def in_turn(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each variant's fewest CPU seconds, after a warm-up round."""
    taken = {name: [] for name in works}
    for lap in range(rounds + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if lap:
                taken[name].append(time.process_time() - start)
    return {name: min(seconds) for name, seconds in taken.items()}


def compare_attention(rounds: int) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_edo.megatron.layer_spec import CORES

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
    )
    cores = {name: core(config, 1, AttnMaskType.causal, "self") for name, core in CORES.items()}

    def both_ways(core, inputs) -> None:
        torch.autograd.grad(core(*inputs, None).sum(), inputs)

    print(f"attention, {HEADS} heads of {HEAD_SIZE}, {GROUPS} groups, forward and backward")
    for length, rows in SHAPES:
        shapes = [(length, rows, heads, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        seconds = in_turn({name: partial(both_ways, core, inputs) for name, core in cores.items()}, rounds)
        ratio = seconds["local"] / seconds["sdpa"]
        print(f"  {rows:3} x {length:4}: " + _in_ms(seconds) + f", {ratio:.1f} times as fast")


def compare_steps(name: str, rounds: int) -> None:
    from nemo_edo.config import MicroBatchConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
    from nemo_edo.losses import sft_loss
    from nemo_edo.megatron.bridge import build_model
    from nemo_edo.megatron.platform import device_and_groups
    from nemo_edo.megatron.policy import MegatronPolicy

    parallelism, precision = ParallelismConfig(), PrecisionConfig()
    device = device_and_groups(parallelism, seed=0, threads=1)
    policies = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), context=512, **MODELS[name])
        for attention in ("local", "sdpa"):
            built = build_model(Path(folder), parallelism, precision, device, attention=attention)
            policies[attention] = MegatronPolicy(built, parallelism, precision, device)
            policies[attention].reset_optimizer(OptimizerConfig(lr=1e-6), total_steps=1000)
    batch = random_batch(BATCHES[name])
    paddings = {}

    def loss(logprobs, entropies, micro, _):
        return {"sft": sft_loss(logprobs, micro.mask)}, {}

    def step(attention: str, cut: str) -> None:
        metrics = one_step.train_step(
            policies[attention],
            batch,
            loss,
            loss_counts={"sft": float(batch.mask.sum())},
            micro_batching=MicroBatchConfig(*CUTS[name][cut]),
        )
        paddings[cut] = metrics["padding_share"]

    variants = [("local", "rows"), ("local", "token budget"), *(("sdpa", cut) for cut in CUTS[name])]
    seconds = in_turn({f"{a}, {cut}": partial(step, a, cut) for a, cut in variants}, rounds)
    parameters = sum(parameter.numel() for parameter in policies["sdpa"].chunks[0].parameters())
    print(f"a training step: {parameters:,} parameters, {batch.size} sequences, {sum(BATCHES[name]):,} tokens")
    slowest = seconds["local, rows"]
    for variant, taken in seconds.items():
        padding = paddings[variant.split(", ")[1]]
        print(f"  {variant:20} {1e3 * taken:8.0f} ms, {slowest / taken:.2f} times as fast, padding {padding:.0%}")


def random_batch(lengths: list[int]):
    """For each length, a prompt of 8 tokens and a response."""
    from nemo_edo.data.batching import build_batch

    generator = random.Random(0)
    sequences = [(generator.choices(range(64), k=8), generator.choices(range(64), k=length - 8)) for length in lengths]
    return build_batch(sequences, pad_id=0)


def _in_ms(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("attention", *MODELS), help="run only this comparison")
    args = parser.parse_args()
    quiet_libraries()
    from nemo_edo.config import ParallelismConfig
    from nemo_edo.megatron.platform import device_and_groups

    device_and_groups(ParallelismConfig(), seed=0, threads=1)
    print(f"torch {torch.__version__}, one thread, best of {args.rounds} rounds")
    if args.only in (None, "attention"):
        compare_attention(args.rounds)
    for name in MODELS:
        if args.only in (None, name):
            compare_steps(name, args.rounds)


if __name__ == "__main__":
    main()
