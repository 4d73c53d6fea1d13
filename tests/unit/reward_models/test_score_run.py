"""Scores of a run's stored responses: what is stored, resume after a kill, and errors before a model is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.reward_models import score_rollouts, write_own_reward_model
from helpers.stored_run import write_stored_run

from nemo_edo.config import ScoreConfig, ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.reward_models import process_reward as module
from nemo_edo.reward_models.formats import load_format, read_reward_folder
from nemo_edo.reward_models.process_reward import ProcessRewardModel, encode_responses, made_by, score_run
from nemo_edo.rollouts.store import ScoreStore, rollouts_checksum
from nemo_edo.run.stored_run import open_run


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
    calls = []
    original = ProcessRewardModel.score_encoded

    def counted(self, encoded):
        calls.append(len(encoded))
        return original(self, encoded)

    monkeypatch.setattr(ProcessRewardModel, "score_encoded", counted)
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


def test_a_killed_command_resumes(run, model, tmp_path, monkeypatch, asked):
    whole = Path(shutil.copytree(run, tmp_path / "again"))
    score(whole, model, arm="grpo")
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
    stores = [ScoreStore(folder / "scores" / "grpo" / "small") for folder in (run, whole)]
    one, other = (store.read("sampled")[0] for store in stores)
    assert one.keys() == other.keys() and len(one) == 40
    assert all(one[key].steps == pytest.approx(other[key].steps, abs=1e-6) for key in one)


def test_stored_scores_are_computed_again_only_for_newly_generated_responses(run, model, asked):
    for kept in (False, True):
        said = score(run, model, arm="grpo")
        assert (["none new" in line for line in said], asked) == ([kept, kept], [8, 40])
    other = write_stored_run(run.parent / "other")
    for kind in ("greedy", "sampled"):
        name = Path("evaluations") / "grpo" / kind / "iter_00002" / "rank_0_of_1.parquet"
        (run / name).write_bytes((other / name).read_bytes())
    score(run, model, arm="grpo")
    assert asked == [8, 40, 8, 40]


def test_another_model_under_the_same_name_is_refused_even_in_the_same_folder(run, model, tmp_path):
    copy = write_own_reward_model(tmp_path / "copy")
    score(run, copy, arm="grpo")
    write_own_reward_model(copy, seed=1)  # another training
    with pytest.raises(UserError, match="scores of .*another name"):
        score(run, copy, arm="grpo")


@pytest.mark.parametrize(("given", "message"), [
    ({"name": "oracle"}, "'oracle'"),
    ({"arm": "nobody"}, "'nobody'.* warmup, grpo"),
    ({"model": "http://node7:8000"}, "config.json.* --tokenizer"),
    ({"tokenizer": Path("x")}, "--tokenizer is for a model at a URL"),
    ({"servers": ServersConfig(urls=["http://node7:8000"])}, "servers.urls"),
])  # fmt: skip
def test_a_wrong_command_is_an_error_before_a_model_is_loaded(run, model, monkeypatch, given: dict, message: str):
    monkeypatch.setattr(module, "_scorer", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message):
        score(run, **{"model": model, **given})
    with pytest.raises(UserError, match="is not the folder of a run"):
        score(run.parent, model)
    (run / "evaluations" / "grpo.json").unlink()
    with pytest.raises(UserError, match="grpo has not been evaluated yet"):
        score(run, model, arm="grpo")


def test_responses_beyond_the_context_are_found_before_a_model_is_loaded_or_score_zero(run, tmp_path, monkeypatch):
    small = write_own_reward_model(tmp_path / "small")
    fields = json.loads((small / "config.json").read_text())
    stored = open_run(run)
    responses = [one.rollout for one in stored.evaluation_responses("grpo", "sampled")]
    encoded = encode_responses(responses, stored.questions("test"), load_format(read_reward_folder(small)),
                               separator=None)
    lengths = [len(part.ids) for parts in encoded for part in parts]
    limit = max(lengths) - 1
    (small / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": limit}))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_scorer", lambda *_: pytest.fail("a model was loaded"))
        with pytest.raises(UserError, match=f"context of {limit} tokens"):
            score(run, small, arm="grpo")
    said = score(run, small, arm="grpo", too_long="zero")
    found = ScoreStore(run / "scores" / "grpo" / "small").read("sampled")[0]
    zeros = [one for one in found.values() if one.steps == (0.0, 0.0, 0.0)]
    assert len(zeros) == sum(length > limit for length in lengths) > 0
    assert f"{len(zeros)} longer than the model's context with score 0" in said[1]
