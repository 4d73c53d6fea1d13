"""Steps of responses, and what a process reward model learns from them: one right step beside sampled wrong ones.

A path is a question's steps up to and including the one that is judged. The ranking loss wants, for a question, one
positive step (of a correct solution) and K - 1 sampled ones (``losses.reward_model.ranking_nce_loss``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nemo_edo.types import UNVERIFIED, ScoredRollout

Path = tuple[str, ...]
FirstWrong = Callable[[str, Path], int | None]
"""(question, steps) -> the index of the first step that is wrong, None where all are right."""


@dataclass(frozen=True)
class StepGroup:
    """A right step of a question beside wrong ones."""

    problem_id: str
    question: str
    positive: Path
    negatives: tuple[Path, ...]
    """At least one; first those that share the positive's prefix, hence differ in the step alone."""

    @property
    def shared(self) -> int:
        """How many of the negatives share the positive's prefix."""
        return sum(path[:-1] == self.positive[:-1] for path in self.negatives)


@dataclass(frozen=True)
class JudgedPaths:
    """The distinct paths of a question's responses, each in the order in which it was first met."""

    right: tuple[Path, ...]
    wrong: tuple[Path, ...]


def split_steps(text: str, separator: str) -> Path:
    """The text between separators, without line breaks around it; blank steps are left out."""
    steps = (step.strip("\r\n") for step in text.split(separator))
    return tuple(step for step in steps if step.strip())


def judged_paths(
    question: str, responses: Iterable[ScoredRollout], separator: str, first_wrong: FirstWrong | None
) -> JudgedPaths:
    """What a question's responses say of its paths.

    Right are the steps of correct responses. Wrong are, with ``first_wrong``, the first wrong step of a response and
    all that follow: no path gets right again, whatever its newest step says (else the last step of a wrong solution
    would be one that the model has never seen). Without, every step of a wrong response, unless a correct response
    takes the same path. A response that the limit cut off lacks its last step, which may be half of one; one that could
    not be verified says nothing.
    """
    right: dict[Path, None] = {}
    wrong: dict[Path, None] = {}
    for response in responses:
        steps = split_steps(response.rollout.text, separator)
        if response.reason.startswith(UNVERIFIED):
            continue
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
    return JudgedPaths(tuple(right), tuple(path for path in wrong if path not in right))


def step_groups(
    problem_id: str, question: str, paths: JudgedPaths, *, positives: int, negatives: int, rng: random.Random
) -> list[StepGroup]:
    """Up to ``positives`` right paths, drawn at random, each with up to ``negatives`` wrong ones.

    Wrong paths that share the right one's prefix are drawn first, then those of the same length, then others. No group
    where the question has no wrong path.
    """
    if not paths.wrong:
        return []
    drawn = rng.sample(paths.right, min(positives, len(paths.right)))
    groups = []
    for positive in drawn:
        order = rng.sample(paths.wrong, len(paths.wrong))
        order.sort(key=lambda path, p=positive: (path[:-1] != p[:-1], len(path) != len(p)))  # stable: random within
        groups.append(StepGroup(problem_id, question, positive, tuple(order[:negatives])))
    return groups


def groups_of(
    questions: Mapping[str, str],
    responses: Iterable[ScoredRollout],
    *,
    separator: str,
    first_wrong: FirstWrong | None,
    positives: int,
    negatives: int,
    seed: int,
) -> list[StepGroup]:
    """The groups of all questions that have responses, in the order of ``questions`` (problem id -> text). A question's
    groups depend on the seed, its id and its responses alone."""
    of_question: dict[str, list[ScoredRollout]] = {problem_id: [] for problem_id in questions}
    for response in responses:
        of_question[response.rollout.problem_id].append(response)
    groups = []
    for problem_id, question in questions.items():
        paths = judged_paths(question, of_question[problem_id], separator, first_wrong)
        rng = random.Random(f"step groups {seed} {problem_id}")
        groups += step_groups(problem_id, question, paths, positives=positives, negatives=negatives, rng=rng)
    return groups


def held_out(questions: Iterable[str], share: float, seed: int) -> set[str]:
    """The questions that are not trained on. The seed and a question's text alone decide; texts that differ in white
    space only share their fate."""
    normal = {question: " ".join(question.split()) for question in questions}
    return {question for question, text in normal.items() if random.Random(f"held out {seed} {text}").random() < share}
