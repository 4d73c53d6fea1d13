"""A reward model's training data as tensors: groups of paths, their loss, and ranking accuracy."""

from functools import partial

import pytest
import torch
from helpers.stored_run import LLAMA
from helpers.stored_run import reward_config as config

from nemo_edo.builtin_task.arithmetic import first_wrong_step
from nemo_edo.config import RewardTrainConfig
from nemo_edo.data.tokenizer import load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.losses import ranking_nce_loss
from nemo_edo.reward_models import train as module
from nemo_edo.reward_models.formats import DECODER, OwnFormat, OwnSettings
from nemo_edo.reward_models.step_data import TEST, TRAIN, VALIDATION, EncodedGroup, build_step_data, collate
from nemo_edo.reward_models.train import train_reward_model
from nemo_edo.run.stored_run import open_run
from nemo_edo.test_time.search_llm import StepPath

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")


GROUPS = [
    EncodedGroup("a", ((3, 4, 5), (3, 9), (3, 4, 6, 7)), (False, True)),
    EncodedGroup("b", ((8,), (9, 9)), (True,)),
]


@pytest.fixture(scope="module")
def network():
    from transformers import AutoConfig

    from nemo_edo.reward_models.heads import own_class, own_config

    torch.manual_seed(0)
    made = own_config(AutoConfig.for_model(**LLAMA, vocab_size=32), 0)
    return own_class(made, "a test")._from_config(made)


def test_loss_of_a_batch_is_the_ranking_loss_of_transformers_own_scores(network, tmp_path):
    trainer = module.NCETrainer(
        RewardTrainConfig(l2=0.1), model=network,
        args=module._arguments(config(tmp_path, tmp_path), tmp_path), data_collator=partial(collate, pad_id=0),
        train_dataset=GROUPS, eval_dataset=GROUPS,
    )
    loss = trainer.compute_loss(network, collate(GROUPS, 0))
    scores = [[network(torch.tensor([path])).logits[0, 0] for path in group.paths] for group in GROUPS]
    negatives = torch.stack([torch.stack(scores[0][1:]), torch.stack([scores[1][1], torch.tensor(0.0)])])
    expected = ranking_nce_loss(torch.stack([scores[0][0], scores[1][0]]), negatives, l2=0.1,
                                negative_mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]])).mean()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)


def test_no_question_is_in_two_parts_and_paths_are_right_and_wrong_as_the_task_checks_them(run):
    stored = open_run(run)
    form = OwnFormat(load_tokenizer(run / "base"), OwnSettings(DECODER, "\n"))
    data = build_step_data(stored, config(run, run).data, form, seed=3)
    questions = {part: {group.problem_id for group in groups} for part, groups in data.groups.items()}
    assert not questions[TRAIN] & questions[VALIDATION] and all(questions.values())
    texts = {**stored.questions("train"), **stored.questions("test")}
    assert questions[TEST] <= set(stored.questions("test")) and questions[TRAIN] <= set(stored.questions("train"))
    tokenizer = load_tokenizer(run / "base")
    for group in (group for groups in data.groups.values() for group in groups):
        question = texts[group.problem_id]
        paths = [tuple(tokenizer.decode(path).split("\n")[1:-1]) for path in group.paths]
        assert all(form.last(StepPath(question, path)) == ids for path, ids in zip(paths, group.paths, strict=True))
        wrong = [first_wrong_step(question=question, steps=path) for path in paths]
        assert wrong[0] is None and None not in wrong[1:]
        assert group.shared == tuple(path[:-1] == paths[0][:-1] for path in paths[1:])


@pytest.mark.parametrize(("data", "message"), [
    ({"arms": ["nobody"]}, "has no arm 'nobody'; it has warmup, grpo"),
    ({"arms": ["warmup"]}, "warmup has no stored responses"),
    ({"step_separator": "%"}, "make no group of a right and a wrong step for train"),
    ({"max_tokens": 600}, "data.max_tokens is 600, but the model takes 512"),
    ({"positives": 1, "validation_share": 0.9}, "train.batch_size is 64, but there are"),
])  # fmt: skip
def test_data_that_cannot_be_trained_on_is_an_error_before_a_folder_is_made(run, tmp_path, data, message: str):
    with pytest.raises(UserError, match=message):
        train_reward_model(config(run, tmp_path, data=data, batch_size=64 if "validation_share" in data else 4))
    assert not list(tmp_path.iterdir())
