"""What one GPU shows: memory and time of the loss layer in bf16, plain, through logits and fused.

Needs torch and Triton, no network. liger_kernel's fused linear cross entropy is measured beside them where it is
installed; it has no entropy. Not run yet: written on a machine without a GPU. tests/gpu checks what is computed.

    python tools/benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import loss_layer
import torch
from torch import Tensor

SHAPES = {"0.5B": (896, 151936), "1.5B": (1536, 151936), "8B": (4096, 128256)}
"""Hidden size and vocabulary of Qwen2.5's two smallest models and of Llama 3's."""
SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {}


def section(function: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Adds a part of the benchmark, which the command line can name."""
    SECTIONS[function.__name__] = function
    return function


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, **_) -> tuple[Tensor, None]:
    """Minus the summed cross entropy in every place: one gradient for all tokens, as in supervised training. Its
    gradients are made in the forward pass, for that sum alone."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    arguments = (None, None, -100, 0.0, 0.0, "sum")  # no class weights, no bias; nothing ignored; no other terms
    result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *arguments)
    return -(result[0] if isinstance(result, tuple) else result), None


def measure(head, data: dict[str, Tensor], entropy: bool, repeats: int) -> tuple[float, float]:
    """Peak GiB over inputs and weights, gradients included, and the median milliseconds of a pass."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=sorted(SECTIONS), default=sorted(SECTIONS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.sections:
        SECTIONS[name](args)


if __name__ == "__main__":
    main()
