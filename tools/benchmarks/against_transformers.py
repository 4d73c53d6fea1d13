"""nemo_edo against plain transformers on the shape of SmolLM2-135M with random weights: generation, and a forward and
backward pass over responses.

    generate   different prompts of 40 to 150 tokens, 64 new tokens each: the engine against ``model.generate``
    train      4 prompts of 40 to 150 tokens x 8 responses of 64 tokens: log-probabilities of the responses and their
               gradient, against ``model(..., logits_to_keep=64)`` with micro-batches of --rows

Both alternate in one process of one thread; CPU seconds, so that other work on the machine shows less. transformers'
batches are padded on the left, without gradient checkpointing, with torch's scaled_dot_product_attention.

    OMP_NUM_THREADS=1 python tools/benchmarks/against_transformers.py generate --precision fp32
    OMP_NUM_THREADS=1 python tools/benchmarks/against_transformers.py train --head logits
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from llama import SMOLLM2, write_model

VOCABULARY, NEW_TOKENS, GROUP = SMOLLM2["vocab_size"], 64, 8
Work = Callable[[], object]


def build(folder: Path, precision: str):
    from nemo_edo.config import ParallelismConfig, PrecisionConfig
    from nemo_edo.megatron.bridge import build_model
    from nemo_edo.megatron.platform import device_and_groups

    device = device_and_groups(ParallelismConfig(), seed=0, threads=1)
    return build_model(folder, ParallelismConfig(), PrecisionConfig(dtype=precision), device), device


def padded(sequences: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tokens on the right, zeros before them, and which is which."""
    longest = max(map(len, sequences))
    rows = [[0] * (longest - len(one)) + list(one) for one in sequences]
    masks = [[0] * (longest - len(one)) + [1] * len(one) for one in sequences]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def generation(args: argparse.Namespace, theirs, built, device, prompts: list[tuple[int, ...]]) -> dict[str, Work]:
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.types import GenerationRequest, SamplingParams

    engine = MegatronEngine(
        built, stop_ids=[VOCABULARY], decode=lambda ids: "", max_batch_size=len(prompts), device=device
    )
    requests = [GenerationRequest(str(place), 0, prompt, seed=place) for place, prompt in enumerate(prompts)]
    sampling, batch = SamplingParams(1.0, 1.0, NEW_TOKENS), padded(prompts)

    @torch.inference_mode()
    def generate() -> object:
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        return theirs.generate(**batch, do_sample=True, top_k=0, pad_token_id=0, **length)

    return {"ours": lambda: engine.generate(requests, sampling), "transformers": generate}


def training(args: argparse.Namespace, theirs, built, device, prompts: list[tuple[int, ...]]) -> dict[str, Work]:
    from nemo_edo.config import MicroBatchConfig
    from nemo_edo.data.batching import build_batch
    from nemo_edo.data.shares import InputShapes, cut
    from nemo_edo.losses import LossTerm
    from nemo_edo.megatron.forward_backward import forward_backward
    from nemo_edo.megatron.output_layer import LossHead

    numbers = random.Random(1)
    pairs = [
        (prompt, tuple(numbers.choices(range(2, VOCABULARY), k=NEW_TOKENS))) for prompt in prompts for _ in range(GROUP)
    ]
    batch, count = build_batch(pairs, pad_id=0), len(pairs) * NEW_TOKENS
    head = LossHead(built.chunks, args.head, built.vocab_size)
    policy = SimpleNamespace(built=built, chunks=built.chunks, head=head, device=torch.device("cpu"))
    how = MicroBatchConfig(8, args.tokens, packing=True, share_prompts=not args.without_sharing)

    def loss(logprobs, entropies, micro, _):
        return {"loss": LossTerm(-(logprobs * micro.mask).sum(), float(micro.mask.sum()))}, {}

    def ours() -> float:
        for chunk in built.chunks:
            chunk.zero_grad_buffer()
        [share] = cut(batch, how, 1, InputShapes(), {"loss": count})
        return forward_backward(policy, share, loss, exploration_weight=0.0, temperature=1.0)[0]["loss"]

    def passes() -> float:
        theirs.zero_grad(set_to_none=False)
        total = 0.0
        for start in range(0, len(pairs), args.rows):
            rows = [prompt + response for prompt, response in pairs[start : start + args.rows]]
            inputs = padded(rows)
            logits = theirs(**inputs, logits_to_keep=NEW_TOKENS + 1, use_cache=False).logits[:, :-1]
            targets = inputs["input_ids"][:, -NEW_TOKENS:]
            # Without softmax's full matrix, as TRL's selective_log_softmax in fp32.
            chosen = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.float().logsumexp(-1)
            part = -chosen.sum() / count
            part.backward()
            total += float(part)
        return total

    return {"ours": ours, "transformers": passes}


PARTS = {"generate": generation, "train": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"])
    parser.add_argument("--prompts", type=int, help="default: 20 to generate, 4 to train")
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up")
    parser.add_argument("--rows", type=int, default=8, help="of transformers' micro-batches")
    parser.add_argument("--tokens", type=int, default=2048, help="of our packs")
    parser.add_argument("--head", choices=("auto", "fused", "logits"), default="auto")
    parser.add_argument("--without-sharing", action="store_true", help="each response with its own copy of the prompt")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from nemo_edo.utils.quiet import quiet_libraries

    quiet_libraries()
    torch.set_num_threads(1)
    numbers = random.Random(0)
    count = args.prompts or (20 if args.part == "generate" else 4)
    prompts = [tuple(numbers.choices(range(2, VOCABULARY), k=numbers.randint(40, 150))) for _ in range(count)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder, context=512, end=VOCABULARY, **{**SMOLLM2, "num_hidden_layers": args.layers})
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        built, device = build(folder, args.precision)
    works = PARTS[args.part](args, theirs, built, device, prompts)
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(args.rounds + 1):
        for name, work in works.items():
            begun = time.process_time()
            work()
            if number:
                found[name].append(time.process_time() - begun)
    for name, seconds in found.items():
        print(f"{name:12} {statistics.median(seconds):7.2f} CPU s ({min(seconds):.2f} to {max(seconds):.2f})")
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    print(f"ours is {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast")


if __name__ == "__main__":
    main()
