"""vLLM servers against the in-process engine, on the same machine and in one run.

The weights are random, so that the built-in task's tokens are about equally likely: response lengths vary geometrically
up to the limit. Engines alternate, each after a few warm-up requests. CPU seconds are those of this process and of the
servers: on a busy machine they say more than wall time.

    python tools/benchmarks/servers.py --model 100m --threads 2 --replicas 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from nemo_edo.utils.quiet import quiet_libraries

WARM_UP = 32
"""Requests before an engine is timed."""
MODELS = {
    "quickstart": ["sampling.max_new_tokens=32"],
    "100m": [
        "model.architecture.hidden_size=768",
        "model.architecture.intermediate_size=2304",
        "model.architecture.num_hidden_layers=13",
        "model.architecture.num_attention_heads=12",
        "model.architecture.num_key_value_heads=12",
        "model.architecture.max_position_embeddings=1024",
        "model.architecture.initializer_range=0.02",
        "generation.servers.cpu_cache_gb=3",  # 80 kB per token
    ],
}


def overrides(args: argparse.Namespace) -> list[str]:
    lengths = []
    if args.max_new_tokens is not None:
        longest = args.max_new_tokens + 16
        lengths = [f"sampling.max_new_tokens={args.max_new_tokens}", f"model.seq_length={longest}"]
    return [
        "generation=vllm",
        f"threads={args.threads}",
        f"generation.servers.replicas={args.replicas}",
        f"generation.servers.threads={args.server_threads or 'null'}",
        f"generation.servers.max_in_flight={args.in_flight}",
        f"generation.max_batch_size={args.in_flight}",
        *MODELS[args.model],
        *lengths,
    ]


def engines(cfg, builder, data, model) -> dict:
    """What is timed, by name: in process, one server, and all of them."""
    servers = builder.servers
    found = {"in process": builder.engine(model), "one server": builder.server_engine(servers.replicas[:1])}
    return found if len(servers.replicas) == 1 else {**found, f"{len(servers.replicas)} servers": servers}


@dataclass
class Speeds:
    """Tokens of each round: for each second of the clock, and for each CPU second."""

    clock: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def timed(works: dict[str, Callable], asked: list, repeats: int) -> dict[str, Speeds]:
    """works: by name, what generates responses to requests."""
    speeds = {name: Speeds() for name in works}
    for work in works.values():
        work(asked[:WARM_UP])
    for repeat in range(repeats):
        for name, work in works.items():
            begun, cpu_begun = time.perf_counter(), cpu_seconds()
            rollouts = work(asked)
            seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu_begun
            lengths = [len(rollout.response_ids) for rollout in rollouts]
            speeds[name].clock.append(sum(lengths) / seconds)
            speeds[name].cpu.append(sum(lengths) / cpu)
            print(
                f"round {repeat}, {name}: {sum(lengths):,} tokens in {seconds:.1f} s, {cpu:.1f} CPU s; lengths from "
                f"{min(lengths)} to {max(lengths)}, median {statistics.median(lengths):.0f}",
                flush=True,
            )
    return speeds


def cpu_seconds() -> float:
    """CPU seconds of this process and of all running processes that it started."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="quickstart")
    parser.add_argument("--threads", type=int, default=1, help="threads of the in-process engine")
    parser.add_argument("--server-threads", type=int, default=None, help="of each server; default: its share of cores")
    parser.add_argument("--sequences", type=int, default=1280)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=None)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    quiet_libraries()
    from nemo_edo.algorithms.plan import sampling_requests
    from nemo_edo.config.compose import compose_run
    from nemo_edo.megatron.platform import device_and_groups
    from nemo_edo.run import inputs
    from nemo_edo.run.build import Builder
    from nemo_edo.run_folder import RunFolder
    from nemo_edo.types import SamplingParams

    cfg = compose_run("quickstart", overrides(args))
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
        Builder(cfg, run).check_servers()
        inputs.write_builtin_files(cfg, run)
        data = inputs.load_data(cfg, run)
        builder = Builder(cfg, run, data)
        model = builder.model(cfg.grpo)
        begun = time.perf_counter()
        builder.start_servers()
        print(f"{args.replicas} servers ready after {time.perf_counter() - begun:.1f} s", flush=True)
        try:
            sampling = SamplingParams(1.0, 1.0, cfg.sampling.max_new_tokens)
            asked = sampling_requests(data.train[: args.sequences // 10 + 1], data.prompts, 10, 0)[: args.sequences]
            works = {
                name: partial(engine.generate, sampling=sampling)
                for name, engine in engines(cfg, builder, data, model).items()
            }
            speeds = timed(works, asked, args.repeats)
        finally:
            builder.close()
    parameters = sum(
        parameter.numel() for chunk in model.workers.local.model.built.chunks for parameter in chunk.parameters()
    )
    print(
        f"{parameters:,} parameters, {args.sequences} sequences, {args.in_flight} in flight, {args.threads} threads "
        f"in process, {cfg.generation.servers.threads or 'a share of the cores'} for each server"
    )
    for name, found in speeds.items():
        print(f"{name:12} tokens/s: {middle(found.clock)}; tokens/CPU s: {middle(found.cpu)}")


def middle(values: list[float]) -> str:
    return f"median {statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    main()
