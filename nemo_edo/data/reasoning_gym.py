"""reasoning-gym's tasks (the extra ``reasoning-gym``) as a source of problems, and their reward. A problem is an item
of a task's data set; an item's seed is the data set's plus its place."""

import json
import math
from functools import cache
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.types import Problem

try:
    import reasoning_gym
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS
except ModuleNotFoundError as error:
    raise UserError(
        f"data=reasoning_gym needs a package that is not installed ({error.name}): pip install '.[reasoning-gym]' in a "
        "checkout"
    ) from error

UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What some tasks' scores raise at an answer of another form: prime_factorization at "139 = 1", boxnet at a list."""
ITEMS_PER_PROBLEM = 10  # items that are made for each problem, at most: small tasks repeat themselves


def make(
    name: str, train_problems: int = 1024, test_problems: int = 128, seed: int = 0, **settings: Any
) -> dict[str, list[Problem]]:
    """Different problems of the task ``name``, whose own settings are ``settings``. Raises UserError for an unknown
    task or setting, and where the task has too few different questions."""
    wanted = train_problems + test_problems
    if train_problems < 0 or test_problems < 1:
        raise UserError(f"data.source_args: {train_problems=} and {test_problems=}, expected at least 0 and 1")
    settings = {"seed": seed, "size": ITEMS_PER_PROBLEM * wanted, **settings}
    dataset, problems = new_dataset(name, settings), {}
    for index in range(settings["size"]):
        item, answer, solution = dataset[index], "", ""
        if item["question"] in problems:
            continue
        if item["answer"] is not None:
            answer, worked = str(item["answer"]), item["metadata"].get("answer_cot", "").partition("####")[0].strip()
            solution = f"{worked}\n#### {answer}".lstrip()
        source, metadata = f"{name}-{index}", {"task": name, "settings": settings}
        problems[item["question"]] = Problem(source, item["question"], solution, answer, source, metadata=metadata)
        if len(problems) == wanted:
            made = list(problems.values())
            return {"train": made[:train_problems], "test": made[train_problems:]}
    raise UserError(
        f"data.source_args: {name} has {len(problems)} different questions among {settings['size']}, fewer than "
        f"train_problems + test_problems = {wanted}"
    )


def score(*, question: str, final_answer: str | None, metadata: dict[str, Any], problem_id: str) -> float:
    """The task's own score of the answer, 1 where it is right; 0 without an answer, or with one it cannot read. The
    item is made again: its values are of more types than JSON has, and scores tell tuples from lists. Raises UserError
    where reasoning-gym makes another question than the problem's."""
    if final_answer is None:
        return 0.0
    dataset = _dataset(metadata["task"], json.dumps(metadata["settings"]))
    item = dataset[int(problem_id.rpartition("-")[2])]
    if item["question"] != question:
        raise UserError(f"reasoning-gym {reasoning_gym.__version__} makes another problem {problem_id} than the run's")
    try:
        found = float(dataset.score_answer(final_answer, item))
    except UNREADABLE:
        return 0.0
    return found if math.isfinite(found) else 0.0


@cache
def _dataset(name: str, settings: str) -> ProceduralDataset:
    return new_dataset(name, json.loads(settings))


def new_dataset(name: str, settings: dict[str, Any]) -> ProceduralDataset:
    """The task's data set. Raises UserError for an unknown task, and for settings that it does not take."""
    if name not in DATASETS:
        raise UserError(f"data.source_args.name is {name!r}, expected one of {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:  # what its settings raise where they do not fit
        raise UserError(f"data.source_args: the task {name} does not take them: {error}") from error
