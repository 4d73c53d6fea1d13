"""A reward model's training: its data as groups of paths, their loss, its results, and the effect of a kill."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.responses import scored
from helpers.stored_run import LLAMA
from helpers.stored_run import reward_config as config
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from transformers import AutoConfig

from nemo_edo.builtin_task.arithmetic import first_wrong_step
from nemo_edo.config import RewardTrainConfig
from nemo_edo.config.reward_model import RewardDataConfig
from nemo_edo.data.tokenizer import load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.losses import ranking_nce_loss
from nemo_edo.reward_models import step_data
from nemo_edo.reward_models import train as module
from nemo_edo.reward_models.formats import DECODER, OwnFormat, OwnSettings, split_steps
from nemo_edo.reward_models.heads import own_class, own_config
from nemo_edo.reward_models.process_reward import ProcessRewardModel
from nemo_edo.reward_models.step_data import TEST, TRAIN, VALIDATION, StepGroup, collate, held_out, labelled_paths
from nemo_edo.reward_models.train import train_reward_model
from nemo_edo.run.stored_run import open_run
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.types import ScoredRollout

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")


GROUPS = [StepGroup("a", ((3, 4, 5), (3, 9), (3, 4, 6, 7)), (False, True)), StepGroup("b", ((8,), (9, 9)), (True,))]


def test_loss_of_a_batch_is_the_ranking_loss_of_transformers_own_scores(tmp_path):
    torch.manual_seed(0)
    made = own_config(AutoConfig.for_model(**LLAMA, vocab_size=32), 0)
    network = own_class(made, "a test")._from_config(made)
    trainer = module.NCETrainer(
        RewardTrainConfig(l2=0.1), model=network, args=module._arguments(config(tmp_path, tmp_path), tmp_path),
        data_collator=partial(collate, pad_id=0), train_dataset=GROUPS, eval_dataset=GROUPS)
    loss = trainer.compute_loss(network, collate(GROUPS, 0))
    scores = [[network(torch.tensor([path])).logits[0, 0] for path in group.paths] for group in GROUPS]
    negatives = torch.stack([torch.stack(scores[0][1:]), torch.stack([scores[1][1], torch.tensor(0.0)])])
    expected = ranking_nce_loss(torch.stack([scores[0][0], scores[1][0]]), negatives, l2=0.1,
                                negative_mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]])).mean()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)


def test_no_question_is_in_two_parts_and_paths_are_right_and_wrong_as_the_task_checks_them(run):
    stored, tokenizer = open_run(run), load_tokenizer(run / "base")
    form = OwnFormat(tokenizer, OwnSettings(DECODER, "\n"))
    data = step_data.build_step_data(stored, config(run, run).data, form, seed=3)
    questions = {part: {group.problem_id for group in groups} for part, groups in data.groups.items()}
    assert not questions[TRAIN] & questions[VALIDATION] and all(questions.values())
    texts = {**stored.questions("train"), **stored.questions("test")}
    assert questions[TEST] <= set(stored.questions("test")) and questions[TRAIN] <= set(stored.questions("train"))
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


QUESTION = "6 + 1 + 3 + 1"
RIGHT = "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11"


def response(text: str, reward: float = 0.0) -> ScoredRollout:
    return scored("p", reward=reward, text=text)


@pytest.mark.parametrize(("text", "wrong"), [
    ("6 + 3 = 9\n6 + 1 = 7", 1),  # 6 is used up
    ("6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 12", 3), (f"{RIGHT}\n#### 11", 4)])  # continues after its end
def test_first_wrong_step_of_the_built_in_task(text: str, wrong: int):
    assert first_wrong_step(QUESTION, split_steps(text, "\n")) == wrong


def test_steps_are_the_texts_between_separators_without_blank_ones():
    assert split_steps("a\r\n\nb\n \n c\n", "\n") == ("a", "b", " c")
    assert split_steps("a\nb\n\n\nc", "\n\n") == ("a\nb", "c")
    assert split_steps(" \n", "\n") == ()


def test_steps_of_wrong_solutions_are_wrong_unless_a_right_one_begins_with_them():
    right, wrong = labelled_paths("q", [response("a\nb\nc", 1.0), response("a\nx"), response("a\nb\nd")], "\n", None)
    assert right == [("a",), ("a", "b"), ("a", "b", "c")]
    assert wrong == [("a", "x"), ("a", "b", "d")]
    graded = [replace(response(text, reward), success_at=0.5) for text, reward in (("a", 0.7), ("b", 0.3))]
    assert labelled_paths("q", graded, "\n", None) == ([("a",)], [("b",)])


def test_checked_steps_are_wrong_from_the_first_wrong_one_on_and_right_ones_are_of_right_solutions():
    bad = "6 + 3 = 9\n1 + 1 = 3\n9 + 3 = 12\n#### 12"
    unfinished_right = "6 + 3 = 9\n1 + 1 = 2"  # right steps, but of no right solution
    responses = [response(RIGHT, 1.0), response(bad), response(unfinished_right)]
    right, wrong = labelled_paths(QUESTION, responses, "\n", first_wrong_step)
    assert right == [split_steps(RIGHT, "\n")[:length] for length in (1, 2, 3, 4)]
    assert wrong == [split_steps(bad, "\n")[:length] for length in (2, 3, 4)]
    lucky = "6 + 3 = 8\n1 + 1 = 2\n8 + 2 = 11\n#### 11"  # a right answer by a wrong step gives no right step
    right, wrong = labelled_paths(QUESTION, [response(lucky, 1.0)], "\n", first_wrong_step)
    assert (right, len(wrong), wrong[0]) == ([], 4, ("6 + 3 = 8",))


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4))
def test_a_group_ranks_a_right_path_against_wrong_ones_first_those_of_its_prefix(rng, positives: int, negatives: int):
    words = [tuple(rng.choice("abc") for _ in range(rng.randint(1, 3))) for _ in range(12)]
    responses = [response("\n".join(word), float(rng.random() < 0.5)) for word in words]
    right, wrong = labelled_paths("q", responses, "\n", None)
    data = RewardDataConfig(positives=positives, negatives=negatives)
    groups = step_data.step_groups({"p": "q"}, responses, data, None, seed=1)
    assert len(groups) == (min(positives, len(right)) if wrong else 0)
    assert len({group.paths[0] for group in groups}) == len(groups)
    for group in groups:
        positive, *others = group.paths
        assert positive in right and set(others) <= set(wrong)
        assert len(set(others)) == len(others) == min(negatives, len(wrong))
        alike = [(path[:-1] != positive[:-1], len(path) != len(positive)) for path in others]
        assert group.shared == tuple(not other for other, _ in alike)
        siblings = sum(path[:-1] == positive[:-1] for path in wrong)
        assert alike == sorted(alike) and sum(not other for other, _ in alike) == min(siblings, negatives)


def test_held_out_questions_are_a_share_that_depends_on_seed_and_text_alone():
    questions = [f"question {number}" for number in range(1000)]
    out = held_out(questions, 0.2, seed=3)
    assert 150 < len(out) < 250
    assert held_out(questions[::-1][:500], 0.2, seed=3) == out & set(questions[500:])
    assert out != held_out(questions, 0.2, seed=4)
    pairs = [f"question  {number}\n" for number in range(1000)]
    assert {" ".join(text.split()) for text in held_out(pairs, 0.2, seed=3)} == out


def weights(folder: Path) -> bytes:
    return (folder / "rm" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train_reward_model(config(run, out))
    return out


def test_the_trained_folder_scores_steps_and_has_its_results(trained, run):
    results = json.loads((trained / "rm" / "results.json").read_text())
    for part in ("validation", "test"):
        for moment in ("before", "after"):
            one = results["ranking_accuracy"][part][moment]["all"]
            assert 0 <= one["low"] <= one["mean"] <= one["high"] <= 1 and one["pairs"] > 10
    losses = [line["loss"] for line in results["history"] if "loss" in line]
    assert len(losses) == 6 and losses[0] == pytest.approx(math.log(4), abs=0.3)
    model = ProcessRewardModel(trained / "rm" / "model", device="cpu")
    assert model.format.separator == "\n"
    [scores] = model.score_encoded([model.format.encode(StepPath("1 + 2", ("1 + 2 = 3", "#### 3")))])
    assert len(scores) == 2 and not (trained / "rm" / "checkpoints").exists()


def test_a_killed_training_resumes_to_the_same_weights(trained, run, tmp_path, monkeypatch):
    loss, steps = module.NCETrainer.compute_loss, []

    def dies(self, *arguments, **named):
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return loss(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module.NCETrainer, "compute_loss", dies)
        with pytest.raises(KeyboardInterrupt):
            train_reward_model(config(run, tmp_path))
    checkpoints = tmp_path / "rm" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    (checkpoints / "checkpoint-5").mkdir()  # as one that was being written
    assert not (tmp_path / "rm" / "model").exists()
    train_reward_model(config(run, tmp_path))
    assert weights(tmp_path) == weights(trained)


def test_micro_batches_change_the_weights_by_rounding_only(trained, run, tmp_path):
    train_reward_model(config(run, tmp_path, micro_batch_size=2))
    one, other = (load(weights(folder))["score.weight"] for folder in (trained, tmp_path))
    assert (one - other).abs().max() < 2e-4  # Adam's steps are of the size of the learning rate, 1e-3
