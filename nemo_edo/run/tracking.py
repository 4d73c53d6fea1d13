"""NeMo's experiment manager: TensorBoard, W&B or MLflow by its own config."""

from __future__ import annotations

import ast
import html
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_edo.config import ArmConfig
from nemo_edo.config.checks import without_passwords
from nemo_edo.errors import UserError
from nemo_edo.types import Problem, ScoredRollout
from nemo_edo.utils.files import flattened, json_text, read_object, write_text
from nemo_edo.utils.wording import did_you_mean

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger, MLFlowLogger

EXAMPLES, EXAMPLE_RESPONSES = 6, 3
"""Test problems, and responses to each by each arm, that the trackers show."""


def check_names(settings: dict[str, Any]) -> None:
    """Raises UserError for a key that NeMo's exp_manager does not have: before NeMo is imported, which takes seconds.

    The names are read from the source of its config's dataclass; without NeMo, its import says what is missing.
    """
    nemo = find_spec("nemo")
    if nemo is None or not settings:
        return
    source = Path(nemo.submodule_search_locations[0]) / "utils" / "exp_manager.py"
    classes = (node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    config = next(node for node in classes if node.name == "ExpManagerConfig")
    known = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]
    for name in settings:
        if name not in known:
            raise UserError(f"exp_manager.{name}: NeMo's exp_manager has no such setting{did_you_mean(name, known)}")


def check_settings(settings: dict[str, Any]) -> None:
    """Raises UserError for what NeMo's exp_manager has no setting for, at any depth, and for values of other types."""
    from nemo.utils.exp_manager import ExpManagerConfig

    try:
        OmegaConf.merge(OmegaConf.structured(ExpManagerConfig), settings)
    except OmegaConfBaseException as error:
        raise UserError(f"exp_manager.{error.full_key}: {str(error).splitlines()[0]}") from error


def start_tracking(settings: dict[str, Any], folder: Path, ids: Path, hyperparameters: dict[str, Any]) -> pl.Trainer:
    """A Lightning trainer with the loggers that ``settings`` ask NeMo's exp_manager for. It trains nothing itself.

    ``folder`` is for its files alone: exp_manager moves away all others that it finds there. ``ids`` keeps the run's
    names in W&B and MLflow: a resumed run continues there, and adds to TensorBoard's files. Each logger gets the
    hyperparameters. Raises UserError where a logger cannot be made, or no longer knows the run.
    """
    import lightning.pytorch as pl
    from nemo.utils import logging as nemo_logging
    from nemo.utils.exp_manager import exp_manager

    nemo_logging.captureWarnings(False)  # it swallows Python's warnings, the package's own among them
    nemo_logging.setLevel(nemo_logging.ERROR)  # among its warnings: that the folder, which is ours, exists
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its import set another level
    trainer = pl.Trainer(
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=1
    )
    config = {"explicit_log_dir": str(folder), "create_checkpoint_callback": False, **settings}
    with_mlflow = config.pop("create_mlflow_logger", False)
    known = read_object(ids, ()) if ids.exists() else {}
    names = dict(known)
    if config.get("create_wandb_logger"):
        chosen = {"id": known.get("wandb", uuid4().hex[:8]), **(config.get("wandb_logger_kwargs") or {})}
        config["wandb_logger_kwargs"], names["wandb"] = chosen, chosen["id"]
    try:
        exp_manager(trainer, OmegaConf.create(config))
        if with_mlflow:
            logger = _mlflow_logger(config, folder, known.get("mlflow"))
            trainer.loggers, names["mlflow"] = [*trainer.loggers, logger], logger.run_id
    except (ValueError, ImportError) as error:  # settings that do not go together, or a logger that is not installed
        raise UserError(f"exp_manager: {error}") from error
    if names != known:
        write_text(ids, json_text(names))
    for logger in trainer.loggers:
        # MLflow keeps the first value of a parameter, and fails for another
        if not (with_mlflow and "mlflow" in known and logger is trainer.loggers[-1]):
            with _names_its_folder(logger):
                logger.log_hyperparams(hyperparameters)
    nemo_logging.setLevel(nemo_logging.WARNING)
    return trainer


def hyperparameters(settings: Mapping[str, Any], arms: Mapping[str, ArmConfig]) -> dict[str, Any]:
    """Every setting of the resolved config by its full key, and what each arm explores with as ``ARM.alpha`` and so on;
    of a single arm without its name, so that trackers have ``alpha`` as a column of the runs of a sweep.

    The sections that may hold keys (``cluster``'s environment, ``exp_manager``'s arguments) are left out."""
    shown = {name: value for name, value in settings.items() if name not in ("cluster", "exp_manager")}
    flat = {
        key: value if isinstance(value, int | float | None) else without_passwords(str(value))
        for key, value in flattened(shown).items()
    }
    for name, arm in arms.items():
        own = {
            "alpha": arm.effective_alpha,
            "exploration_weight": arm.exploration_weight,
            "log_ratio_floor": arm.log_ratio_floor,
            "beta": arm.beta,
        }
        flat |= {key if len(arms) == 1 else f"{name}.{key}": value for key, value in own.items()}
    return flat


def _mlflow_logger(config: dict[str, Any], folder: Path, run_id: str | None) -> MLFlowLogger:
    """The MLflow logger that exp_manager's settings ask for; without a server (``tracking_uri``, or
    MLFLOW_TRACKING_URI), a database in the folder. run_id: of the run that it continues. NeMo 3.0 cannot make one: it
    gives Lightning ``run_name`` twice. Raises ImportError without MLflow, ValueError where it cannot be reached, has no
    such run or refuses the store."""
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow.exceptions import MlflowException
    from nemo.utils.loggers.mlflow_logger import MLFlowParams

    # In a folder: when a run resumes, exp_manager moves the files of its log folder elsewhere.
    server, here = os.environ.get("MLFLOW_TRACKING_URI"), folder.absolute() / "mlflow"
    defaults = {"experiment_name": config.get("name", "nemo_edo"), "tracking_uri": server}
    if server is None:
        here.mkdir(parents=True, exist_ok=True)
        defaults |= {"tracking_uri": f"sqlite:///{here}/mlflow.db", "artifact_location": f"file://{here}/artifacts"}
    if run_id is not None:
        defaults["run_id"] = run_id
    settings = OmegaConf.merge(OmegaConf.structured(MLFlowParams), defaults, config.get("mlflow_logger_kwargs", {}))
    try:
        logger = MLFlowLogger(**OmegaConf.to_container(settings))
        logger.experiment.update_run(logger.run_id, "RUNNING")  # asks MLflow for the run, or makes it
    except MlflowException as error:
        raise ValueError(f"MLflow at {without_passwords(settings.tracking_uri)}: {error}") from error
    return logger


def end_tracking(trainer: pl.Trainer, *, finished: bool) -> None:
    """Tells MLflow how the run ended: KILLED where the same command resumes it. W&B notices the process's end itself,
    and TensorBoard keeps no status."""
    from lightning.pytorch.loggers import MLFlowLogger

    for logger in trainer.loggers:
        if isinstance(logger, MLFlowLogger):
            from mlflow.exceptions import MlflowException

            try:
                logger.experiment.set_terminated(logger.run_id, "FINISHED" if finished else "KILLED")
            except MlflowException as error:  # the run itself is complete
                print(f"nemo-edo: warning: MLflow was not told that the run has ended: {error}", file=sys.stderr)


def log_numbers(trainer: pl.Trainer | None) -> Callable[[dict[str, float], int], None]:
    """A function that hands numbers and their step to every logger of the trainer (None: to no logger).

    An @ in a name becomes _at_: neither TensorBoard nor MLflow takes one.
    """

    def log(numbers: dict[str, float], step: int) -> None:
        named = {name.replace("@", "_at_"): value for name, value in numbers.items()}
        for logger in trainer.loggers if trainer is not None else ():
            with _names_its_folder(logger):
                logger.log_metrics(named, step=step)

    return log


@contextmanager
def _names_its_folder(logger: Logger) -> Iterator[None]:
    """A failed write of a logger, such as on a full disk, is an OSError with a file's name, or the logger's folder:
    TensorBoard writes in a thread and names no file, and Lightning takes the error for a wrong number."""
    try:
        yield
    except (OSError, ValueError) as error:
        failed = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(failed, OSError):
            raise
        if failed.filename is None:
            failed = OSError(failed.errno, failed.strerror, logger.log_dir or logger.name)
        raise failed from error


def first_responses(problem: Problem, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    return [item for item in scored if item.rollout.problem_id == problem.id][:EXAMPLE_RESPONSES]


def log_solutions(
    trainer: pl.Trainer | None, problems: Sequence[Problem], scored: Sequence[ScoredRollout], arm: str, iteration: int
) -> None:
    """Hands a table of an arm's first responses to the first problems, "" where no answer was found, to the trainer's
    TensorBoard (as text), W&B (as a wandb.Table) and MLflow (as the artifact NAME/step_00000012.json) under the name
    ARM/evaluation/solutions; other loggers have no place for one."""
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    name, columns = f"{arm}/evaluation/solutions", ["problem", "arm", "iteration", "sample", "text", "answer", "reward"]
    rows = [
        [problem.question, arm, iteration, sample, item.rollout.text, item.answer or "", item.reward]
        for problem in problems[:EXAMPLES]
        for sample, item in enumerate(first_responses(problem, scored))
    ]
    for logger in trainer.loggers if trainer is not None else ():
        with _names_its_folder(logger):
            if isinstance(logger, TensorBoardLogger):
                lines = [columns, ["---"] * len(columns), *(map(_cell, row) for row in rows)]
                logger.experiment.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)
            elif isinstance(logger, WandbLogger):
                logger.log_table(name, columns=columns, data=rows, step=iteration)
            elif isinstance(logger, MLFlowLogger):
                by_column = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
                file = f"{name}/step_{iteration:08d}.json"
                logger.experiment.log_table(logger.run_id, by_column, artifact_file=file)


def _cell(value: Any) -> str:
    """A cell of a table in GitHub's Markdown, which shows the value as it is, line breaks kept."""
    escaped = re.sub(r"([\\`*_{}\[\]()#+.!|-])", r"\\\1", html.escape(str(value), quote=False))
    return escaped.replace("\n", "<br>")
