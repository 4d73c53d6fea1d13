"""Scores in this process, against the formulas of the official models' own code computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2Model

from nemo_edo.errors import UserError
from nemo_edo.rewards.process_reward import ProcessRewardModel, batches, score_rollouts
from nemo_edo.rewards.reward_formats import Encoded, read_reward_folder
from nemo_edo.rewards.reward_heads import load_network, own_class, own_config
from nemo_edo.test_time.search_llm import SearchConfig, SearchLLM, Step, StepPath
from nemo_edo.types import Rollout
from tests.helpers.reward_models import write_own_reward_model, write_qwen_prm, write_skywork_prm

QUESTIONS = {"a": "What is 2 + 3?", "b": "Name a prime above 10."}
PATHS = [
    StepPath(QUESTIONS["a"], ("First, 2 + 3.", "That is 5.", "So 5.")),
    StepPath(QUESTIONS["b"], ("11.",)),
    StepPath(QUESTIONS["b"], ("It is 13, since nothing but 1 and 13 divides it, as one sees by trying.", "13.")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen": write_qwen_prm(root / "qwen"),
        "skywork": write_skywork_prm(root / "skywork"),
        "decoder": write_own_reward_model(root / "decoder"),
        "encoder": write_own_reward_model(root / "encoder", "modernbert"),
    }


@pytest.fixture(scope="module")
def models(folders) -> dict[str, ProcessRewardModel]:
    return {name: ProcessRewardModel(folder, device="cpu") for name, folder in folders.items()}


def scores_of(model: ProcessRewardModel, paths: list[StepPath]) -> list[tuple[float, ...]]:
    return model.score_encoded([model.format.encode(path) for path in paths])


@torch.no_grad()
def qwen2_hidden(folder: Path, ids: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The last hidden states [T, D] of transformers' Qwen2 with the folder's weights, and all of these."""
    weights = load_file(folder / "model.safetensors")
    body = Qwen2Model(Qwen2Config.from_pretrained(folder)).eval()
    names = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    body.load_state_dict(names)
    return body(torch.tensor([ids])).last_hidden_state[0], weights


# --- the official formulas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_qwen_scores_are_the_softmax_of_its_two_classes_at_the_step_tokens(folders, models, path: StepPath):
    [encoded] = models["qwen"].format.encode(path)
    hidden, w = qwen2_hidden(folders["qwen"], encoded.ids)
    logits = F.linear(F.relu(F.linear(hidden, w["score.0.weight"], w["score.0.bias"])),
                      w["score.2.weight"], w["score.2.bias"])
    expected = torch.softmax(logits, dim=-1)[list(encoded.ends), 1]
    assert scores_of(models["qwen"], [path])[0] == pytest.approx(expected.tolist(), abs=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_skywork_scores_are_the_sigmoid_of_its_value_head_at_the_line_breaks(folders, models, path: StepPath):
    [encoded] = models["skywork"].format.encode(path)
    hidden, w = qwen2_hidden(folders["skywork"], encoded.ids)
    values = F.linear(hidden, w["v_head.summary.weight"], w["v_head.summary.bias"])[:, 0]
    expected = torch.sigmoid(values)[list(encoded.ends)]
    assert scores_of(models["skywork"], [path])[0] == pytest.approx(expected.tolist(), abs=2e-6)


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_own_scores_are_transformers_own_of_each_path_by_itself(folders, models, name: str):
    network = AutoModelForSequenceClassification.from_pretrained(folders[name]).eval()
    for path, scores in zip(PATHS, scores_of(models[name], PATHS), strict=True):
        for length, score in enumerate(scores, start=1):
            ids = models[name].format.last(StepPath(path.question, path.steps[:length]))
            with torch.no_grad():
                expected = torch.sigmoid(network(torch.tensor([ids])).logits[0, 0])
            assert score == pytest.approx(float(expected), abs=2e-6)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "skywork", "decoder", "encoder"])
def test_a_paths_scores_do_not_depend_on_what_shares_the_call(folders, models, name: str):
    together = scores_of(models[name], PATHS)
    assert together == scores_of(models[name], PATHS)  # to the last bit
    alone = [scores_of(models[name], [path])[0] for path in PATHS]
    cut = ProcessRewardModel(folders[name], device="cpu", batch_tokens=1)
    for scores in (alone, scores_of(models[name], PATHS[::-1])[::-1], scores_of(cut, PATHS)):
        assert [len(one) for one in scores] == [len(path.steps) for path in PATHS]
        for one, other in zip(scores, together, strict=True):
            assert one == pytest.approx(other, abs=2e-6)
    assert len({score for scores in together for score in scores}) == 6


def test_batches_hold_every_sequence_once_longest_first_within_the_limit():
    parts = [Encoded(tuple(range(length)), (length - 1,)) for length in (3, 9, 4, 4, 1, 12)]
    made = list(batches(parts, 10))
    assert [len(part.ids) for batch in made for part in batch] == [12, 9, 4, 4, 3, 1]
    assert all(len(batch) == 1 or len(batch) * len(batch[0].ids) <= 10 for batch in made)
    assert [len(batch) for batch in made] == [1, 1, 2, 2]


# --- a search's scorer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "skywork", "decoder", "encoder"])
def test_a_searchs_reward_is_the_last_steps_score_and_its_embedding_is_what_the_head_sees(folders, models, name: str):
    found = models[name].score(PATHS)
    last = [scores[-1] for scores in scores_of(models[name], PATHS)]
    assert [one.reward for one in found] == pytest.approx(last, abs=2e-6)
    network = load_network(read_reward_folder(folders[name]), torch.float32)
    head = next(getattr(network, part) for part in ("score", "v_head", "classifier") if hasattr(network, part))
    for one in found:
        assert one.embedding.shape == (128,)
        with torch.no_grad():
            logits = head(one.embedding)
        margin = logits[0] if len(logits) == 1 else logits[1] - logits[0]
        assert one.reward == pytest.approx(float(torch.sigmoid(margin)), abs=2e-6)


def test_a_search_runs_with_it_from_the_question_on(models):
    class Proposer:
        def propose(self, paths, count, seeds):
            return [[Step(f"step {seed % 7} {place}", len(path.steps) == 1) for place in range(count)]
                    for path, seed in zip(paths, seeds, strict=True)]

    [result] = SearchLLM(Proposer(), models["decoder"], SearchConfig(3, 2, 2, 0.5)).search(["Why?"], seed=1)
    assert result.finished and len(result.nodes) == 7
    assert result.nodes[result.best].reward == max(node.reward for node in result.nodes if node.finished)


def test_a_searchs_path_beyond_the_context_is_an_error(models):
    with pytest.raises(UserError, match="1 of 2 paths of the search are longer .* 512 tokens"):
        models["decoder"].score([PATHS[0], StepPath("x" * 600)])


# --- responses ------------------------------------------------------------------------------------------------------


def rollout(text: str, problem: str = "a", sample: int = 0) -> Rollout:
    return Rollout(problem, sample, (1,), (2,), (-0.5,), text, True, 0, 0)


def test_responses_are_cut_at_the_formats_separator_or_at_another_one(models):
    text = "one\ntwo\n\nthree\n\n\n"
    lengths = {name: len(score_rollouts(models[name], [rollout(text)], QUESTIONS)[0].steps) for name in models}
    assert lengths == {"qwen": 2, "skywork": 3, "decoder": 3, "encoder": 3}
    [scores] = score_rollouts(models["skywork"], [rollout(text)], QUESTIONS, separator="\n\n")
    assert len(scores.steps) == 2
    expected = scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("one\ntwo", "three"))])[0]
    assert scores.steps == pytest.approx(expected, abs=1e-7)


def test_an_empty_response_is_one_empty_step(models):
    [scores] = score_rollouts(models["skywork"], [rollout(" \n ")], QUESTIONS)
    assert scores.steps == scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("",))])[0]


def test_a_response_beyond_the_context_is_an_error_or_scores_zero(models):
    responses = [rollout("short"), rollout("x\n" * 300, "b"), rollout("short", "b")]
    with pytest.raises(UserError, match="1 of 3 responses are longer than .* 512 tokens .the longest has"):
        score_rollouts(models["decoder"], responses, QUESTIONS)
    scores = score_rollouts(models["decoder"], responses, QUESTIONS, zero_too_long=True)
    assert scores[1].steps == (0.0,) * 300
    expected = score_rollouts(models["decoder"], [responses[0], responses[2]], QUESTIONS)
    assert [scores[0], scores[2]] == expected


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "skywork"])
def test_code_that_comes_with_a_folder_is_not_run(folders, models, name: str):
    assert len(list(folders[name].glob("*.py"))) == 2
    assert not (folders[name] / "it_ran").exists()


@pytest.mark.parametrize(("name", "lost"), [("qwen", "score.2.bias"), ("skywork", "v_head.summary.weight"),
                                            ("qwen", "model.layers.1.mlp.up_proj.weight"), ("decoder", "score.weight")])
def test_a_folder_that_lacks_a_weight_is_refused(folders, tmp_path, name: str, lost: str):
    for path in folders[name].iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folders[name] / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"missing_keys: {lost}"):
        ProcessRewardModel(tmp_path, device="cpu")


def test_a_folder_with_strange_weights_is_refused(folders, tmp_path):
    for path in folders["qwen"].iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = {**load_file(folders["qwen"] / "model.safetensors"), "v_head.summary.weight": torch.zeros(1, 128)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="unexpected_keys: v_head.summary.weight"):
        ProcessRewardModel(tmp_path, device="cpu")


def test_a_device_that_is_not_there_is_an_error(folders):
    with pytest.raises(UserError, match="device is 'tpu'"):
        ProcessRewardModel(folders["qwen"], device="tpu")


@pytest.mark.parametrize(("model_type", "message"), [("vit", "no sequence classification"),
                                                     ("roberta", "head of RobertaForSequenceClassification is no")])
def test_a_model_type_without_a_head_of_one_layer_is_refused(model_type: str, message: str):
    from transformers import AutoConfig

    with pytest.raises(UserError, match=message):
        own_class(own_config(AutoConfig.for_model(model_type), 0), "model.path")
