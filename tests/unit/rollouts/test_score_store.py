
import pytest
from helpers.responses import scored

from nemo_edo.errors import UserError
from nemo_edo.rollouts.score_store import ScoreStore, StepScores, rollouts_checksum

SCORES = {("test-1", 0): StepScores((0.5, -1.25)), ("test-1", 1): StepScores((2.0,)), ("test-2", 0): StepScores((0.1,))}
OF = {"rollouts": "abc", "made_by": "models/prm"}


def test_scores_read_back_exactly_with_their_maker_unless_they_are_of_other_responses(tmp_path):
    store = ScoreStore(tmp_path / "grpo" / "prm")
    path = store.write("sampled", SCORES, **OF)
    assert path == tmp_path / "grpo" / "prm" / "sampled.parquet"
    assert store.read("sampled") == store.read("sampled", rollouts="abc") == SCORES
    assert (store.made_by("sampled"), store.rollouts("sampled")) == ("models/prm", "abc")
    assert store.has("sampled") and not store.has("greedy")
    with pytest.raises(UserError, match="sampled.parquet: .* other responses"):
        store.read("sampled", rollouts="other")


def test_scoring_resumes_after_the_parts_up_to_the_first_missing_one(tmp_path):
    store, keys = ScoreStore(tmp_path), list(SCORES)
    for part in (0, 2):
        store.write_part("sampled", part, {keys[part]: SCORES[keys[part]]}, **OF)
    assert store.scored("sampled", **OF) == {keys[0]: SCORES[keys[0]]}
    with pytest.raises(UserError, match="is not finished"):
        store.read("sampled")
    store.write("sampled", SCORES, **OF)
    assert store.scored("sampled", **OF) == SCORES
    assert [path.name for path in tmp_path.iterdir()] == ["sampled.parquet"]


def test_parts_of_an_earlier_evaluation_count_as_nothing_and_of_another_model_are_an_error(tmp_path):
    store = ScoreStore(tmp_path)
    store.write_part("sampled", 0, SCORES, **OF)
    assert store.scored("sampled", rollouts="anew", made_by="models/prm") == {}
    with pytest.raises(UserError, match="has scores of models/prm, not of models/other"):
        store.scored("sampled", rollouts="abc", made_by="models/other")


def test_the_checksum_is_of_problems_samples_and_tokens_in_any_order():
    one, two = scored("test-1", 0, (5, 6)), scored("test-1", 1, (7,))
    checksum = rollouts_checksum([one, two])
    assert rollouts_checksum([two, one]) == checksum
    assert rollouts_checksum([scored("test-1", 0, (5, 6), reward=0.0), two]) == checksum  # scored again: the same text
    others = [
        [one], [one, scored("test-1", 1, (8,))], [one, scored("test-1", 2, (7,))], [one, scored("test-2", 1, (7,))],
        [scored("test-1", 0, (5,)), scored("test-1", 1, (6, 7))],
    ]  # fmt: skip
    assert len({checksum, *map(rollouts_checksum, others)}) == 1 + len(others)
