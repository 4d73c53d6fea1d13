"""The in-process engine against a bare decoding loop through the same Megatron model.

The bare loop decodes greedily with the KV cache: no random numbers, no stop tokens, no log-probabilities, every row to
the end. The engine does all of it. Both alternate in one process, so that the ratio is valid on a machine whose speed
drifts; quote the ratios' median.

    python tools/benchmarks/generation.py --threads 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llama import write_model

from nemo_edo.utils.quiet import quiet_libraries

PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 10, 28, 10
ARCHITECTURES = {
    "443k": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2},
    "quickstart": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2},
}


@torch.inference_mode()
def bare_loop(model, prompts: torch.Tensor, device: torch.device) -> int:
    """Greedy decoding of every row to the end; returns the number of generated tokens."""
    from megatron.core.inference.contexts import StaticInferenceContext

    model.eval()
    rows, length = prompts.shape
    context = StaticInferenceContext(max_batch_size=rows, max_sequence_length=length + NEW_TOKENS)
    tokens, position = prompts, 0
    for _ in range(NEW_TOKENS):
        positions = torch.arange(position, position + tokens.shape[1], device=device).expand_as(tokens)
        logits = model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        context.increment_sequence_len_offset(tokens.shape[1])
        position += tokens.shape[1]
        tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
    model.train()
    return rows * NEW_TOKENS


def seconds(work) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = work()
    return time.perf_counter() - start, tokens


def measure(works: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Generated tokens/s of each piece of work, which returns its number of tokens; the first round warms up."""
    speeds = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            elapsed, tokens = seconds(work)
            if repeat:
                speeds[name].append(tokens / elapsed)
    return speeds


def print_speeds(speeds: dict[str, list[float]]) -> None:
    for name, values in speeds.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        ratios = [value / bare for value, bare in zip(values, speeds["bare loop"], strict=True)]
        print(
            f"{name:20} generated tokens/s: median {middle:,.0f} (from {low:,.0f} to {high:,.0f}), "
            f"against the loop {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=1280)
    parser.add_argument("--max-batch-size", type=int, default=640, help="of the engine; the loop decodes all at once")
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), default="443k")
    return parser.parse_args()


def build(architecture: dict[str, int], device: torch.device):
    from nemo_edo.config import ParallelismConfig, PrecisionConfig
    from nemo_edo.megatron.bridge import build_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), num_hidden_layers=2, **architecture)
        return build_model(Path(folder), ParallelismConfig(), PrecisionConfig(), device)


def main() -> None:
    args = arguments()
    quiet_libraries()
    from nemo_edo.config import ParallelismConfig
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.megatron.platform import device_and_groups
    from nemo_edo.types import GenerationRequest, SamplingParams

    device = device_and_groups(ParallelismConfig(), seed=0, threads=args.threads)
    built = build(ARCHITECTURES[args.model], device)
    numbers = random.Random(0)
    questions = [tuple(numbers.choices(range(2, 64), k=PROMPT_TOKENS)) for _ in range(args.sequences // SAMPLES)]
    requests = [
        GenerationRequest(str(q), s, prompt, seed=SAMPLES * q + s)
        for q, prompt in enumerate(questions)
        for s in range(SAMPLES)
    ]
    prompts = torch.tensor([request.prompt_ids for request in requests], device=device)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=NEW_TOKENS)

    def generate(stop: int) -> Callable[[], int]:
        engine = MegatronEngine(built, stop_ids=[stop], decode=str, max_batch_size=args.max_batch_size, device=device)
        return lambda: sum(len(rollout.response_ids) for rollout in engine.generate(requests, sampling))

    # Stop token 64 is outside the vocabulary: the engine checks for it, and every row runs to the end, as in the loop.
    works = {
        "bare loop": lambda: bare_loop(built.chunks[0], prompts, device),
        "engine": generate(stop=64),
        "engine, early stops": generate(stop=1),
    }
    speeds = measure(works, args.repeats)
    parameters = sum(parameter.numel() for parameter in built.chunks[0].parameters())
    print(f"{parameters} parameters, {len(requests)} sequences, {args.threads} threads, {args.repeats} pairs")
    print_speeds(speeds)


if __name__ == "__main__":
    main()
