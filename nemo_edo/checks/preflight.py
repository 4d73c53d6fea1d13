"""The first checks of ``train``, ``collect``, ``evaluate`` and ``search``: they take a part of a second, before torch
and Megatron are imported and a folder is made. ``parallelism=auto`` is fitted to the number of processes here."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.checks import machine, memory
from nemo_edo.checks.installed import what_trainer_lacks
from nemo_edo.config import NONE, GRPOConfig, RunConfig
from nemo_edo.config.compose import NOT_GIVEN, arm_configs
from nemo_edo.config.generation import AUTO
from nemo_edo.config.model_shape import ModelShape, check_expected
from nemo_edo.data.model_folder import check_context, check_files, find_model, is_hub_name
from nemo_edo.data.problems import SPLITS, load_source
from nemo_edo.errors import UserError
from nemo_edo.megatron.splits import check_world
from nemo_edo.rewards.scorers import check_functions
from nemo_edo.run.tracking import check_names
from nemo_edo.utils.files import check_folder
from nemo_edo.utils.memory import total_bytes

if TYPE_CHECKING:
    from nemo_edo.run.inputs import Data

FEWEST_ROWS = 16
"""Responses decoded at a time that parallelism=auto leaves room for, where generation.max_batch_size is auto."""


def preflight(cfg: RunConfig) -> RunConfig:
    """The config with the parallelism of this process's world (torchrun's, or one process). Raises UserError for a
    number of processes that the config's splits do not divide, for a key that NeMo's exp_manager does not have, for
    files of problems or of the model that are missing or damaged, for a function of the user's that cannot be called,
    and where the run's folder cannot be made."""
    world, is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    alone = cfg if cfg.parallelism.tensor_model_parallel_size is not None else _shared_by(cfg, 1)
    if is_main:
        check_folder(Path(cfg.output_dir) / cfg.name)
    check_world(alone.parallelism, world)
    check_data_paths(cfg)
    shape = _check_model(cfg)
    if cfg.data.source is not None:  # importing a user's module takes the time that it takes
        load_source(cfg.data.source, cfg.data.source_args)
    check_settings(cfg, functions=is_main)
    if world == 1 or shape is None:
        return alone
    # A process has a GPU, or its share of the host's memory.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    gpus = machine.gpus()
    each = min(gpu.bytes for gpu in gpus) if gpus else total_bytes() // local
    return with_fitted_parallelism(cfg, shape, world, local, each, cpu=not gpus, must_fit=bool(gpus))


def check_job(cfg: RunConfig) -> None:
    """Checks a Slurm job's config as the run will, on the machine that submits it. Files whose topmost folder is not
    here, such as /scratch, may be on the nodes. Raises UserError."""
    check_settings(cfg)
    cfg = require_mounted(cfg)
    check_data_paths(cfg, elsewhere=True)
    if cfg.model.path is not None and not is_hub_name(cfg.model.path) and not _is_elsewhere(cfg.model.path):
        _check_model(cfg)
    if what_trainer_lacks() is None:  # of a container's packages, the machine may have none
        checked_problems(cfg)


def checked_problems(cfg: RunConfig) -> Data | None:
    """The problems, checked as a run does; None where they or the model are not on this machine."""
    data = [] if cfg.data.source is not None else [cfg.data.train or cfg.data.test, cfg.data.test]
    if not all(path is not None and Path(path).exists() for path in [cfg.model.path, *data]):
        return None
    from nemo_edo.run.inputs import load_checked_data

    return load_checked_data(cfg, scores=cfg.rewards.verifier != "judge")  # a judge may be started with the run


def _is_elsewhere(path: str) -> bool:
    return not Path(*Path(path).absolute().parts[:2]).exists()


def check_data_paths(cfg: RunConfig, *, elsewhere: bool = False) -> None:
    """Raises UserError for files of problems that are named and not there; elsewhere: on this machine or another."""
    for name in ("train", "test", *(["warmup"] if cfg.sft.steps else [])):
        path = getattr(cfg.data, name)
        if path not in (None, NOT_GIVEN) and not Path(path).exists() and not (elsewhere and _is_elsewhere(path)):
            raise UserError(f"data.{name} is {path!r}: there is no such file or folder; expected a file of problems")


def check_settings(cfg: RunConfig, *, functions: bool = True) -> None:
    """Raises UserError for settings of NeMo's exp_manager that it does not have, and for functions of the user's that
    cannot be called. functions: whether custom rewards are tried, which takes a process."""
    check_names(cfg.exp_manager)
    if functions:
        check_functions(cfg.rewards)
    for arm, settings in arm_configs(cfg).items():
        if isinstance(settings, GRPOConfig) and settings.advantage is not None:
            from nemo_edo.algorithms.grpo import OwnAdvantages  # imports torch

            own = "advantage" in cfg.arms.get(arm, {})
            OwnAdvantages(settings.advantage, f"arms.{arm}.advantage" if own else "grpo.advantage")


def _check_model(cfg: RunConfig) -> ModelShape | None:
    """The model's sizes; None where they are not known."""
    if cfg.model.path is None:
        return memory.model_shape(cfg)
    folder = find_model(cfg.model.path)
    served_elsewhere = cfg.algorithm == NONE and cfg.generation.is_served and bool(cfg.generation.servers.urls)
    fields = check_files(folder, weights=not served_elsewhere)
    check_expected(cfg.model.architecture, fields, str(folder / "config.json"))
    if cfg.model.seq_length is not None:
        check_context(folder, fields, cfg.model.seq_length, given=True)
    try:
        return ModelShape.from_hf(fields, str(folder / "config.json"))
    except UserError:  # sizes by other names: nothing is estimated, and whether it can be trained is checked later
        return None


# --- parallelism=auto -----------------------------------------------------------------------------------------------


def with_fitted_parallelism(
    cfg: RunConfig, shape: ModelShape, world: int, local: int, each: int, *, cpu: bool = False, must_fit: bool = False
) -> RunConfig:
    """The config with a tensor-parallel size in place of null: the smallest that divides the processes and the model
    and with which a process has enough memory by the doctor's estimate, with the optimizer's state split over the
    data-parallel ranks where that is needed; where none has, the largest possible one. local: processes of a node,
    across which no layer is split. each: bytes for one process. Raises UserError where no size is possible and, with
    must_fit, where a process has too little memory with all of them."""
    if cfg.parallelism.tensor_model_parallel_size is not None:
        return cfg
    sizes = [
        _shared_by(cfg, size, shards=shards)
        for size in range(1, min(world, local) + 1)
        if world % size == 0 and local % size == 0
        for shards in ((False, True) if size < world else (False,))
    ]
    possible = [one for one in sizes if memory.is_possible(one, shape, world)]
    if not possible:
        memory.check_possible(sizes[0], shape, world)

    def needs(one: RunConfig) -> int:
        ranks, known = world // one.parallelism.model_ranks, {s: memory.problems(one, s) for s in ("train", "test")}
        if one.generation.max_batch_size == AUTO:  # as many as fit, of which a split has to have room for a few
            one = replace(one, generation=replace(one.generation, max_batch_size=FEWEST_ROWS))
        one = memory.for_estimate(one, ranks, **known)
        return memory.fullest(one, shape, world, cpu=cpu, tested=known["test"]).total

    chosen = next((one for one in possible if needs(one) <= each), possible[-1])
    if must_fit and needs(chosen) > each:
        size = chosen.parallelism.tensor_model_parallel_size
        raise UserError(
            f"parallelism=auto: by estimate a GPU needs {needs(chosen) / 1e9:.0f} GB of {each / 1e9:.0f} with "
            f"tensor_model_parallel_size={size}, and more with less: nemo-edo doctor says what to change; naming a "
            "size (parallelism.tensor_model_parallel_size) trains without this estimate"
        )
    return chosen


def _shared_by(cfg: RunConfig, processes: int, *, shards: bool = False) -> RunConfig:
    split = {"tensor_model_parallel_size": processes, "sequence_parallel": processes > 1}
    split["use_distributed_optimizer"] = shards or cfg.parallelism.use_distributed_optimizer
    return replace(cfg, parallelism=replace(cfg.parallelism, **split))


def require_mounted(cfg: RunConfig) -> RunConfig:
    """The config with this machine's paths of the model and the problems in place of a container's. Raises UserError
    for a path that a Slurm job is to read, and that no mount of its container has."""
    container = cfg.cluster.container
    if container.kind == "none":
        return cfg
    mounts = {mount.split(":")[1]: Path(mount.split(":")[0]) for mount in container.mounts}
    inside = [*mounts, cfg.output_dir]
    inside += [cfg.cluster.shared_folder] if cfg.cluster.shared_folder else []
    if container.kind == "apptainer":  # mounts these by itself; pyxis is told not to mount the home
        inside += [str(Path.home()), tempfile.gettempdir(), str(Path.cwd())]
    folders = [Path(folder).absolute() for folder in inside]
    hub = cfg.model.path and not Path(cfg.model.path).is_absolute() and not Path(cfg.model.path).exists()
    given = {
        "model.path": None if hub else cfg.model.path,
        "data.train": cfg.data.train,
        "data.test": cfg.data.test,
        "data.warmup": cfg.data.warmup if cfg.sft.steps else None,
        "train.rollouts": cfg.train.rollouts,
        "search.reward_model": cfg.search.reward_model,
    }
    for setting, path in ((name, Path(path)) for name, path in given.items() if path not in (None, NOT_GIVEN)):
        if not path.is_absolute() and container.kind == "pyxis":
            raise UserError(f"{setting} is {path}: a container has another working directory; give an absolute path")
        if not any(path.absolute().is_relative_to(folder) for folder in folders):
            raise UserError(
                f"{setting} is {path}, which the job's container lacks (it has {', '.join(map(str, folders))}): add "
                f"cluster.container.mounts=[{path.parent}:{path.parent}], or name a path in one of these"
            )

    def here(path: str | None) -> str | None:
        found = [inner for inner in mounts if path is not None and Path(path).is_relative_to(inner)]
        innermost = max(found, key=len, default=None)
        return path if innermost is None else str(mounts[innermost] / Path(path).relative_to(innermost))

    data = {split: here(getattr(cfg.data, split)) for split in SPLITS}
    return replace(cfg, model=replace(cfg.model, path=here(cfg.model.path)), data=replace(cfg.data, **data))
