"""Labelled steps of responses, from which a process reward model learns to rank a right step above wrong ones.

A path is a question's steps up to and including the labelled one. The ranking loss takes, for each question, one
positive step (of a correct solution) and K - 1 sampled negative ones (``losses.ranking_nce_loss``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nemo_edo.config.reward_model import RewardDataConfig
from nemo_edo.types import UNVERIFIED, ScoredRollout

Path = tuple[str, ...]
FirstWrong = Callable[[str, Path], int | None]
"""(question, steps) -> the index of the first step that is wrong, None where all are right."""


@dataclass(frozen=True)
class StepGroup:
    """A right step of a question, and wrong ones."""

    problem_id: str
    question: str
    positive: Path
    negatives: tuple[Path, ...]
    """At least one; first those that share the positive's prefix and differ in the last step only."""


def split_steps(text: str, separator: str) -> Path:
    """The texts between separators, without surrounding line breaks; blank steps are dropped."""
    steps = (step.strip("\r\n") for step in text.split(separator))
    return tuple(step for step in steps if step.strip())


def labelled_paths(
    question: str, responses: Iterable[ScoredRollout], separator: str, first_wrong: FirstWrong | None
) -> tuple[list[Path], list[Path]]:
    """The distinct right paths of a question's responses, and the wrong ones, in the order of their first occurrence.

    The steps of correct responses are right. With ``first_wrong``, a response's first wrong step and all later ones are
    wrong: a path never becomes right again, whatever its last step says (otherwise the model would never see the last
    step of a wrong solution). Without it, all steps of a wrong response are wrong, unless a correct response has the
    same path. The last step of a response that did not finish is dropped, as it may be cut; responses that could not be
    verified are ignored.
    """
    right: dict[Path, None] = {}
    wrong: dict[Path, None] = {}
    for response in responses:
        if response.reason.startswith(UNVERIFIED):
            continue
        steps = split_steps(response.rollout.text, separator)
        if not response.rollout.finished:
            steps = steps[:-1]
        first = None if first_wrong is None else first_wrong(question, steps)
        prefixes = [steps[:length] for length in range(1, len(steps) + 1)]
        if first is not None:
            wrong |= dict.fromkeys(prefixes[first:])
        elif response.reward == 1:
            right |= dict.fromkeys(prefixes)
        elif first_wrong is None:
            wrong |= dict.fromkeys(prefixes)
    return list(right), [path for path in wrong if path not in right]


def step_groups(
    questions: Mapping[str, str],
    responses: Iterable[ScoredRollout],
    data: RewardDataConfig,
    first_wrong: FirstWrong | None,
    seed: int,
) -> list[StepGroup]:
    """For each question (problem id -> text), up to ``data.positives`` right paths, sampled at random, each with up to
    ``data.negatives`` wrong ones: first those that share the right one's prefix, then those of its length, then others.
    A question without a right or a wrong path has none.

    A question's groups depend on the seed, its id and its responses only.
    """
    of_question: dict[str, list[ScoredRollout]] = {problem_id: [] for problem_id in questions}
    for response in responses:
        of_question[response.rollout.problem_id].append(response)
    groups = []
    for problem_id, question in questions.items():
        right, wrong = labelled_paths(question, of_question[problem_id], data.step_separator, first_wrong)
        rng = random.Random(f"step groups {seed} {problem_id}")
        for positive in rng.sample(right, min(data.positives, len(right))) if wrong else ():
            order = rng.sample(wrong, len(wrong))
            order.sort(key=lambda path, p=positive: (path[:-1] != p[:-1], len(path) != len(p)))  # stable: random within
            groups.append(StepGroup(problem_id, question, positive, tuple(order[: data.negatives])))
    return groups


def held_out(questions: Iterable[str], share: float, seed: int) -> set[str]:
    """The questions that are not trained on: a function of the seed and of each question's text up to white space."""
    normal = {question: " ".join(question.split()) for question in questions}
    return {question for question, text in normal.items() if random.Random(f"held out {seed} {text}").random() < share}
