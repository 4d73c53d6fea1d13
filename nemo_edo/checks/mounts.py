"""Which paths of a config a job's container has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import NOT_GIVEN
from nemo_edo.errors import UserError


def require_mounted(cfg: RunConfig) -> None:
    """Raises UserError for a path that a Slurm job is to read, and that no mount of its container has."""
    container = cfg.cluster.container
    if container.kind == "none":
        return
    inside = [mount.split(":")[1] for mount in container.mounts] + [cfg.output_dir]
    inside += [cfg.cluster.shared_folder] if cfg.cluster.shared_folder else []
    if container.kind == "apptainer":  # mounts these by itself; pyxis is told not to mount the home
        inside += [str(Path.home()), tempfile.gettempdir(), str(Path.cwd())]
    folders = [Path(folder).absolute() for folder in inside]
    for setting, path in _paths(cfg).items():
        if not path.is_absolute() and container.kind == "pyxis":
            raise UserError(f"{setting} is {path}: a container has another working directory; give an absolute path")
        if not any(path.absolute().is_relative_to(folder) for folder in folders):
            raise UserError(
                f"{setting} is {path}, which the job's container lacks (it has {', '.join(map(str, folders))}): add "
                f"cluster.container.mounts=[{path.parent}:{path.parent}], or name a path in one of these"
            )


def _paths(cfg: RunConfig) -> dict[str, Path]:
    """The paths that a config names, by their settings; a hub's model is none."""
    given = {
        "model.path": cfg.model.path,
        "data.train": cfg.data.train,
        "data.test": cfg.data.test,
        "data.warmup": cfg.data.warmup if cfg.sft.steps else None,
        "train.rollouts": cfg.train.rollouts,
        "search.reward_model": cfg.search.reward_model,
    }
    paths = {name: Path(path) for name, path in given.items() if path not in (None, NOT_GIVEN)}
    return {name: path for name, path in paths.items() if name != "model.path" or path.is_absolute() or path.exists()}
