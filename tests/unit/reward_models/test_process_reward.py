"""Scores in this process, against the formulas of the official models' own code computed by hand."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.responses import scored
from helpers.reward_models import score_rollouts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2Model

from nemo_edo.errors import UserError
from nemo_edo.reward_models.formats import read_reward_folder
from nemo_edo.reward_models.heads import load_network
from nemo_edo.reward_models.process_reward import ProcessRewardModel
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.types import Rollout

QUESTIONS = {"a": "What is 2 + 3?", "b": "Name a prime above 10."}
PATHS = [
    StepPath(QUESTIONS["a"], ("First, 2 + 3.", "That is 5.", "So 5.")),
    StepPath(QUESTIONS["b"], ("11.",)),
    StepPath(QUESTIONS["b"], ("It is 13, since nothing but 1 and 13 divides it, as one sees by trying.", "13.")),
]


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


def two_classes(hidden, w):
    """Qwen's: the softmax of its two classes."""
    inner = F.relu(F.linear(hidden, w["score.0.weight"], w["score.0.bias"]))
    return torch.softmax(F.linear(inner, w["score.2.weight"], w["score.2.bias"]), dim=-1)[:, 1]


def value_head(hidden, w):
    """Skywork's: the sigmoid of its value head."""
    return torch.sigmoid(F.linear(hidden, w["v_head.summary.weight"], w["v_head.summary.bias"])[:, 0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "formula"), [("qwen", two_classes), ("skywork", value_head)])
def test_scores_are_the_official_formula_at_the_steps_last_tokens(folders, models, name: str, formula, path: StepPath):
    [encoded] = models[name].format.encode(path)
    expected = formula(*qwen2_hidden(folders[name], encoded.ids))[list(encoded.ends)]
    assert scores_of(models[name], [path])[0] == pytest.approx(expected.tolist(), abs=2e-6)


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_our_models_scores_are_those_of_transformers_for_each_path(folders, models, name: str):
    network = AutoModelForSequenceClassification.from_pretrained(folders[name]).eval()
    for path, scores in zip(PATHS, scores_of(models[name], PATHS), strict=True):
        for length, score in enumerate(scores, start=1):
            ids = models[name].format.last(StepPath(path.question, path.steps[:length]))
            with torch.no_grad():
                expected = torch.sigmoid(network(torch.tensor([ids])).logits[0, 0])
            assert score == pytest.approx(float(expected), abs=2e-6)


@pytest.mark.parametrize("name", ["qwen", "skywork", "decoder", "encoder"])
def test_a_paths_scores_do_not_depend_on_other_paths_of_the_call(folders, models, name: str):
    together = scores_of(models[name], PATHS)
    assert together == scores_of(models[name], PATHS)  # to the last bit
    alone = [scores_of(models[name], [path])[0] for path in PATHS]
    cut = ProcessRewardModel(folders[name], device="cpu", batch_tokens=1)
    for scores in (alone, scores_of(models[name], PATHS[::-1])[::-1], scores_of(cut, PATHS)):
        assert [len(one) for one in scores] == [len(path.steps) for path in PATHS]
        for one, other in zip(scores, together, strict=True):
            assert one == pytest.approx(other, abs=2e-6)
    assert len({score for scores in together for score in scores}) == 6


@pytest.mark.parametrize("name", ["qwen", "skywork", "decoder", "encoder"])
def test_a_searchs_reward_is_the_last_steps_score_and_its_embedding_the_heads_input(folders, models, name: str):
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


def rollout(text: str, problem: str = "a") -> Rollout:
    return scored(problem, text=text).rollout


def test_responses_are_split_at_the_formats_separator_or_another(models):
    text = "one\ntwo\n\nthree\n\n\n"
    lengths = {name: len(score_rollouts(models[name], [rollout(text)], QUESTIONS)[0].steps) for name in models}
    assert lengths == {"qwen": 2, "skywork": 3, "decoder": 3, "encoder": 3}
    [scores] = score_rollouts(models["skywork"], [rollout(text)], QUESTIONS, separator="\n\n")
    assert len(scores.steps) == 2
    expected = scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("one\ntwo", "three"))])[0]
    assert scores.steps == pytest.approx(expected, abs=1e-7)
    [blank] = score_rollouts(models["skywork"], [rollout(" \n ")], QUESTIONS)
    assert blank.steps == scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("",))])[0]


def test_a_path_or_a_response_beyond_the_context_is_an_error_and_the_response_may_score_zero(models):
    with pytest.raises(UserError, match="1 of 2 paths .* 512 tokens"):
        models["decoder"].score([PATHS[0], StepPath("x" * 600)])
    responses = [rollout("short"), rollout("x\n" * 300, "b"), rollout("short", "b")]
    with pytest.raises(UserError, match="1 of 3 responses .* 512 tokens"):
        score_rollouts(models["decoder"], responses, QUESTIONS)
    scores = score_rollouts(models["decoder"], responses, QUESTIONS, zero_too_long=True)
    assert scores[1].steps == (0.0,) * 300
    expected = score_rollouts(models["decoder"], [responses[0], responses[2]], QUESTIONS)
    assert [scores[0], scores[2]] == expected


@pytest.mark.parametrize("name", ["qwen", "skywork"])
def test_code_in_a_folder_is_not_run_and_an_unknown_device_is_refused(folders, models, name: str):
    assert len(list(folders[name].glob("*.py"))) == 2
    assert not (folders[name] / "it_ran").exists()
    with pytest.raises(UserError, match="device is 'tpu'"):
        ProcessRewardModel(folders[name], device="tpu")


@pytest.mark.parametrize(("name", "changed", "fault"), [
    ("qwen", "score.2.bias", "missing"), ("skywork", "v_head.summary.weight", "missing"),
    ("decoder", "score.weight", "missing"), ("qwen", "v_head.summary.weight", "unexpected")])
def test_a_folder_with_other_weights_than_the_networks_is_refused(folders, tmp_path, name, changed: str, fault: str):
    for path in folders[name].iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folders[name] / "model.safetensors")
    if weights.pop(changed, None) is None:
        weights[changed] = torch.zeros(1, 128)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{fault}_keys: {changed}"):
        ProcessRewardModel(tmp_path, device="cpu")
