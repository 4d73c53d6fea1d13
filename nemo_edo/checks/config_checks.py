"""Checks of a config against devices, as the doctor makes them: the model and its split, its memory on each GPU, the
time of an iteration, servers, the end of a response, and the disk. No weights are loaded."""

from __future__ import annotations

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_edo.checks import advice, machine, workload
from nemo_edo.checks.estimates import Memory, Workload, stage_memory
from nemo_edo.checks.findings import Finding, failed, impossible, passed
from nemo_edo.checks.installed import WITHOUT_DEPENDENCIES, installed
from nemo_edo.checks.iteration_time import GPU_BYTES, Iteration, generation_seconds, iteration_times, one_server
from nemo_edo.checks.mounts import require_mounted
from nemo_edo.checks.preflight import check_data_paths, check_settings, with_fitted_parallelism
from nemo_edo.config import NONE, GRPOConfig, LoopConfig, ParallelismConfig, PrecisionConfig, RunConfig
from nemo_edo.config.compose import NOT_GIVEN
from nemo_edo.config.generation import AUTO
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.data.model_folder import find_model, weight_files
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import estimate_bytes, free_bytes
from nemo_edo.utils.files import check_folder

SHOWN_STAGES = 8
COMPARISON_S = 1800.0
"""How long the comparison with transformers may take: it reads the whole model."""
ASSUMED_PROBLEMS = 1000
"""Problems of an iteration over the whole training set, in estimates of time."""


@dataclass(frozen=True)
class Devices:
    here: bool
    """Whether they are this machine's."""
    count: int
    bytes: int
    """Memory of each."""
    cpu: bool = False
    """Whether it is the CPU, as one device."""


@dataclass(frozen=True)
class Case:
    """A config on devices."""

    given: RunConfig
    missing: list[str]
    """Settings that a run would need."""
    devices: Devices
    shape: ModelShape
    longest: int | None
    """Tokens of the longest sequence; None where the problems or the tokenizer are not at hand."""
    train: float
    """The number of training problems; infinite where it is not known."""
    known: dict[str, object]
    """Facts of the device and the problems, as ``workloads`` takes them."""
    cfg: RunConfig
    """``given`` with numbers in place of what it leaves open."""
    loads: dict[str, Workload]

    @property
    def fullest(self) -> tuple[str, list[Memory]]:
        return workload.largest(self.loads)

    @property
    def load(self) -> Workload:
        """The workload that needs most memory."""
        return self.loads[self.fullest[0]]


def case(cfg: RunConfig, missing: list[str], devices: Devices) -> Case:
    """Raises UserError for a model that is not known or does not go with the config, splits that are not possible, and
    problems that could not be used."""
    if cfg.model.path not in (None, NOT_GIVEN):
        with contextlib.suppress(UserError):  # the folder of a hub's model that is in the cache
            folder = find_model(cfg.model.path, download=False)
            cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
    _check_folder(cfg, devices)
    shape = workload.model_shape(cfg)
    node = min(devices.count, advice.GPUS_OF_A_NODE)
    given = with_fitted_parallelism(cfg, shape, devices.count, node, devices.bytes, cpu=devices.cpu)
    workload.check_possible(given, shape, devices.count)
    check_settings(cfg)
    require_mounted(cfg)
    if devices.here:
        check_data_paths(cfg)
    # A judge may be started with the run.
    longest, train, test = _sizes(given, missing, scores=cfg.rewards.verifier != "judge")
    if cfg.has_arms and math.isfinite(train):
        from nemo_edo.algorithms.plan import require_several_steps  # imports torch

        require_several_steps(workload.arm_configs(cfg), int(train), cfg.sampling.samples_per_prompt)
    ranks, known = devices.count // given.parallelism.model_ranks, {"cpu": devices.cpu, "tested": test}
    cfg = workload.for_estimate(given, ranks, longest=longest, train=train, test=test)
    if given.generation.max_batch_size == AUTO:
        rows = workload.counted_rows(cfg)
        cfg = workload.with_rows_that_fit(cfg, shape, devices.count, devices.bytes, rows=rows, **known)
    loads = workload.workloads(cfg, shape, devices.count, **known)
    return Case(given, missing, devices, shape, longest, train, known, cfg, loads)


def _check_folder(cfg: RunConfig, devices: Devices) -> None:
    """Raises UserError for a model folder that a run would refuse. Where the devices are others than this machine's, so
    may be the folder's weights."""
    folder = Path(cfg.model.path or "")
    if cfg.model.path is None or not (folder / "config.json").is_file():
        return
    if not devices.here and not weight_files(folder):
        return
    from nemo_edo.run import inputs

    if cfg.algorithm == NONE and cfg.generation.is_served:
        inputs.check_served_model(cfg)
    elif installed(WITHOUT_DEPENDENCIES):
        from nemo_edo.megatron import platform

        platform.enter()
        inputs.check_model(cfg)


def _sizes(cfg: RunConfig, missing: list[str], *, scores: bool) -> tuple[int | None, float, float]:
    """``Case.longest``, and the numbers of training and test problems."""
    data = cfg.data
    files = [cfg.model.path, *([] if data.source is not None else [data.train or data.test, data.test])]
    given = not any(key.startswith("data.") for key in missing)
    if not given or not all(path is not None and Path(path).exists() for path in files):
        return None, workload.problems(cfg, "train"), workload.problems(cfg, "test")
    from nemo_edo.run.inputs import read_sizes

    return read_sizes(cfg, scores=scores)


# --- the model and its memory -----------------------------------------------------------------------------------------


def to_be_given(case: Case) -> Finding:
    return passed(", ".join(case.missing))


def model(case: Case) -> Finding:
    splits, number = case.given.parallelism, case.shape.parameters
    sizes = {
        "tensor": splits.tensor_model_parallel_size,
        "pipeline": splits.pipeline_model_parallel_size,
        "context": splits.context_parallel_size,
        "data": case.load.data_parallel,
    }
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
    if splits.expert_model_parallel_size > 1:
        split += f", experts over {splits.expert_model_parallel_size}"
    count = f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"
    return passed(f"{count} parameters, {case.cfg.precision.dtype}, {split}")


def as_transformers(case: Case) -> Finding:
    """The comparison that a run makes before it trains, in another process."""
    model = case.cfg.model
    served = case.load.trains is False and case.cfg.generation.is_served
    here = case.devices.here and model.path is not None and Path(model.path, "config.json").is_file()
    if not here or served or not model.verify:
        return passed("")
    from nemo_edo.run.comparison import in_words

    with tempfile.TemporaryDirectory() as scratch:
        alone = replace(machine.Machine.alone(), scratch=Path(scratch), check="as transformers", forks=False)
        try:
            return passed(in_words(alone.run(compare_alone, case.cfg, Path(scratch), limit_s=COMPARISON_S)))
        except machine.CheckError as error:
            return failed(str(error).partition("; its output is in")[0])


def compare_alone(cfg: RunConfig, scratch: Path) -> dict[str, Any]:
    """The comparison of a config's model in this process, which no split needs."""
    from nemo_edo.run.build import Builder
    from nemo_edo.run.comparison import Comparison
    from nemo_edo.run.folder import RunFolder

    cfg = replace(cfg, parallelism=ParallelismConfig())
    comparison = Comparison(cfg, find_model(str(cfg.model.path)), scratch)
    try:
        return comparison.finish(Builder(cfg, RunFolder(scratch)).model(cfg.sft, folder=comparison.folder))
    finally:
        comparison.close()


def sequences(case: Case) -> Finding:
    why = "the longest prompt and sampling.max_new_tokens"
    if case.given.model.seq_length is not None:
        why = "model.seq_length"
    elif case.longest is None:
        why = f"prompts of {workload.ASSUMED_PROMPT} tokens are assumed: the model or the problems are not here"
    return passed(f"of {case.cfg.model.seq_length:,} tokens at most ({why})")


def generation(case: Case) -> Finding:
    if case.cfg.generation.is_served:
        return passed("by servers")
    how = f"generation.max_batch_size={case.given.generation.max_batch_size}"
    return passed(f"{workload.counted_rows(case.cfg):,} rows at a time are counted ({how})")


def needs(case: Case) -> Finding:
    """A table of GB (10^9 bytes) for a GPU of each pipeline stage; of many stages, the first and the last ones."""
    load, (training, stages) = case.load, case.fullest
    if not load.trains and case.cfg.generation.is_served:
        return impossible("nothing is trained: only servers load it")
    half, places = SHOWN_STAGES // 2, list(range(len(stages)))
    shown = places if len(places) <= SHOWN_STAGES else [*places[:half], *places[-half:]]
    rows = [dict(stages[place].items()) for place in shown]
    table = {"GB": [f"stage {place}" if len(stages) > 1 else "each" for place in shown]}
    table |= {name: [_gb(row[name]) for row in rows] for name in rows[0]}
    table |= {"at its highest": [_gb(stages[place].total) for place in shown], "there are": [_gb(case.devices.bytes)]}
    micro_batches = f", with micro-batches of {load.tokens:,} tokens at most" if load.trains else ""
    lines = [f"{training}{micro_batches}", ""]
    lines += [f"{name:16}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in table.items()]
    if not case.devices.cpu:
        lines.append(f"and {_gb(stages[0].host)} GB of the host's memory for each process")
    return passed("\n".join([*lines, ""]))


def fits(case: Case) -> Finding:
    highest, there = max(memory.total for memory in case.fullest[1]), case.devices.bytes
    if highest <= there or (not case.load.trains and case.cfg.generation.is_served):
        return passed("")
    changes, needed = advice.advise(case.cfg, case.shape, case.devices.count, there, **case.known)
    lines = ["What to change:"]
    for cost, settings in changes.items():
        overrides = " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
        lines.append(f"  {overrides} (cost: {cost})")
    enough = "" if needed <= there else ": more or larger GPUs are needed"
    lines.append(f"with all of it: {_gb(needed)} GB{enough}")
    return failed(f"does not fit: {_gb(highest)} GB of {_gb(there)}", "\n".join(lines))


# --- time -------------------------------------------------------------------------------------------------------------


def explored_iteration(case: Case) -> tuple[str, Iteration] | None:
    """An iteration of the first arm that explores by GRPO, with the arm's name; None without one."""
    cfg = case.cfg
    arms = {name: arm for name, arm in workload.trainings(cfg).items() if isinstance(arm, GRPOConfig)}
    if not arms:
        return None
    name, arm = next(iter(arms.items()))
    servers, splits, served = cfg.generation.servers, cfg.parallelism, cfg.generation.is_served
    size = servers.tensor_parallel_size if served else splits.tensor_model_parallel_size
    started, longest = _servers(cfg), cfg.sampling.max_new_tokens
    return name, Iteration(
        shape=case.shape,
        gpus=case.devices.count,
        server_gpus=started * size if served else case.devices.count,
        server_tensor_parallel=size,
        samples=(arm.problems_per_iteration or ASSUMED_PROBLEMS) * cfg.sampling.samples_per_prompt,
        prompt=max(1, min(workload.ASSUMED_PROMPT, cfg.model.seq_length - longest)),
        response=longest // 2,
        longest=longest,
        epochs=arm.epochs,
        reference=arm.beta > 0,
        recomputation=splits.recompute_granularity == "full",
        fp8=cfg.precision.fp8 is not None,
        stages=1 if served else splits.pipeline_model_parallel_size,
        rows=servers.max_in_flight if served else workload.counted_rows(cfg),
        in_process=not served,
        overlapped=cfg.generation.one_step_off,
    )


def _servers(cfg: RunConfig) -> int:
    """The number of servers of the whole run."""
    servers = cfg.generation.servers
    return len(servers.urls) or servers.replicas * max(1, cfg.cluster.server_nodes)


def time(case: Case) -> Finding:
    """On H100s."""
    found = None if case.devices.cpu else explored_iteration(case)
    if found is None:
        return passed("")
    name, iteration = found
    times, served, size = iteration_times(iteration), not iteration.in_process, iteration.server_tensor_parallel
    if math.isinf(times.generation):
        larger = size
        while served and larger < 64 and math.isinf(generation_seconds(one_server(iteration, larger))):
            larger *= 2
        return failed(
            f"{size * iteration.stages} GPUs of {GPU_BYTES / 1e9:.0f} GB hold no weights with a response of "
            f"{iteration.response:,} tokens",
            f"generation.servers.tensor_parallel_size={larger}" if served else "generation=vllm, on servers",
        )
    parts = {"log-probabilities" if part == "logprobs" else part: seconds for part, seconds in times._asdict().items()}
    shown = ", ".join(f"{part} {parts[part]:,.0f} s" for part in list(parts)[:4])
    return passed(
        f"an iteration of {name} on H100s: about {times.total:,.0f} s ({shown})\n"
        f"for {iteration.samples:,} responses of {iteration.response:,} tokens on average and {iteration.longest:,} at "
        f"most, generated {f'by {_servers(case.cfg)} servers' if served else 'in process'} (docs/models.md)\n"
    )


# --- servers, the end of a response, disk -----------------------------------------------------------------------------


def servers(case: Case) -> Finding:
    """Whether this machine can start the servers that responses come from."""
    cfg = case.cfg
    if not cfg.generation.is_served or not case.devices.here:
        return passed("")
    from nemo_edo.generation.servers import check_servers, placed

    gpus = len(machine.gpus())
    trainers = 1 if gpus and cfg.algorithm != NONE else 0  # at least
    check_servers(placed(cfg, trainers), gpus)
    return passed("")


def end_tokens(case: Case) -> Finding:
    """The tokens that end a response, if the model's folder is at hand."""
    path = case.cfg.model.path
    if path is None or not (Path(path) / "tokenizer_config.json").is_file():
        return passed("")
    from nemo_edo.data.tokenizer import load_tokenizer, read_stop_tokens

    found = read_stop_tokens(Path(path), load_tokenizer(Path(path)), case.cfg.sampling.stop_token_ids)
    return passed("\n".join(found.lines()))


def disk(case: Case) -> Finding:
    """The run's rollouts at most; the start, each arm's last and best policies, and the checkpoints with optimizer
    state of the arm in training."""
    cfg = case.cfg
    arms = [training for training in workload.trainings(cfg).values() if isinstance(training, LoopConfig)]
    rollouts, unknown = 0, bool(arms) and math.isinf(case.train)
    for arm in [] if unknown else arms:
        longest, response = cfg.model.seq_length, cfg.sampling.max_new_tokens
        sampled = min(arm.problems_per_iteration or case.train, case.train) * cfg.sampling.samples_per_prompt
        rollouts += arm.iterations * estimate_bytes(sampled, longest - response, response)
    checkpoints = 0
    if case.load.trains:
        precision = PrecisionConfig(cfg.precision.dtype)  # a file has no second copy in FP8
        whole = replace(case.load, parallelism=ParallelismConfig(), data_parallel=1, precision=precision)
        policies = 1 + len(arms) * (1 + (cfg.checkpoint.best_count if cfg.checkpoint.best else 0))
        one = stage_memory(whole, 0)
        checkpoints = policies * one.weights + (cfg.checkpoint.keep + 1) * (one.weights + one.optimizer)
    of_rollouts = "rollouts (no data.train here)" if unknown else f"{_gb(rollouts)} GB of rollouts"
    need = f"{of_rollouts}, {_gb(checkpoints)} GB of checkpoints at most"
    needed, free = checkpoints + rollouts, free_bytes(cfg.output_dir)
    if not case.devices.here or free >= needed:
        return passed(f"{need}; {_gb(free)} GB are free here in {cfg.output_dir}")
    check_folder(Path(cfg.output_dir))
    return failed(
        f"{need}; {cfg.output_dir} has {_gb(free)} GB free of {_gb(needed)}", "set output_dir to another file system"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
