"""An iteration of GRPO on paper: what generation, log-probabilities, training and refit take at the bounds of
arithmetic, memory and network, and at shares of them that are often reached. Nothing is measured.

    python tools/docs/roofline.py

writes the tables of docs/performance.md. Lengths are log-normal, cut at the limit, with the stated mean.
Decoding is simulated from one response's end to the next: a token takes the longer of reading weights and caches and of
its products. A waiting row starts where the cache has room for half of its length, as a row in the middle of its
response has.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from generated import between_markers
from report_tables import markdown

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARKS = ("<!-- roofline -->", "<!-- end of roofline -->")


@dataclass(frozen=True)
class Gpu:
    """Per GPU: FLOP/s in bf16, bytes/s of memory and of the network between nodes, bytes of memory; and the shares of
    arithmetic, memory and network that a run reaches."""

    flops: float = 989e12
    memory_speed: float = 3.35e12
    network: float = 50e9
    memory: float = 80e9
    shares: tuple[float, float, float] = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. ``experts`` is (number, those of a token, width of one); (0, 0, 0) is a dense model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: tuple[int, int, int] = (0, 0, 0)
    gpus_a_server: int = 1

    @property
    def attention_weights(self) -> int:
        return self.layers * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    def mlp_weights(self, experts: float) -> float:
        """Of the layers' MLPs, where ``experts`` of each layer are used."""
        width = self.experts[2] * experts if self.experts[0] else self.intermediate
        return self.layers * 3 * self.hidden * width

    @property
    def used(self) -> float:
        """Weights in one token's matrix products, output layer included."""
        return self.attention_weights + self.mlp_weights(self.experts[1]) + self.hidden * self.vocabulary

    @property
    def parameters(self) -> float:
        return self.attention_weights + self.mlp_weights(self.experts[0]) + 2 * self.hidden * self.vocabulary

    @property
    def cache_bytes(self) -> int:
        """Of one token, in bf16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def read_bytes(self, rows: int) -> float:
        """Weights that a decoding step of so many rows reads; experts are chosen evenly and independently."""
        number, chosen, _ = self.experts
        experts = number * (1 - (1 - chosen / number) ** rows) if number else 0
        return 2 * (self.attention_weights + self.mlp_weights(experts) + self.hidden * self.vocabulary)

    def forward_flops(self, lengths: np.ndarray) -> float:
        """Of one pass over sequences of these lengths; causal attention is half of the square."""
        return float(
            2 * self.used * lengths.sum() + 2 * self.layers * self.heads * self.head_dim * (lengths**2.0).sum()
        )


@dataclass(frozen=True)
class Work:
    """An iteration: prompts x responses, lengths in tokens, GPUs."""

    name: str
    prompts: int
    responses: int
    prompt: int
    mean: float
    limit: int
    gpus: int
    sigma: float = 1.0

    def lengths(self, seed: int = 0) -> np.ndarray:
        """[prompts x responses] response lengths whose mean is ``mean`` after the cut at ``limit``."""
        spread = np.exp(self.sigma * np.random.default_rng(seed).standard_normal(self.prompts * self.responses))
        low, high = 0.0, float(self.limit)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(middle * spread, self.limit).mean() < self.mean else (low, middle)
        return np.maximum(np.minimum(high * spread, self.limit), 1).astype(int)


def decode_seconds(
    model: Model, gpu: Gpu, prompt: int, lengths: np.ndarray, enough: int | None = None
) -> tuple[float, float]:
    """Seconds of one server for responses of these lengths, and the share of them in which fewer than a quarter of the
    rows are left. With ``enough``, it stops once so many have ended."""
    memory_speed, flops = (
        model.gpus_a_server * speed * share
        for speed, share in ((gpu.memory_speed, gpu.shares[1]), (gpu.flops, gpu.shares[0]))
    )
    room = int((0.9 * gpu.memory * model.gpus_a_server - 2 * model.parameters) / model.cache_bytes)
    waiting, rows, now, step, ended, thin = list(lengths[::-1]), [], 0.0, 0, 0, 0.0
    cached = 0
    target = len(lengths) if enough is None else enough
    while ended < target:
        while waiting and (not rows or cached + prompt + waiting[-1] / 2 < room):
            length = waiting.pop()
            heapq.heappush(rows, (step + length, step))
            cached += prompt + length / 2
        end, began = heapq.heappop(rows)
        steps, count = end - step, len(rows) + 1
        tokens = count * prompt + sum(step - start for _, start in rows) + step - began + count * steps / 2
        seconds = steps * max(
            (model.read_bytes(count) + model.cache_bytes * tokens) / memory_speed,
            count * 2 * model.used / flops,
        )
        now, step, ended = now + seconds, end, ended + 1
        thin += seconds if count < len(lengths) / 4 else 0
        cached -= prompt + (end - began) / 2
    return now, thin / now


@cache
def phases(model: Model, work: Work, gpu: Gpu) -> dict[str, float]:
    """Seconds of each phase on all GPUs."""
    lengths = work.lengths()
    servers = work.gpus // model.gpus_a_server
    mine = max(np.array_split(lengths, servers), key=np.sum)  # of the server that the others wait for
    flops = gpu.flops * gpu.shares[0] * work.gpus
    forward = model.forward_flops(lengths + work.prompt)
    whole, thin = decode_seconds(model, gpu, work.prompt, mine)
    # Partial rollouts leave a server full at an iteration's end: the time between the ends of 1 and 4 iterations' work.
    many = np.concatenate([work.lengths(seed)[: len(mine)] for seed in range(6)])
    first, fourth = (decode_seconds(model, gpu, work.prompt, many, enough=n * len(mine))[0] for n in (1, 4))
    batches = [decode_seconds(model, gpu, work.prompt, batch)[0] for batch in np.array_split(mine, 2)]
    return {
        "tokens": float(lengths.sum()),
        "generation in two batches, one after the other": sum(batches),
        "generation, continuous": whole,
        "less than a quarter of the rows left": thin,
        "generation, partial rollouts": (fourth - first) / 3,
        "log pi_old, all samples": forward / flops,
        "log pi_old, a tenth of the prompts": forward / flops / 10,
        "training": 3 * forward / flops,
        "training, layers recomputed": 4 * forward / flops,
        "refit": 2 * model.parameters / (gpu.network * gpu.shares[2] * model.gpus_a_server),
    }


LLAMA = Model("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)
QWEN = Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, experts=(128, 8, 768), gpus_a_server=2)
LONG = Work("32k tokens", 64, 16, 200, 8000, 32768, 16)
BOUND, REACHED = Gpu(), Gpu(shares=(0.4, 0.6, 0.6))


def iteration(found: dict[str, float], generation: str = "continuous", logprobs: str = "all samples") -> float:
    """Seconds of an iteration whose phases follow one another on all GPUs."""
    names = (f"generation, {generation}", f"log pi_old, {logprobs}", "training, layers recomputed", "refit")
    return sum(found[name] for name in names)


def long_table() -> str:
    machines = [(model, gpu) for model in (LLAMA, QWEN) for gpu in (BOUND, REACHED)]
    results = [phases(model, LONG, gpu) for model, gpu in machines]
    rows = []
    for name in list(results[0])[1:]:
        share = name.startswith("less")
        rows.append([name, *(f"{100 * r[name]:.0f} %" if share else f"{r[name]:.1f} s" for r in results)])
    on_policy = [iteration(r, logprobs="a tenth of the prompts") for r in results]
    rows.append(["**an iteration, on policy**", *(f"{seconds:.0f} s" for seconds in on_policy)])
    rows.append(["**with partial rollouts**", *(f"{iteration(r, 'partial rollouts'):.0f} s" for r in results)])
    for name, generation in (("one step off", "continuous"), ("one step off, partial rollouts", "partial rollouts")):
        divided = [one_step_off(model, LONG, gpu, generation) for model, gpu in machines]
        rows.append([f"**{name}**", *(f"{seconds:.0f} s ({number} of 16 generate)" for seconds, number in divided)])
    rates = [f"{r['tokens'] / LONG.gpus / s:,.0f}" for r, s in zip(results, on_policy, strict=True)]
    rows.append(["tokens per second and GPU, on policy", *rates])
    heads = [f"{model.name}, at the {'bounds' if gpu is BOUND else 'shares'}" for model, gpu in machines]
    return markdown(["16 H100s, 64 prompts x 16 responses, mean 8,000 of at most 32,768 tokens", *heads], rows)


def one_step_off(model: Model, work: Work, gpu: Gpu, generation: str = "continuous") -> tuple[float, int]:
    """Seconds of an iteration where some GPUs generate while the others train, and how many generate at best."""
    options = []
    for generating in range(2, work.gpus, 2):
        made = phases(model, replace(work, gpus=generating), gpu)[f"generation, {generation}"]
        trained = phases(model, replace(work, gpus=work.gpus - generating), gpu)
        options.append((max(made, trained["log pi_old, all samples"] + trained["training, layers recomputed"])
                        + trained["refit"], generating))  # fmt: skip
    return min(options)


# Tokens per second and GPU in docs/about/performance-summary.md of NVIDIA-NeMo/RL, the pages for 0.5 and 0.6.
STATED = [
    (LLAMA, Work("", 64, 32, 100, 1019, 4096, 16, 0.8), "on policy, 0.5", 1581),
    (LLAMA, Work("", 64, 32, 100, 1123, 4096, 16, 0.8), "one step off, 0.5", 2478),
    (QWEN, Work("", 64, 32, 100, 3203, 4096, 32, 0.4), "on policy, 0.6", 1102),
    (QWEN, Work("", 64, 32, 100, 3201, 4096, 32, 0.4), "one step off, 0.6", 1414),
]


def stated_table() -> str:
    rows = []
    for model, work, how, stated in STATED:
        rates = []
        for gpu in (REACHED, BOUND):
            found = phases(model, work, gpu)
            seconds = one_step_off(model, work, gpu)[0] if "off" in how else iteration(found)
            tokens = found["tokens"] + work.prompt * work.prompts * work.responses
            rates.append(f"{tokens / work.gpus / seconds:,.0f}")
        rows.append([f"{model.name}, {how}", str(work.gpus), f"{work.mean:,.0f}", f"{stated:,}", *rates])
    heads = ["NeMo-RL's workload, 2,048 responses", "GPUs", "mean length", "stated by NeMo-RL"]
    return markdown([*heads, "at the shares", "at the bounds"], rows)


if __name__ == "__main__":
    tables = f"{long_table()}\n\n{stated_table()}\n"
    PAGE.write_text(between_markers(PAGE.read_text(encoding="utf-8"), *MARKS, tables), encoding="utf-8")
