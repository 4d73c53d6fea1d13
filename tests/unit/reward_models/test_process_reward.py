"""Scores of a process reward model, against the formulas of the official models' own code computed by hand; and of a
run's stored responses: what is stored, resume after a kill, and errors before a model is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.responses import scored
from helpers.reward_models import score_rollouts, write_own_reward_model
from helpers.stored_run import write_stored_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2Model

from nemo_edo.config import ScoreConfig, ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.reward_models import process_reward as module
from nemo_edo.reward_models.formats import load_format, read_reward_folder
from nemo_edo.reward_models.heads import load_network
from nemo_edo.reward_models.process_reward import ProcessRewardModel, encode_responses, made_by, score_run
from nemo_edo.rollouts.store import ScoreStore, rollouts_checksum
from nemo_edo.run.stored_run import open_run
from nemo_edo.test_time.search_llm import StepPath

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


def test_responses_are_split_at_the_formats_separator_or_another(models):
    said, blank = (scored("a", text=text).rollout for text in ("one\ntwo\n\nthree\n\n\n", " \n "))
    lengths = {name: len(score_rollouts(models[name], [said], QUESTIONS)[0].steps) for name in models}
    assert lengths == {"qwen": 2, "skywork": 3, "decoder": 3, "encoder": 3}
    [scores] = score_rollouts(models["skywork"], [said], QUESTIONS, separator="\n\n")
    expected = scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("one\ntwo", "three"))])[0]
    assert scores.steps == pytest.approx(expected, abs=1e-7)
    [scores] = score_rollouts(models["skywork"], [blank], QUESTIONS)
    assert scores.steps == scores_of(models["skywork"], [StepPath(QUESTIONS["a"], ("",))])[0]


def test_code_in_a_folder_is_not_run_and_a_path_beyond_the_context_or_an_unknown_device_is_refused(folders, models):
    for name in ("qwen", "skywork"):
        assert len(list(folders[name].glob("*.py"))) == 2 and not (folders[name] / "it_ran").exists()
    with pytest.raises(UserError, match="1 of 2 paths .* 512 tokens"):
        models["decoder"].score([PATHS[0], StepPath("x" * 600)])
    with pytest.raises(UserError, match="device is 'tpu'"):
        ProcessRewardModel(folders["qwen"], device="tpu")


@pytest.mark.parametrize(("name", "changed", "fault"), [
    ("qwen", "score.2.bias", "missing"), ("skywork", "v_head.summary.weight", "missing"),
    ("decoder", "score.weight", "missing"), ("qwen", "v_head.summary.weight", "unexpected")])
def test_a_folder_with_other_weights_than_the_networks_is_refused(folders, tmp_path, name, changed: str, fault: str):
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    weights = load_file(folders[name] / "model.safetensors")
    if weights.pop(changed, None) is None:
        weights[changed] = torch.zeros(1, 128)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{fault}_keys: {changed}"):
        ProcessRewardModel(tmp_path, device="cpu")


# --- the stored responses of a run ------------------------------------------------------------------------------------


@pytest.fixture
def run(run, tmp_path) -> Path:
    """A copy, as commands write into it."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def model(folders) -> Path:
    return folders["decoder"]


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The number of responses in each call of a model in this process."""
    calls, original = [], ProcessRewardModel.score_encoded
    monkeypatch.setattr(ProcessRewardModel, "score_encoded",
                        lambda self, encoded: calls.append(len(encoded)) or original(self, encoded))
    return calls


def score(run: Path, model: Path | str, name: str = "small", arm: str | None = None, tokenizer=None, **settings):
    return score_run(run, str(model), name, arm, tokenizer, ScoreConfig(**{"device": "cpu", **settings}))


def test_every_response_of_every_final_evaluation_gets_the_scores_of_its_steps(run, model):
    said = score(run, model)
    stored = open_run(run)
    assert len(said) == 4 and all("new)" in line for line in said)
    questions, scorer = stored.questions("test"), ProcessRewardModel(model, device="cpu")
    for policy in ("warmup", "grpo"):
        for kind, each in (("greedy", 1), ("sampled", 5)):
            responses = stored.evaluation_responses(policy, kind)
            store = ScoreStore(run / "scores" / policy / "small")
            found, checksum = store.read(kind)
            assert checksum == rollouts_checksum(responses)
            expected = score_rollouts(scorer, [one.rollout for one in responses], questions)
            assert len(found) == 8 * each
            for one, scores in zip(responses, expected, strict=True):
                steps = found[one.rollout.problem_id, one.rollout.sample_index].steps
                assert steps == pytest.approx(scores.steps, abs=1e-6) and len(steps) == 3
            assert len(store.scored(kind, rollouts=checksum, made_by=made_by(model))) == 8 * each
            assert not list(store.folder.glob("*.parts"))


def test_a_killed_command_resumes(run, model, monkeypatch, asked):
    score(run, model, "whole", arm="grpo")
    write_part, parts = ScoreStore.write_part, []

    def dies(self, kind, scores, **label):
        parts.append(kind)
        if len(parts) == 4:
            raise KeyboardInterrupt
        return write_part(self, kind, scores, **label)

    with monkeypatch.context() as patch:
        patch.setattr(ScoreStore, "write_part", dies)
        with pytest.raises(KeyboardInterrupt):
            score(run, model, arm="grpo", part_size=10)
    assert parts == ["greedy", "sampled", "sampled", "sampled"]
    asked.clear()
    said = score(run, model, arm="grpo", part_size=10)
    assert asked == [10, 10] and "20 new" in said[1]
    one, other = (ScoreStore(run / "scores" / "grpo" / name).read("sampled")[0] for name in ("small", "whole"))
    assert one.keys() == other.keys() and len(one) == 40
    assert all(one[key].steps == pytest.approx(other[key].steps, abs=1e-6) for key in one)


def test_stored_scores_are_computed_again_only_for_new_responses_and_another_model_needs_another_name(
        run, tmp_path, asked):
    model = write_own_reward_model(tmp_path / "model")
    for kept in (False, True):
        said = score(run, model, arm="grpo")
        assert (["none new" in line for line in said], asked) == ([kept, kept], [8, 40])
    other = write_stored_run(tmp_path / "other")
    for kind in ("greedy", "sampled"):
        name = Path("evaluations") / "grpo" / kind / "iter_00002" / "rank_0_of_1.parquet"
        (run / name).write_bytes((other / name).read_bytes())
    score(run, model, arm="grpo")
    assert asked == [8, 40, 8, 40]
    write_own_reward_model(model, seed=1)  # another training, in the same folder
    with pytest.raises(UserError, match="scores of .*another name"):
        score(run, model, arm="grpo")


@pytest.mark.parametrize(("given", "message"), [
    ({"name": "oracle"}, "'oracle'"),
    ({"arm": "nobody"}, "'nobody'.* warmup, grpo"),
    ({"model": "http://node7:8000"}, "config.json.* --tokenizer"),
    ({"tokenizer": Path("x")}, "--tokenizer is for a model at a URL"),
    ({"servers": ServersConfig(urls=["http://node7:8000"])}, "servers.urls"),
])  # fmt: skip
def test_a_wrong_command_is_an_error_before_a_model_is_loaded(run, model, monkeypatch, given: dict, message: str):
    monkeypatch.setattr(module, "ProcessRewardModel", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message):
        score(run, **{"model": model, **given})
    with pytest.raises(UserError, match="is not the folder of a run"):
        score(run.parent, model)
    (run / "evaluations" / "grpo.json").unlink()
    with pytest.raises(UserError, match="grpo has not been evaluated yet"):
        score(run, model, arm="grpo")


def test_responses_beyond_the_context_score_zero_or_are_found_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    small, stored = write_own_reward_model(tmp_path / "small"), open_run(run)
    responses = [one.rollout for one in stored.evaluation_responses("grpo", "sampled")]
    form = load_format(read_reward_folder(small))
    encoded = encode_responses(responses, stored.questions("test"), form, separator=None)
    lengths = [len(part.ids) for parts in encoded for part in parts]
    limit, fields = max(lengths) - 1, json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": limit}))
    said = score(run, small, arm="grpo", too_long="zero")
    found = ScoreStore(run / "scores" / "grpo" / "small").read("sampled")[0]
    zeros = [one for one in found.values() if one.steps == (0.0, 0.0, 0.0)]
    assert len(zeros) == sum(length > limit for length in lengths) > 0
    assert f"{len(zeros)} longer than the model's context with score 0" in said[1]
    monkeypatch.setattr(module, "ProcessRewardModel", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=f"context of {limit} tokens"):
        score(run, small, "another", arm="grpo")
