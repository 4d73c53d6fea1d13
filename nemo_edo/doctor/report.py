"""What ``nemo-edo doctor`` prints: findings about the machine and, for a config, whether it can be run there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_edo import __version__
from nemo_edo.config import GRPOConfig, LoopConfig, ParallelismConfig, RunConfig
from nemo_edo.configuration import NOT_GIVEN, compose_incomplete
from nemo_edo.data.disk_space import estimate_bytes, free_bytes
from nemo_edo.doctor import advice, machine, workload
from nemo_edo.doctor.memory import CPU_OVERHEAD, FP32, OVERHEAD, Memory, adapter_parameters, host_bytes
from nemo_edo.doctor.throughput import Plan, estimate
from nemo_edo.errors import UserError
from nemo_edo.megatron.splits import check_adapters, check_splits, check_world
from nemo_edo.model_shape import ModelShape
from nemo_edo.sizes import bytes_of

DEFAULT_GPU = 80 * 10**9
"""Bytes of a GPU that is only spoken of: an H100's."""
SHOWN_STAGES = 8
ASSUMED_PROBLEMS, ASSUMED_PROMPT = 1000, 200
"""For estimates of time: problems of an iteration that takes all there are, and tokens of a prompt."""


@dataclass
class Findings:
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What keeps a run from starting or ending well."""


@dataclass(frozen=True)
class Devices:
    here: bool
    """Whether they are this machine's."""
    count: int
    bytes: int
    """Of each."""
    overhead: int
    """That a process on one takes before any tensor."""


def parse_bytes(text: str) -> int:
    """``80GB`` (of 10^9 bytes) or ``80GiB`` (of 2^30). Raises ValueError for anything else."""
    size = bytes_of(text, ("GB", "GIB"))
    if size is None:
        raise ValueError(f"{text!r} is not a size such as 80GB or 80GiB")
    return round(size)


def of_machine() -> tuple[Findings, list[machine.Gpu]]:
    """Python, packages and devices; the GPUs that there are."""
    findings = Findings([f"nemo-edo     {__version__}, Python {machine.python_version()}"])
    versions = [f"{name} {machine.installed(name) or 'absent'}" for name in machine.ABOUT]
    findings.lines.append(f"packages     {', '.join(versions)}")
    for package in machine.needed_packages():
        if not package.satisfies:
            state = f"is {package.found}" if package.found else "is not installed"
            findings.problems.append(f"{package.name} {state}, needed is {package.needed or 'any'}: {package.remedy}")
    gpus: list[machine.Gpu] = []
    try:
        gpus = machine.gpus()
    except UserError as error:
        findings.problems.append(str(error))
    for gpu in gpus:
        findings.lines.append(f"GPU          {gpu.name}, {_gb(gpu.bytes)} GB, compute capability {gpu.capability}")
    if not gpus:
        findings.lines.append("GPU          none: models are computed on the CPU")
    for name, use in machine.ON_GPUS.items():
        if gpus and machine.installed(name) is None:
            findings.lines.append(f"without      {name} ({use}): Megatron's own modules are used")
    findings.lines.append(f"memory       {_gb(machine.host_bytes())} GB of the host")
    return findings, gpus


def devices(gpus: Sequence[machine.Gpu], count: int | None, memory: int | None) -> Devices:
    """Those of the machine, or those that are spoken of instead; without either, the CPU as one."""
    here = count is None and memory is None
    if here and not gpus:
        return Devices(here, 1, machine.host_bytes(), CPU_OVERHEAD)
    smallest = min((gpu.bytes for gpu in gpus), default=DEFAULT_GPU)
    return Devices(here, count or len(gpus) or 1, memory or smallest, OVERHEAD)


def of_config(cfg: RunConfig, missing: list[str], found: Devices) -> Findings:
    """The model, its split, its memory on each GPU and the disk it needs."""
    findings = Findings()
    if missing:
        findings.lines.append(f"to be given  {', '.join(missing)}")
    try:
        shape = workload.model_shape(cfg)
        check_world(cfg.parallelism, found.count)
        check_splits(shape, cfg.parallelism, shape.vocab_size)
        check_adapters(cfg.lora, shape, cfg.parallelism.tensor_model_parallel_size)
    except UserError as error:
        findings.problems.append(str(error))
        return findings
    loads = workload.workloads(cfg, shape, found.count, found.overhead)
    training, stages = workload.largest(loads)
    load = loads[training]
    sizes = {
        "tensor": cfg.parallelism.tensor_model_parallel_size,
        "pipeline": cfg.parallelism.pipeline_model_parallel_size,
        "context": cfg.parallelism.context_parallel_size,
        "data": load.data_parallel,
    }
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
    if cfg.parallelism.expert_model_parallel_size > 1:
        split += f", experts over {cfg.parallelism.expert_model_parallel_size}"
    findings.lines.append(f"model        {_count(shape.parameters)} parameters, {cfg.precision.dtype}, {split}")
    if load.trains or not cfg.generation.is_served:
        micro_batches = f", with micro-batches of {load.tokens:,} tokens at most" if load.trains else ""
        findings.lines += [
            f"fullest in   {training}{micro_batches}",
            "",
            *memory_table(stages, found.bytes),
            f"and {_gb(host_bytes(load, 0))} GB of the host's memory for each process",
            "",
        ]
        findings.problems += _fit(cfg, shape, found, max(memory.total for memory in stages))
    else:
        findings.lines.append("             nothing is trained: servers alone hold it")
    if not found.here or found.overhead == OVERHEAD:
        findings.lines += [*_time(cfg, shape, found.count), ""]
    findings.problems += _servers(cfg, found)
    disk = _disk(cfg, shape, found.here)
    return Findings([*findings.lines, *disk.lines], [*findings.problems, *disk.problems])


def memory_table(stages: list[Memory], limit: int) -> list[str]:
    """Lines of GB (10^9 bytes) for a GPU of each pipeline stage; of many stages, the first and the last ones."""
    half = SHOWN_STAGES // 2
    places = list(range(len(stages)))
    shown = places if len(places) <= SHOWN_STAGES else [*places[:half], *places[-half:]]
    heads = [f"stage {place}" if len(stages) > 1 else "each" for place in shown]
    lines = [f"{'GB':16}" + "".join(f"{head:>10}" for head in heads)]
    rows = [dict(stages[place].items()) for place in shown]
    for name in rows[0]:
        lines.append(f"{name:16}" + "".join(f"{_gb(row[name]):>10}" for row in rows))
    lines.append(f"{'at its highest':16}" + "".join(f"{_gb(stages[place].total):>10}" for place in shown))
    return [*lines, f"{'there are':16}" + f"{_gb(limit):>10}"]


def _fit(cfg: RunConfig, shape: ModelShape, found: Devices, highest: int) -> list[str]:
    if highest <= found.bytes:
        return []
    problem = f"does not fit: {_gb(highest)} GB of {_gb(found.bytes)}"
    found_advice = advice.advise(cfg, shape, found.count, found.bytes)
    lines = [f"  {' '.join(change.overrides)} (cost: {change.cost})" for change in found_advice.changes]
    enough = found_advice.bytes <= found.bytes
    lines.append(
        f"with all of it: {_gb(found_advice.bytes)} GB" + ("" if enough else ": more or larger GPUs are needed")
    )
    return ["\n".join([f"{problem}. What to change:", *lines])]


def _servers(cfg: RunConfig, found: Devices) -> list[str]:
    """What keeps this machine from starting the servers that responses come from."""
    if not cfg.generation.is_served or not found.here:
        return []
    from nemo_edo.generation.servers import check_servers

    try:
        check_servers(cfg, len(machine.gpus()))
    except UserError as error:
        return [str(error)]
    return []


def _time(cfg: RunConfig, shape: ModelShape, gpus: int) -> list[str]:
    """Lines on an iteration of the first arm that explores by GRPO, on H100s; none where there is no such arm."""
    arms = {name: arm for name, arm in workload.trainings(cfg).items() if isinstance(arm, GRPOConfig)}
    if not arms:
        return []
    name, arm = next(iter(arms.items()))
    problems, longest = arm.problems_per_iteration or ASSUMED_PROBLEMS, cfg.sampling.max_new_tokens
    size = cfg.generation.servers.tensor_parallel_size
    apart = cfg.generation.is_served and cfg.generation.placement == "apart"
    plan = Plan(
        shape=shape,
        gpus=gpus,
        server_gpus=cfg.generation.servers.replicas * size if apart else max(1, gpus // size) * size,
        server_tensor_parallel=size,
        samples=problems * cfg.sampling.samples_per_prompt,
        prompt=max(1, min(ASSUMED_PROMPT, cfg.model.seq_length - longest)),
        response=longest // 2,
        longest=longest,
        epochs=arm.epochs,
        reference=arm.beta > 0,
        recomputation=cfg.parallelism.recompute_granularity == "full",
        fp8=cfg.precision.fp8 is not None,
        overlapped=cfg.generation.one_step_off,
    )
    times = estimate(plan)
    parts = {"generation": times.generation, "log-probabilities": times.log_probs, "training": times.training}
    shown = ", ".join(f"{part} {seconds:,.0f} s" for part, seconds in {**parts, "refit": times.refit}.items())
    return [
        f"time         an iteration of {name} on H100s: about {times.total:,.0f} s ({shown})",
        f"             for {problems:,} problems, responses of {plan.response:,} tokens on average and {longest:,} at "
        "most, drawn by servers (docs/scale.md)",
    ]


# --- disk -----------------------------------------------------------------------------------------------------------


def _disk(cfg: RunConfig, shape: ModelShape, here: bool) -> Findings:
    rollouts, checkpoints = _rollout_bytes(cfg), _checkpoint_bytes(cfg, shape)
    of_rollouts = "rollouts (data.train is not at hand)" if rollouts is None else f"{_gb(rollouts)} GB of rollouts"
    line = f"disk         {of_rollouts}, {_gb(checkpoints)} GB of checkpoints at most"
    needed, free = checkpoints + (rollouts or 0), free_bytes(cfg.output_dir)
    if not here or free >= needed:
        return Findings([f"{line}; {_gb(free)} GB are free here in {cfg.output_dir}"])
    problem = f"{cfg.output_dir} has {_gb(free)} GB free of {_gb(needed)}: set output_dir to another file system"
    return Findings([line], [problem])


def _rollout_bytes(cfg: RunConfig) -> int | None:
    """At most; None where the number of problems is not known."""
    if cfg.data.train is None:
        problems = cfg.data.arithmetic.train_problems
    elif cfg.data.train == NOT_GIVEN or not Path(cfg.data.train).is_file():
        return None
    else:
        with open(cfg.data.train, "rb") as file:
            problems = sum(1 for line in file if line.strip())
    longest = cfg.model.seq_length - cfg.sampling.max_new_tokens
    total = 0
    for arm in workload.trainings(cfg).values():
        if isinstance(arm, LoopConfig):
            drawn = min(arm.problems_per_iteration or problems, problems) * cfg.sampling.samples_per_prompt
            total += arm.iterations * estimate_bytes(drawn, longest, cfg.sampling.max_new_tokens)
    return total


def _checkpoint_bytes(cfg: RunConfig, shape: ModelShape) -> int:
    """The start, each arm's last and best policies, and of the one in training those with the optimizer's state."""
    unsplit = replace(cfg, parallelism=ParallelismConfig())
    load = next(iter(workload.workloads(unsplit, shape, 1).values()))
    adapters = adapter_parameters(load)
    trained = adapters if cfg.lora.rank else shape.parameters
    weights = load.bytes_per_number * (shape.parameters + adapters)
    copies = 3 if cfg.precision.dtype == "bf16" else 2
    arms = sum(isinstance(training, LoopConfig) for training in workload.trainings(cfg).values())
    if not load.trains:
        return 0
    kept = 1 + arms * (2 if cfg.checkpoint.best else 1)
    return kept * weights + (cfg.checkpoint.keep + 1) * (weights + copies * FP32 * trained)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


# --- the command ----------------------------------------------------------------------------------------------------


def diagnose(
    config_name: str | None, overrides: list[str], config_path: str | None, *, count: int | None, memory: int | None
) -> tuple[str, bool]:
    """The text for a terminal, and whether nothing was found that keeps the run from starting.

    config_name None: of the machine alone. count, memory: GPUs (of all nodes together) and bytes of each, to speak of
    others than this machine's. Raises ConfigError for a config that does not compose.
    """
    composed = None if config_name is None else compose_incomplete(config_name, overrides, config_path)
    findings, gpus = of_machine()
    if composed is not None:
        cfg, missing = composed
        more = of_config(cfg, missing, devices(gpus, count, memory))
        findings = Findings([*findings.lines, "", *more.lines], [*findings.problems, *more.problems])
    verdict = [f"PROBLEM      {problem}" for problem in findings.problems] or ["ok"]
    return "\n".join([*findings.lines, *verdict]), not findings.problems
