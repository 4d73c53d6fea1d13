"""What ``nemo-edo doctor`` prints: findings about the machine and, for a config, whether it can be run there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_edo import __version__
from nemo_edo.config import NONE, GRPOConfig, LoopConfig, ParallelismConfig, RunConfig
from nemo_edo.config.compose import NOT_GIVEN, compose_incomplete
from nemo_edo.config.generation import AUTO
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.data.model_folder import find_model
from nemo_edo.doctor import advice, machine, workload
from nemo_edo.doctor.memory import FP32, Memory, adapter_parameters, host_bytes
from nemo_edo.doctor.parts import installed, part_lines
from nemo_edo.doctor.preflight import with_fitted_parallelism
from nemo_edo.doctor.throughput import Plan, estimate
from nemo_edo.errors import UserError
from nemo_edo.rollouts.disk_space import estimate_bytes, free_bytes
from nemo_edo.utils import host_memory
from nemo_edo.utils.files import check_folder

DEFAULT_GPU = 80 * 10**9
"""Bytes of a hypothetical GPU: an H100's."""
SHOWN_STAGES = 8
ASSUMED_PROBLEMS = 1000
"""For estimates of time: problems of an iteration over the whole training set."""


@dataclass
class Findings:
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What would keep a run from starting or finishing."""


@dataclass(frozen=True)
class Devices:
    here: bool
    """Whether they are this machine's."""
    count: int
    bytes: int
    """Memory of each."""
    cpu: bool = False
    """Whether it is the CPU, as one device."""


def of_machine() -> tuple[Findings, list[machine.Gpu]]:
    """Python, packages and devices; the GPUs that there are."""
    findings = Findings([f"nemo-edo     {__version__}, Python {machine.python_version()}"])
    versions = [f"{name} {installed(name) or 'absent'}" for name in machine.ABOUT]
    findings.lines.append(f"packages     {', '.join(versions)}")
    findings.lines += part_lines()
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
        if gpus and installed(name) is None:
            findings.lines.append(f"without      {name} ({use}): Megatron's own modules are used")
    findings.lines.append(f"memory       {_gb(host_memory.total_bytes())} GB of the host")
    return findings, gpus


def devices(gpus: Sequence[machine.Gpu], count: int | None, memory: int | None) -> Devices:
    """The machine's, or hypothetical ones instead; without either, the CPU as one device."""
    here = count is None and memory is None
    if here and not gpus:
        return Devices(here, 1, host_memory.total_bytes(), cpu=True)
    smallest = min((gpu.bytes for gpu in gpus), default=DEFAULT_GPU)
    return Devices(here, count or len(gpus) or 1, memory or smallest)


def of_config(cfg: RunConfig, missing: list[str], found: Devices) -> Findings:
    """The model, its split, its memory on each GPU and the disk it needs."""
    findings = Findings()
    if missing:
        findings.lines.append(f"to be given  {', '.join(missing)}")
    try:
        cfg = _with_model_at_hand(cfg)
        shape = workload.model_shape(cfg)
        node = min(found.count, advice.GPUS_OF_A_NODE)
        cfg = with_fitted_parallelism(cfg, shape, found.count, node, found.bytes, cpu=found.cpu)
        advice.check_possible(cfg, shape, found.count)
        sizes = _sizes(cfg, missing)
    except UserError as error:
        findings.problems.append(str(error))
        return findings
    given, ranks = cfg, found.count // cfg.parallelism.model_ranks
    cfg = workload.for_estimate(cfg, ranks, longest=sizes.longest, train=sizes.train, test=sizes.test)
    known = {"cpu": found.cpu, "tested": sizes.test}
    if given.generation.max_batch_size == AUTO:
        rows = workload.counted_rows(cfg)
        cfg = workload.with_rows_that_fit(cfg, shape, found.count, found.bytes, rows=rows, **known)
    loads = workload.workloads(cfg, shape, found.count, **known)
    training, stages = workload.largest(loads)
    load = loads[training]
    split = _split(cfg.parallelism, load.data_parallel)
    findings.lines.append(f"model        {_count(shape.parameters)} parameters, {cfg.precision.dtype}, {split}")
    findings.lines.append(f"sequences    {_longest_in_words(given, sizes, cfg.model.seq_length)}")
    if not cfg.generation.is_served:
        how = f"generation.max_batch_size={given.generation.max_batch_size}"
        findings.lines.append(f"generation   {workload.counted_rows(cfg):,} rows at a time are counted ({how})")
    if load.trains or not cfg.generation.is_served:
        micro_batches = f", with micro-batches of {load.tokens:,} tokens at most" if load.trains else ""
        findings.lines += [
            f"fullest in   {training}{micro_batches}",
            "",
            *memory_table(stages, found.bytes),
            *([] if found.cpu else [f"and {_gb(host_bytes(load, 0))} GB of the host's memory for each process"]),
            "",
        ]
        findings.problems += _fit(cfg, shape, found, sizes, max(memory.total for memory in stages))
    else:
        findings.lines.append("             nothing is trained: only servers load it")
    if not found.cpu:
        findings.lines += [*_time(cfg, shape, found.count), ""]
    findings.problems += _servers(cfg, found)
    others = [_stop_tokens(cfg), _disk(cfg, shape, sizes.train, found.here)]
    return Findings(
        [*findings.lines, *(line for other in others for line in other.lines)],
        [*findings.problems, *(problem for other in others for problem in other.problems)],
    )


def _with_model_at_hand(cfg: RunConfig) -> RunConfig:
    """With the folder of a hub's model that is in the cache: nothing is downloaded."""
    if cfg.model.path in (None, NOT_GIVEN):
        return cfg
    try:
        folder = find_model(cfg.model.path, download=False)
    except UserError:
        return cfg
    return replace(cfg, model=replace(cfg.model, path=str(folder)))


@dataclass(frozen=True)
class _Sizes:
    """What the problems say of a run's size."""

    longest: int | None
    """Tokens of the longest sequence; None where they are not known."""
    train: float
    """Problems; infinite where the number is not known."""
    test: float


def _sizes(cfg: RunConfig, missing: list[str]) -> _Sizes:
    """Of the problems and the tokenizer that are at hand. Raises UserError for problems that could not be used."""
    data = cfg.data
    files = [cfg.model.path, *([] if data.source is not None else [data.train or data.test, data.test])]
    given = not any(key.startswith("data.") for key in missing)
    if not given or not all(path is not None and Path(path).exists() for path in files):
        return _Sizes(None, workload.problems(cfg, "train"), workload.problems(cfg, "test"))
    from nemo_edo.run.inputs import read_sizes

    return _Sizes(*read_sizes(cfg))


def _longest_in_words(cfg: RunConfig, sizes: _Sizes, used: int) -> str:
    why = "the longest prompt and sampling.max_new_tokens"
    if cfg.model.seq_length is not None:
        why = "model.seq_length"
    elif sizes.longest is None:
        why = f"prompts of {workload.ASSUMED_PROMPT} tokens are assumed: the model or the problems are not here"
    return f"of {used:,} tokens at most ({why})"


def _split(parallelism: ParallelismConfig, data_parallel: int) -> str:
    sizes = {
        "tensor": parallelism.tensor_model_parallel_size,
        "pipeline": parallelism.pipeline_model_parallel_size,
        "context": parallelism.context_parallel_size,
        "data": data_parallel,
    }
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
    if parallelism.expert_model_parallel_size > 1:
        split += f", experts over {parallelism.expert_model_parallel_size}"
    return split


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


def _fit(cfg: RunConfig, shape: ModelShape, found: Devices, sizes: _Sizes, highest: int) -> list[str]:
    if highest <= found.bytes:
        return []
    problem = f"does not fit: {_gb(highest)} GB of {_gb(found.bytes)}"
    found_advice = advice.advise(cfg, shape, found.count, found.bytes, cpu=found.cpu, tested=sizes.test)
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
    from nemo_edo.generation.servers import check_servers, placed

    gpus = len(machine.gpus())
    trainers = 1 if gpus and cfg.algorithm != NONE else 0  # at least
    try:
        check_servers(placed(cfg, trainers), gpus)
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
        prompt=max(1, min(workload.ASSUMED_PROMPT, cfg.model.seq_length - longest)),
        response=longest // 2,
        longest=longest,
        epochs=arm.epochs,
        reference=arm.beta > 0,
        recomputation=cfg.parallelism.recompute_granularity == "full",
        fp8=cfg.precision.fp8 is not None,
        overlapped=cfg.generation.one_step_off,
    )
    times = estimate(plan)
    parts = {"generation": times.generation, "log-probabilities": times.logprobs, "training": times.training}
    shown = ", ".join(f"{part} {seconds:,.0f} s" for part, seconds in {**parts, "refit": times.refit}.items())
    return [
        f"time         an iteration of {name} on H100s: about {times.total:,.0f} s ({shown})",
        f"             for {problems:,} problems, responses of {plan.response:,} tokens on average and {longest:,} at "
        "most, generated by servers (docs/models.md)",
    ]


def _stop_tokens(cfg: RunConfig) -> Findings:
    """What ends a response, where the model's folder is at hand."""
    folder = Path(cfg.model.path or "")
    if cfg.model.path is None or not (folder / "tokenizer_config.json").is_file():
        return Findings()
    from nemo_edo.data.stop_tokens import read_stop_tokens
    from nemo_edo.data.tokenizer import load_tokenizer

    try:
        [ends, *disagreement] = read_stop_tokens(folder, load_tokenizer(folder), cfg.sampling.stop_token_ids).lines()
    except UserError as error:
        return Findings(problems=[str(error)])
    return Findings([f"end tokens   {ends}", *(f"             {line}" for line in disagreement)])


# --- disk -----------------------------------------------------------------------------------------------------------


def _disk(cfg: RunConfig, shape: ModelShape, problems: float, here: bool) -> Findings:
    rollouts, checkpoints = _rollout_bytes(cfg, problems), _checkpoint_bytes(cfg, shape)
    of_rollouts = "rollouts (no data.train here)" if rollouts is None else f"{_gb(rollouts)} GB of rollouts"
    line = f"disk         {of_rollouts}, {_gb(checkpoints)} GB of checkpoints at most"
    needed, free = checkpoints + (rollouts or 0), free_bytes(cfg.output_dir)
    if not here or free >= needed:
        return Findings([f"{line}; {_gb(free)} GB are free here in {cfg.output_dir}"])
    try:
        check_folder(Path(cfg.output_dir))
    except UserError as error:
        return Findings([line], [str(error)])
    problem = f"{cfg.output_dir} has {_gb(free)} GB free of {_gb(needed)}: set output_dir to another file system"
    return Findings([line], [problem])


def _rollout_bytes(cfg: RunConfig, problems: float) -> int | None:
    """Upper bound of a run's rollouts on so many training problems; None where their number is not known."""
    loops = [training for training in workload.trainings(cfg).values() if isinstance(training, LoopConfig)]
    if loops and math.isinf(problems):
        return None
    longest = cfg.model.seq_length - cfg.sampling.max_new_tokens
    total = 0
    for arm in loops:
        sampled = min(arm.problems_per_iteration or problems, problems) * cfg.sampling.samples_per_prompt
        total += arm.iterations * estimate_bytes(sampled, longest, cfg.sampling.max_new_tokens)
    return total


def _checkpoint_bytes(cfg: RunConfig, shape: ModelShape) -> int:
    """The start, each arm's last and best policies, and the checkpoints with optimizer state of the arm in training."""
    unsplit = replace(cfg, parallelism=ParallelismConfig())
    load = next(iter(workload.workloads(unsplit, shape, 1).values()))
    adapters = adapter_parameters(load)
    trained = adapters if cfg.lora.rank else shape.parameters
    weights = load.bytes_per_number * (shape.parameters + adapters)
    copies = 3 if cfg.precision.dtype == "bf16" else 2
    arms = sum(isinstance(training, LoopConfig) for training in workload.trainings(cfg).values())
    if not load.trains:
        return 0
    kept = 1 + arms * (1 + (cfg.checkpoint.best_count if cfg.checkpoint.best else 0))
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

    config_name None: about the machine only. count, memory: GPUs (of all nodes together) and bytes of each, for
    hypothetical GPUs. Raises ConfigError for a config that does not compose.
    """
    composed = None if config_name is None else compose_incomplete(config_name, overrides, config_path)
    findings, gpus = of_machine()
    if composed is not None:
        cfg, missing = composed
        more = of_config(cfg, missing, devices(gpus, count, memory))
        findings = Findings([*findings.lines, "", *more.lines], [*findings.problems, *more.problems])
    verdict = [f"PROBLEM      {problem}" for problem in findings.problems] or ["ok"]
    return "\n".join([*findings.lines, *verdict]), not findings.problems
