"""A run's problems: which files have them, and whether the run can use them."""

from collections.abc import Mapping
from pathlib import Path

from nemo_edo.config import NONE, DataConfig, RunConfig
from nemo_edo.data.problems import SPLITS, LoadedProblems, load_problems
from nemo_edo.errors import UserError
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem


def read_problems(
    cfg: RunConfig, run: RunFolder, made: Mapping[str, list[Problem]]
) -> tuple[dict[str, Path], dict[Path, LoadedProblems]]:
    """The files of the splits that the run uses, and what is in each. made: the splits that are not in their files yet.
    Raises UserError for a file that cannot be read."""
    paths = _problem_files(cfg.data, run, made)
    if "train" not in paths and cfg.algorithm != NONE:
        raise UserError(f"data.source ({cfg.data.source}) made no train problems for algorithm {cfg.algorithm}")
    if not cfg.sft.steps:
        paths.pop("warmup", None)
    elif "warmup" not in paths:
        paths["warmup"] = paths["train"]
    loaded: dict[Path, LoadedProblems] = {}
    for split in ("train", "test", "warmup"):
        if split in paths and paths[split] not in loaded:
            is_new, path = split in made, paths[split]
            loaded[path] = LoadedProblems(list(made[split]), []) if is_new else load_problems(path, cfg.data, split)
    return paths, loaded


def check_problems(train: list[Problem], test: list[Problem], learned: list[Problem], tuning: int) -> None:
    """Raises UserError for problems that the run could not use; ``learned`` are the warm-up's."""
    if unsolved := next((problem for problem in learned if not problem.solution), None):
        raise UserError(
            f"{unsolved.source}: has no solution, which the warm-up learns (sft.steps); name its column with "
            "data.columns.solution, or set sft.steps=0"
        )
    trained = {problem.id: problem.source for problem in train}
    if shared := [problem for problem in test if problem.id in trained]:
        first = shared[0]
        if trained[first.id] == first.source:
            raise UserError(f"data.train and data.test both have {first.source}: test problems must be others")
        raise UserError(
            f"data.train and data.test: {len(shared)} problems of one have the id of a problem of the other, such as "
            f"{first.id} ({trained[first.id]} and {first.source}); an id begins with its file's name, so give the two "
            "files different names"
        )
    if tuning > len(train):
        expected = f"at most the number of training problems, {len(train)}"
        raise UserError(f"evaluation.tuning_problems is {tuning}, expected {expected}")


def _problem_files(data: DataConfig, run: RunFolder, made: Mapping[str, list[Problem]]) -> dict[str, Path]:
    """The files of the splits that there are."""
    if data.is_built_in or data.source is not None:
        own = {split: run.data / f"{split}.jsonl" for split in SPLITS}
        there = {split for split, path in own.items() if split in made or (not made and path.is_file())}
        wanted = there if "train" in there else set()  # without it, nothing is trained
        return {split: path for split, path in own.items() if split in {*wanted, "test"}}
    named = {split: getattr(data, split) for split in SPLITS}
    return {split: Path(path) for split, path in named.items() if path is not None}
