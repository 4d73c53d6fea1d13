"""Training and test data of a reward model: labelled steps of a run's stored responses, as groups of token ids. A path
is a question's steps up to and including the labelled one. The ranking loss takes, for each question, one positive step
(of a correct solution) and K - 1 sampled negative ones (``losses.ranking_nce_loss``)."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_edo.builtin_task.arithmetic import first_wrong_step
from nemo_edo.config.reward_model import ARITHMETIC, RewardDataConfig
from nemo_edo.errors import UserError
from nemo_edo.reward_models.formats import OwnFormat, split_steps
from nemo_edo.reward_models.process_reward import padded
from nemo_edo.run.stored_run import StoredRun
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.types import UNVERIFIED, ScoredRollout

TRAIN, VALIDATION, TEST = "train", "validation", "test"
Path = tuple[str, ...]
FirstWrong = Callable[[str, Path], int | None]  # the first wrong step of (question, steps), or None


@dataclass(frozen=True)
class StepGroup:
    """A right path of a question and wrong ones, as texts or as token ids."""

    problem_id: str
    paths: tuple[tuple, ...]  # the right one, then at least one wrong one: first those that share its prefix
    shared: tuple[bool, ...]  # for each wrong path, whether it differs from the right one in the last step only


@dataclass(frozen=True)
class StepData:
    groups: dict[str, list[StepGroup]]  # of token ids, for train, validation and test; no question is in two of them
    too_long: int  # groups that are dropped because a path is longer than ``data.max_tokens``

    def counts(self) -> dict[str, dict[str, int]]:
        """Questions, right steps, wrong steps, and wrong steps that share a right step's prefix, of each part."""
        return {
            part: {
                "questions": len({group.problem_id for group in groups}),
                "right_steps": len(groups),
                "wrong_steps": sum(len(group.shared) for group in groups),
                "wrong_steps_of_one_prefix": sum(sum(group.shared) for group in groups),
            }
            for part, groups in self.groups.items()
        }


def build_step_data(run: StoredRun, data: RewardDataConfig, form: OwnFormat, seed: int) -> StepData:
    """Groups from the run's training responses, split by question into train and validation, and from the responses to
    its test problems. Raises UserError where a part is empty."""
    questions, test_questions = run.questions(TRAIN), run.questions(TEST)
    checker = None
    if data.steps == ARITHMETIC:
        texts = [*questions.values(), *test_questions.values()]
        strange = next((text for text in texts if not all(part.isdecimal() for part in text.split(" + "))), None)
        if strange is not None:
            raise UserError(
                f"data.steps is arithmetic, which checks the built-in task's steps, but the run has the question "
                f"{strange!r}; set data.steps=answer"
            )
        checker = first_wrong_step
    trained = step_groups(questions, run.training_responses(data.arms), data, checker, seed)
    validation = held_out(questions.values(), data.validation_share, seed)
    known = set(questions.values())
    test_questions = {one: text for one, text in test_questions.items() if text not in known}
    tested = [
        response
        for policy in run.evaluated(data.test_arms)
        for response in run.evaluation_responses(policy, "sampled")
        if response.rollout.problem_id in test_questions
    ]
    groups = {
        TRAIN: [group for group in trained if questions[group.problem_id] not in validation],
        VALIDATION: [group for group in trained if questions[group.problem_id] in validation],
        TEST: step_groups(test_questions, tested, data, checker, seed),
    }
    fitting: dict[str, list[StepGroup]] = {}
    for part, found in groups.items():
        texts = test_questions if part == TEST else questions
        encoded = [
            replace(one, paths=tuple(form.last(StepPath(texts[one.problem_id], path)) for path in one.paths))
            for one in found
        ]
        fitting[part] = [one for one in encoded if max(map(len, one.paths)) <= data.max_tokens]
        if not fitting[part]:
            raise UserError(
                f"data.run: the stored responses of {run.folder.path} make no group of a right and a wrong step for "
                f"{part} ({len(found)} before data.max_tokens = {data.max_tokens})"
            )
    return StepData(fitting, sum(map(len, groups.values())) - sum(map(len, fitting.values())))


def collate(groups: Sequence[StepGroup], pad_id: int) -> dict[str, Tensor]:
    """input_ids and attention_mask [paths, T] of all groups' paths, the positions ``ends`` [paths] of their last
    tokens, and ``sizes`` [groups]: how many paths each group has."""
    paths = [path for group in groups for path in group.paths]
    ids, mask = padded(paths, pad_id)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "ends": torch.tensor([len(path) - 1 for path in paths]),
        "sizes": torch.tensor([len(group.paths) for group in groups]),
    }


def labelled_paths(
    question: str, responses: Iterable[ScoredRollout], separator: str, first_wrong: FirstWrong | None
) -> tuple[list[Path], list[Path]]:
    """The distinct right paths of a question's responses, and the wrong ones, in the order of their first occurrence.
    The steps of correct responses are right. With ``first_wrong``, a response's first wrong step and all later ones are
    wrong: a path never becomes right again, whatever its last step says (otherwise the model would never see the last
    step of a wrong solution). Without it, all steps of a wrong response are wrong, unless a correct response has the
    same path. The last step of a response that did not finish is dropped, as it may be cut. Unverified responses are
    ignored."""
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
        elif response.success:
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
    A question without a right or a wrong path has none. Seed, id and responses alone determine its groups."""
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
            negatives = order[: data.negatives]
            shared = tuple(path[:-1] == positive[:-1] for path in negatives)
            groups.append(StepGroup(problem_id, (positive, *negatives), shared))
    return groups


def held_out(questions: Iterable[str], share: float, seed: int) -> set[str]:
    """The questions that are not trained on: a function of the seed and of each question's text up to white space."""
    normal = {question: " ".join(question.split()) for question in questions}
    return {question for question, text in normal.items() if random.Random(f"held out {seed} {text}").random() < share}
