"""One GPU in bf16: the loss layer's memory and time (plain, through logits, fused), and training steps.

Needs torch and Triton, no network. If liger_kernel is installed, its fused linear cross entropy, which has no entropy,
is measured too. The training steps use a plain torch decoder with our fused loss layer, fp32 main weights and AdamW
(decoder.py): tokens per second, the share of a matrix product's speed in the same run, and peak memory. Not run on a
GPU yet. tests/gpu checks the results.

    python tools/benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import decoder
import loss_layer
import torch
from torch import Tensor

from nemo_edo.parallel import linear_logprobs_and_entropy

SHAPES = {"0.5B": (896, 151936), "1.5B": (1536, 151936), "8B": (4096, 128256)}
"""Hidden size and vocabulary of Qwen2.5's two smallest models and of Llama 3's."""
SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {}


def section(function: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Registers a section of the benchmark for the command line."""
    SECTIONS[function.__name__] = function
    return function


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, **_) -> tuple[Tensor, None]:
    """Minus the summed cross entropy in every place: one gradient for all tokens, as in supervised training. Its
    gradients are made in the forward pass, for that sum only."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    arguments = (None, None, -100, 0.0, 0.0, "sum")  # no class weights, no bias; nothing ignored; no other terms
    result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *arguments)
    return -(result[0] if isinstance(result, tuple) else result), None


def measure(head, data: dict[str, Tensor], entropy: bool, repeats: int) -> tuple[float, float]:
    """Peak GiB beyond inputs and weights, gradients included, and the median milliseconds of a pass."""
    hidden, weight = (data[name].requires_grad_() for name in ("hidden", "weight"))
    milliseconds = []
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss_layer.forward_backward(head, hidden, weight, data, entropy, vocab_start=0, group=None)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    hidden.grad = weight.grad = None
    return peak, statistics.median(milliseconds[1:])  # the first pass compiles


@section
def loss_layers(args: argparse.Namespace) -> None:
    for name, (features, vocabulary) in SHAPES.items():
        sizes = argparse.Namespace(tokens=args.tokens, hidden=features, vocabulary=vocabulary)
        data = loss_layer.inputs(sizes, "cuda", torch.bfloat16)
        for entropy in (False, True):
            heads = dict(loss_layer.HEADS)
            if not entropy and importlib.util.find_spec("liger_kernel"):
                heads["liger"] = liger
            for head, function in heads.items():
                what = f"{name:5} {args.tokens} tokens, {'with' if entropy else 'no'} entropy, {head:7}"
                try:
                    gib, milliseconds = measure(function, data, entropy, args.repeats)
                except torch.OutOfMemoryError:
                    print(f"{what} out of memory", flush=True)
                else:
                    print(f"{what} {gib:7.3f} GiB {milliseconds:8.2f} ms", flush=True)


@section
def training_steps(args: argparse.Namespace) -> None:
    speed = matmul_speed("cuda")
    print(f"matrix products of 8192 in bf16: {speed / 1e12:.0f} TFLOP/s")
    for name, shape in decoder.SHAPES.items():
        torch.cuda.reset_peak_memory_stats()
        rows = max(args.tokens // args.length, 1)
        seconds = step_seconds(shape, rows, args.length, args.repeats, "cuda")
        tokens, flops = rows * args.length, shape.flops_per_token(args.length)
        print(
            f"{name:5} {rows} x {args.length} tokens, with entropy: {1e3 * seconds:8.1f} ms a step, "
            f"{tokens / seconds:9,.0f} tokens/s, {tokens * flops / seconds / speed:.1%} of the products' speed, "
            f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )


def matmul_speed(device: str, size: int = 8192, repeats: int = 20) -> float:
    """FLOP per second of a bf16 matrix product, the best of three rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(4):
        times.append(timed(lambda: [left @ right for _ in range(repeats)], device) / repeats)
    return 2 * size**3 / min(times[1:])


def step_seconds(shape: decoder.Shape, rows: int, length: int, repeats: int, device: str) -> float:
    """Median seconds of an optimizer step: policy gradient with an entropy bonus, the first two steps left out."""
    torch.manual_seed(0)
    model = decoder.Decoder(shape).to(device, torch.bfloat16)
    weights = list(model.parameters())
    main = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(main, lr=1e-6, fused=True)
    tokens = torch.randint(shape.vocabulary, (rows, length + 1), device=device)
    advantages = torch.randn(rows, 1, device=device)

    def step() -> None:
        logprobs, entropies = linear_logprobs_and_entropy(
            model(tokens[:, :-1]), model.embedding.weight, tokens[:, 1:], vocab_start=0, group=None
        )
        (-(advantages * logprobs).mean() - 1e-3 * entropies.mean()).backward()
        for weight, copy in zip(weights, main, strict=True):
            copy.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(weights, main, strict=True):
                weight.copy_(copy)

    return statistics.median([timed(step, device) for _ in range(repeats + 2)][2:])


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds until the device has done it."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=sorted(SECTIONS), default=sorted(SECTIONS))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a pass and of a training step")
    parser.add_argument("--length", type=int, default=2048, help="length of the training steps' sequences")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.sections:
        SECTIONS[name](args)


if __name__ == "__main__":
    main()
