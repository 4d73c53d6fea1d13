import pytest
from helpers.responses import scored

from nemo_edo.errors import UserError
from nemo_edo.rollouts.score_store import ScoreStore, StepScores, rollouts_checksum

SCORES = {("test-1", 0): StepScores((0.5, -1.25)), ("test-1", 1): StepScores((2.0,)), ("test-2", 0): StepScores((0.1,))}
OF = {"rollouts": "abc", "made_by": "models/prm"}


def test_scoring_resumes_after_its_parts_and_the_whole_reads_back_exactly(tmp_path):
    store, keys = ScoreStore(tmp_path), list(SCORES)
    for key in keys[:2]:
        store.write_part("sampled", {key: SCORES[key]}, **OF)
    assert store.scored("sampled", **OF) == {key: SCORES[key] for key in keys[:2]}
    with pytest.raises(UserError, match="not finished"):
        store.read("sampled")
    assert store.write("sampled", SCORES, **OF) == tmp_path / "sampled.parquet"
    assert store.scored("sampled", **OF) == SCORES and store.read("sampled") == (SCORES, "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["sampled.parquet"]


def test_parts_of_an_earlier_evaluation_count_as_nothing_and_of_another_model_are_an_error(tmp_path):
    store = ScoreStore(tmp_path)
    store.write_part("sampled", SCORES, **OF)
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
