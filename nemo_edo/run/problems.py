"""A run's problems: which files have them, and whether the run can use them."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.config import NONE, DataConfig, RunConfig
from nemo_edo.data.problems import SPLITS, LoadedProblems, load_problems
from nemo_edo.errors import UserError
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Problem


@dataclass(frozen=True)
class ProblemFiles:
    """What is in the files of a run's problems."""

    paths: dict[str, Path]
    """Of the splits that there are."""
    scored: dict[Path, LoadedProblems]
    """Of train and test; ``build_scorer`` takes those out that cannot be scored."""
    warmup: LoadedProblems | None
    """Where the warm-up learns from a file of its own."""


@dataclass(frozen=True)
class RunProblems:
    """What is trained on, evaluated on and learned in the warm-up."""

    train: list[Problem]
    test: list[Problem]
    learned: list[Problem]
    """The warm-up's problems, each with a solution; empty without a warm-up."""
    skipped_rows: int


def read_problems(cfg: RunConfig, run: RunFolder, made: Mapping[str, list[Problem]]) -> ProblemFiles:
    """The config's problems. made: the splits that are not in their files yet. Raises UserError for a file that cannot
    be read."""
    paths = _problem_files(cfg.data, run, made)
    if "train" not in paths and cfg.algorithm != NONE:
        raise UserError(f"data.source ({cfg.data.source}) made no train problems for algorithm {cfg.algorithm}")

    def load(split: str) -> LoadedProblems:
        return LoadedProblems(list(made[split]), []) if split in made else load_problems(paths[split], cfg.data, split)

    scored = {paths[split]: load(split) for split in ("train", "test") if split in paths}
    has_own = cfg.sft.steps and "warmup" in paths and paths["warmup"] not in scored
    return ProblemFiles(paths, scored, load("warmup") if has_own else None)


def run_problems(cfg: RunConfig, files: ProblemFiles) -> RunProblems:
    """The problems that are used, checked. Raises UserError for those that the run could not use."""
    of_file, paths = files.scored, files.paths
    learns_from = files.warmup or of_file.get(paths.get("warmup", paths.get("train")))
    read = RunProblems(
        train=of_file[paths["train"]].problems if "train" in paths else [],
        test=of_file[paths["test"]].problems[: cfg.evaluation.limit],
        learned=learns_from.problems if cfg.sft.steps else [],
        skipped_rows=sum(len(file.skipped) for file in [*of_file.values(), *filter(None, [files.warmup])]),
    )
    _check_problems(read.train, read.test, read.learned, cfg.evaluation.tuning_problems)
    return read


def _check_problems(train: list[Problem], test: list[Problem], learned: list[Problem], tuning: int) -> None:
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


def _problem_files(data: DataConfig, run: RunFolder, made: Container[str]) -> dict[str, Path]:
    """The files of the splits that there are; without a warm-up's, it learns from those of ``train``."""
    if data.is_built_in or data.source is not None:
        own = {split: run.data / f"{split}.jsonl" for split in SPLITS}
        there = {split for split, path in own.items() if split in made or (not made and path.is_file())}
        wanted = there if "train" in there else set()  # without it, nothing is trained
        return {split: path for split, path in own.items() if split in {*wanted, "test"}}
    named = {split: getattr(data, split) for split in SPLITS}
    return {split: Path(path) for split, path in named.items() if path is not None}
