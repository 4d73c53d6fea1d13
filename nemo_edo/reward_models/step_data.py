"""Training and test data of a reward model: a run's stored responses as groups of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_edo.builtin_task.arithmetic import first_wrong_step
from nemo_edo.config.reward_model import ARITHMETIC, RewardDataConfig
from nemo_edo.errors import UserError
from nemo_edo.reward_models.formats import OwnFormat
from nemo_edo.reward_models.process_reward import padded
from nemo_edo.reward_models.steps import StepGroup, held_out, step_groups
from nemo_edo.run.stored_run import StoredRun
from nemo_edo.test_time.search_llm import StepPath

TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class EncodedGroup:
    """A StepGroup as token ids: its right path, then its wrong ones."""

    problem_id: str
    paths: tuple[tuple[int, ...], ...]
    shared: tuple[bool, ...]
    """For each wrong path, whether it shares the right one's prefix."""


@dataclass(frozen=True)
class StepData:
    groups: dict[str, list[EncodedGroup]]
    """For train, validation and test; no question is in two of them."""
    too_long: int
    """Groups that are dropped because a path is longer than ``data.max_tokens``."""

    def counts(self) -> dict[str, dict[str, int]]:
        """For each part: questions, right steps, wrong steps, and wrong steps that share a right step's prefix."""
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
    responses = [response for arm in run.with_rollouts(data.arms) for response in run.training_responses(arm)]
    trained = step_groups(questions, responses, data, checker, seed)
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
        TRAIN: [group for group in trained if group.question not in validation],
        VALIDATION: [group for group in trained if group.question in validation],
        TEST: step_groups(test_questions, tested, data, checker, seed),
    }
    encoded = {part: [_encoded(group, form) for group in found] for part, found in groups.items()}
    fitting = {
        part: [group for group in found if max(map(len, group.paths)) <= data.max_tokens]
        for part, found in encoded.items()
    }
    for part, found in fitting.items():
        if not found:
            raise UserError(
                f"data.run: the stored responses of {run.folder.path} make no group of a right and a wrong step for "
                f"{part} ({len(groups[part])} before data.max_tokens = {data.max_tokens})"
            )
    return StepData(fitting, sum(map(len, encoded.values())) - sum(map(len, fitting.values())))


def collate(groups: Sequence[EncodedGroup], pad_id: int) -> dict[str, Tensor]:
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


def _encoded(group: StepGroup, form: OwnFormat) -> EncodedGroup:
    paths = (group.positive, *group.negatives)
    return EncodedGroup(
        group.problem_id,
        tuple(form.last(StepPath(group.question, path)) for path in paths),
        tuple(path[:-1] == group.positive[:-1] for path in group.negatives),
    )
