"""``nemo-edo doctor``: what a machine has and, of a config, whether it can be run there: the model and its split, its
memory on each GPU, the time of an iteration, servers, the end of a response, and the disk. Starts no process but the
one that computes with the config's model."""

from __future__ import annotations

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_edo.checks import advice, machine, memory
from nemo_edo.checks.installed import WITHOUT_DEPENDENCIES, about, installed
from nemo_edo.checks.iteration_time import GPU_BYTES, Iteration, generation_seconds, iteration_times
from nemo_edo.checks.machine import DOCTOR, FAIL, Finding, Gpu, failed, passed
from nemo_edo.checks.preflight import (
    check_data_paths,
    check_settings,
    checked_problems,
    require_mounted,
    with_fitted_parallelism,
)
from nemo_edo.checks.selftest import CHECKS
from nemo_edo.config import NONE, GRPOConfig, LoopConfig, ParallelismConfig, PrecisionConfig, RunConfig
from nemo_edo.config.compose import NOT_GIVEN, arm_configs, compose_incomplete
from nemo_edo.config.generation import AUTO
from nemo_edo.data.model_folder import find_model, weight_files
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import estimate_bytes, free_bytes
from nemo_edo.utils.files import check_folder
from nemo_edo.utils.memory import total_bytes

DEFAULT_GPU = 80 * 10**9  # bytes of a hypothetical GPU: an H100's
SHOWN_STAGES = 8
COMPARISON_S = 1800.0  # how long the comparison with transformers may take: it reads the whole model
ASSUMED_PROBLEMS = 1000  # of an iteration over the whole training set, in estimates of time


def diagnose(
    config_name: str | None, overrides: list[str], config_path: str | None, *, count: int | None, memory: int | None
) -> tuple[str, bool]:
    """The text for a terminal, and whether nothing was found that keeps the run from starting. config_name None: about
    the machine only. count, memory: GPUs (of all nodes together) and bytes of each, for hypothetical GPUs. Raises
    ConfigError for a config that does not compose."""
    composed = None if config_name is None else compose_incomplete(config_name, overrides, config_path)
    here = machine.Machine.alone()
    findings = [(check.name, check.run(here)) for check in CHECKS if DOCTOR in check.runs_in]
    if composed is not None:
        findings += of_config(*composed, devices(here.gpus, count, memory))
    shown = [*about().items(), *((name, finding.detail) for name, finding in findings if finding.status != FAIL)]
    faults = [("PROBLEM", finding.detail) for _, finding in findings if finding.status == FAIL]
    texts = [f"{name:12} {text}".replace("\n", "\n" + " " * 13) for name, text in [*shown, *faults] if text]
    lines = "\n".join(texts if faults else [*texts, "ok"]).splitlines()
    return "\n".join(line.rstrip() for line in lines), not faults


def of_config(cfg: RunConfig, missing: list[str], found: Devices) -> list[tuple[str, Finding]]:
    """Findings on a config, each with its name; one fault where it cannot be a ``Case``."""
    findings = [("to be given", passed(", ".join(missing)))]
    try:
        subject = Case(cfg, missing, found)
    except UserError as error:
        return [*findings, ("config", failed(str(error)))]
    findings += [(name, passed(text)) for name, text in sizes(subject).items()]
    for name, check in CONFIG_CHECKS.items():
        try:
            findings.append((name, passed(check(subject))))
        except UserError as error:
            findings.append((name, failed(str(error))))
    return findings


@dataclass(frozen=True)
class Devices:
    here: bool  # whether they are this machine's
    count: int
    bytes: int  # memory of each
    cpu: bool = False  # whether it is the CPU, as one device


def devices(gpus: list[Gpu], count: int | None, memory: int | None) -> Devices:
    """The machine's, or hypothetical ones instead; without either, the CPU as one device."""
    here = count is None and memory is None
    if here and not gpus:
        return Devices(here, 1, total_bytes(), cpu=True)
    smallest = min((gpu.bytes for gpu in gpus), default=DEFAULT_GPU)
    return Devices(here, count or len(gpus) or 1, memory or smallest)


class Case:
    """A config on devices, and what the checks of it know."""

    def __init__(self, cfg: RunConfig, missing: list[str], devices: Devices) -> None:
        """missing: settings that a run would need. Raises UserError for a model that is not known or does not go with
        the config, splits that are not possible, and problems that could not be used."""
        cfg = require_mounted(cfg)
        if cfg.model.path not in (None, NOT_GIVEN):
            with contextlib.suppress(UserError):  # the folder of a hub's model that is in the cache
                folder = find_model(cfg.model.path, download=False)
                cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
            # Where the devices are others than this machine's, so may be the folder's weights.
            folder, served = Path(cfg.model.path), cfg.algorithm == NONE and cfg.generation.is_served
            at_hand = (folder / "config.json").is_file() and (devices.here or weight_files(folder))
            if at_hand and (served or installed(WITHOUT_DEPENDENCIES)):
                from nemo_edo.run import inputs

                if not served:
                    from nemo_edo.megatron import platform

                    platform.enter()
                inputs.check_model(cfg)
        self.devices, self.shape = devices, memory.model_shape(cfg)
        node = min(devices.count, advice.GPUS_OF_A_NODE)
        given = with_fitted_parallelism(cfg, self.shape, devices.count, node, devices.bytes, cpu=devices.cpu)
        memory.check_possible(given, self.shape, devices.count)
        check_settings(cfg)
        if devices.here:
            check_data_paths(cfg)
        self.warnings: list[str] = []  # of the prompts and the model
        self.longest: int | None = None  # tokens of the longest sequence, where problems and tokenizer are at hand
        self.train, test = memory.problems(given, "train"), memory.problems(given, "test")  # infinite: not known
        if not any(key.startswith("data.") for key in missing) and (found := checked_problems(given)) is not None:
            self.longest, self.warnings = found.seq_length, found.warnings
            self.train, test = len(found.train), len(found.test)
        if cfg.has_arms and math.isfinite(self.train):
            from nemo_edo.algorithms.plan import require_several_steps  # imports torch

            require_several_steps(arm_configs(cfg), int(self.train), cfg.sampling.samples_per_prompt)
        self.known = {"cpu": devices.cpu, "tested": test}  # facts of the device and the problems, for ``workloads``
        ranks = devices.count // given.parallelism.model_ranks
        cfg = memory.for_estimate(given, ranks, longest=self.longest, train=self.train, test=test)
        if given.generation.max_batch_size == AUTO:
            rows = memory.counted_rows(cfg)
            cfg = memory.with_rows_that_fit(cfg, self.shape, devices.count, devices.bytes, rows=rows, **self.known)
        self.given, self.cfg = given, cfg  # cfg: with numbers in place of what the other leaves open
        loads = memory.workloads(cfg, self.shape, devices.count, **self.known)
        # The training whose fullest GPU needs most, and the memory of a GPU of each of its pipeline stages.
        self.training, self.stages = memory.largest(loads)
        self.load = loads[self.training]
        self.only_served = cfg.generation.is_served and not self.load.trains


# --- the model and its memory -----------------------------------------------------------------------------------------


def sizes(case: Case) -> dict[str, str]:
    """The model and its split, lengths, rows in generation, and memory, each by its name."""
    splits, number, longest = case.given.parallelism, case.shape.parameters, case.cfg.model.seq_length
    ways = {
        "tensor": splits.tensor_model_parallel_size,
        "pipeline": splits.pipeline_model_parallel_size,
        "context": splits.context_parallel_size,
        "data": case.load.data_parallel,
    }
    split = " x ".join(f"{name} {size}" for name, size in ways.items() if size > 1) or "one process"
    if splits.expert_model_parallel_size > 1:
        split += f", experts over {splits.expert_model_parallel_size}"
    count = f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"
    why = "the longest prompt and sampling.max_new_tokens"
    if case.given.model.seq_length is not None:
        why = "model.seq_length"
    elif case.longest is None:
        why = f"prompts of {memory.ASSUMED_PROMPT} tokens are assumed: the model or the problems are not here"
    rows = f"{memory.counted_rows(case.cfg):,} rows at a time are counted"
    how = f"generation.max_batch_size={case.given.generation.max_batch_size}"
    return {
        "model": f"{count} parameters, {case.cfg.precision.dtype}, {split}",
        "sequences": f"of {longest:,} tokens at most ({why})",
        "generation": "by servers" if case.cfg.generation.is_served else f"{rows} ({how})",
        "fullest in": _memory_table(case),
        "warning": "\n".join(text.removeprefix("warning: ") for text in case.warnings),
    }


def _memory_table(case: Case) -> str:
    """GB (10^9 bytes) of a GPU of each pipeline stage; of many stages, the first and the last ones."""
    if case.only_served:
        return "nothing is trained: only servers load it"
    load, stages = case.load, case.stages
    half, places = SHOWN_STAGES // 2, list(range(len(stages)))
    shown = places if len(places) <= SHOWN_STAGES else [*places[:half], *places[-half:]]
    rows = [dict(stages[place].items()) for place in shown]
    table = {"GB": [f"stage {place}" if len(stages) > 1 else "each" for place in shown]}
    table |= {name: [_gb(row[name]) for row in rows] for name in rows[0]}
    table |= {"at its highest": [_gb(stages[place].total) for place in shown], "there are": [_gb(case.devices.bytes)]}
    micro_batches = f", with micro-batches of {load.tokens:,} tokens at most" if load.trains else ""
    lines = [f"{case.training}{micro_batches}", ""]
    lines += [f"{name:16}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in table.items()]
    return "\n".join([*lines, ""])


def fits(case: Case) -> str:
    highest, there = max(stage.total for stage in case.stages), case.devices.bytes
    if highest <= there or case.only_served:
        return ""
    changes, needed = advice.advise(case.cfg, case.shape, case.devices.count, there, **case.known)
    lines = [f"does not fit: {_gb(highest)} GB of {_gb(there)}. What to change:"]
    for cost, settings in changes.items():
        overrides = " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
        lines.append(f"  {overrides} (cost: {cost})")
    enough = "" if needed <= there else ": more or larger GPUs are needed"
    raise UserError("\n".join([*lines, f"with all of it: {_gb(needed)} GB{enough}"]))


def host_memory(case: Case) -> str:
    """The host memory of a node's processes, with the copies of a checkpoint that each rank writes or reads: its
    weights and its share of the optimizer's state."""
    if case.devices.cpu or case.only_served:
        return ""
    stage = max(case.stages, key=lambda stage: stage.host + stage.checkpoint)
    processes, there = min(case.devices.count, advice.GPUS_OF_A_NODE), total_bytes()
    need = processes * (stage.host + stage.checkpoint)
    said = (
        f"{_gb(stage.host)} GB for each process, and {_gb(stage.checkpoint)} while it writes or reads a checkpoint: "
        f"{_gb(need)} GB for the {processes} of a node"
    )
    if case.devices.here and need > there:
        raise UserError(f"host memory: {said}; there are {_gb(there)}: set parallelism=dp_sharded, or use more nodes")
    return said


def as_transformers(case: Case) -> str:
    """The comparison that a run makes before it trains, in another process."""
    model = case.cfg.model
    here = case.devices.here and model.path is not None and Path(model.path, "config.json").is_file()
    if not here or case.only_served or not model.verify:
        return ""
    from nemo_edo.run.comparison import in_words

    with tempfile.TemporaryDirectory() as scratch:
        alone = replace(machine.Machine.alone(), scratch=Path(scratch), check="as transformers", forks=False)
        try:
            return in_words(alone.run(compare_alone, case.cfg, Path(scratch), limit_s=COMPARISON_S))
        except machine.CheckError as error:
            raise UserError(str(error).partition("; its output is in")[0]) from error


def compare_alone(cfg: RunConfig, scratch: Path) -> dict[str, Any]:
    """The comparison of a config's model in this process, which no split needs."""
    from nemo_edo.run.build import Builder
    from nemo_edo.run.comparison import LENGTH, FolderComparison
    from nemo_edo.run_folder import RunFolder

    cfg = replace(cfg, parallelism=ParallelismConfig())
    folder, length = find_model(str(cfg.model.path)), cfg.model.seq_length or LENGTH
    comparison = FolderComparison(folder, cfg.precision, cfg.parallelism, length, scratch)
    try:
        return comparison.finish(Builder(cfg, RunFolder(scratch)).model(cfg.sft, folder=comparison.folder))
    finally:
        comparison.close()


# --- time -------------------------------------------------------------------------------------------------------------


def time(case: Case) -> str:
    """An iteration of the first arm that explores by GRPO, on H100s."""
    cfg, gpus = case.cfg, case.devices.count
    arms = {name: arm for name, arm in memory.trainings(cfg).items() if isinstance(arm, GRPOConfig)}
    if case.devices.cpu or not arms:
        return ""
    name, arm = next(iter(arms.items()))
    servers, splits, served = cfg.generation.servers, cfg.parallelism, cfg.generation.is_served
    size = servers.tensor_parallel_size if served else splits.tensor_model_parallel_size
    started = len(servers.urls) or servers.replicas * max(1, cfg.cluster.server_nodes)
    longest = cfg.sampling.max_new_tokens
    problems = min(arm.problems_per_iteration or case.train, case.train)
    problems = ASSUMED_PROBLEMS if math.isinf(problems) else problems
    iteration = Iteration(
        shape=case.shape,
        gpus=gpus,
        server_gpus=started * size if served else gpus,
        server_tensor_parallel=size,
        samples=problems * cfg.sampling.samples_per_prompt,
        prompt=max(1, min(memory.ASSUMED_PROMPT, cfg.model.seq_length - longest)),
        response=max(1, longest // 2),
        longest=longest,
        epochs=arm.epochs,
        reference=arm.beta > 0,
        recomputation=splits.recompute_granularity == "full",
        fp8=cfg.precision.fp8 is not None,
        stages=1 if served else splits.pipeline_model_parallel_size,
        rows=servers.max_in_flight if served else memory.counted_rows(cfg),
        in_process=not served,
        overlapped=cfg.generation.one_step_off,
        gpu_bytes=case.devices.bytes or GPU_BYTES,
    )
    times = iteration_times(iteration)
    if math.isinf(times.generation):
        sizes = (size * 2**power for power in range(6))
        alone = (replace(iteration, server_gpus=larger, server_tensor_parallel=larger) for larger in sizes)
        larger = next((one.server_gpus for one in alone if math.isfinite(generation_seconds(one))), 64)
        raise UserError(
            f"{size * iteration.stages} GPUs of {iteration.gpu_bytes / 1e9:.0f} GB hold no weights with a response of "
            f"{iteration.response:,} tokens: "
            + (f"generation.servers.tensor_parallel_size={larger}" if served else "generation=vllm, on servers")
        )
    parts = {"log-probabilities" if part == "logprobs" else part: seconds for part, seconds in times._asdict().items()}
    shown = ", ".join(f"{part} {parts[part]:,.0f} s" for part in list(parts)[:4])
    return (
        f"an iteration of {name} on H100s: about {times.total:,.0f} s ({shown}), and its {arm.iterations} iterations "
        f"{arm.iterations * times.total / 3600:,.1f} h without evaluations\n"
        f"for {iteration.samples:,} responses of {iteration.response:,} tokens on average and {iteration.longest:,} at "
        f"most, generated {f'by {started} servers' if served else 'in process'} (docs/models.md)\n"
    )


# --- servers, the end of a response, disk -----------------------------------------------------------------------------


def servers(case: Case) -> str:
    """Whether this machine can start the servers that responses come from."""
    cfg = case.cfg
    if cfg.generation.is_served and case.devices.here:
        from nemo_edo.generation.servers import check_servers, placed

        gpus = len(machine.gpus())
        trainers = 1 if gpus and cfg.algorithm != NONE else 0  # at least
        check_servers(placed(cfg.generation, trainers), gpus)
    return ""


def end_tokens(case: Case) -> str:
    """The tokens that end a response, if the model's folder is at hand."""
    path = case.cfg.model.path
    if path is None or not (Path(path) / "tokenizer_config.json").is_file():
        return ""
    from nemo_edo.data.tokenizer import load_tokenizer, read_stop_tokens

    found = read_stop_tokens(Path(path), load_tokenizer(Path(path)), case.cfg.sampling.stop_token_ids)
    return "\n".join(found.lines())


def disk(case: Case) -> str:
    """Rollouts at most; the start, each arm's last and best policies, and checkpoints of the arm in training."""
    cfg = case.cfg
    arms = [training for training in memory.trainings(cfg).values() if isinstance(training, LoopConfig)]
    response, unknown, rollouts = cfg.sampling.max_new_tokens, bool(arms) and math.isinf(case.train), 0
    for arm in [] if unknown else arms:
        sampled = min(arm.problems_per_iteration or case.train, case.train) * cfg.sampling.samples_per_prompt
        rollouts += arm.iterations * estimate_bytes(sampled, cfg.model.seq_length - response, response)
    checkpoints = 0
    if case.load.trains:
        precision = PrecisionConfig(cfg.precision.dtype)  # a file has no second copy in FP8
        whole = replace(case.load, parallelism=ParallelismConfig(), data_parallel=1, precision=precision)
        policies = 1 + len(arms) * (1 + (cfg.checkpoint.best_count if cfg.checkpoint.best else 0))
        one = memory.stage_memory(whole, 0)
        checkpoints = policies * one.weights + (cfg.checkpoint.keep + 1) * (one.weights + one.optimizer)
    of_rollouts = "rollouts (no data.train here)" if unknown else f"{_gb(rollouts)} GB of rollouts"
    need = f"{of_rollouts}, {_gb(checkpoints)} GB of checkpoints at most"
    needed, free = checkpoints + rollouts, free_bytes(cfg.output_dir)
    if not case.devices.here or free >= needed:
        return f"{need}; {_gb(free)} GB are free here in {cfg.output_dir}"
    check_folder(Path(cfg.output_dir))
    has = f"{cfg.output_dir} has {_gb(free)} GB free of {_gb(needed)}"
    raise UserError(f"{need}; {has}: set output_dir to another file system")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


CONFIG_CHECKS = {
    "fits": fits,
    "host memory": host_memory,
    "time": time,
    "servers": servers,
    "numbers": as_transformers,
    "end tokens": end_tokens,
    "disk": disk,
}
"""A check returns what there is to say, and raises UserError for a fault."""
