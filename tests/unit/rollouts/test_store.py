import errno
import os
import shutil

import numpy as np
import pytest
from helpers.responses import scored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_edo.errors import UserError
from nemo_edo.rollouts import store as module
from nemo_edo.rollouts.store import RolloutStore, ScoreStore, StepScores, estimate_bytes
from nemo_edo.types import Rollout, ScoredRollout

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
TEXT = st.text(max_size=12)


@st.composite
def scored_rollouts(draw):
    response = draw(IDS)
    logprobs = st.floats(max_value=0, width=32, allow_nan=False)
    rollout = Rollout(
        draw(st.sampled_from(["train-1", "train-2", "train-10"])), draw(st.integers(0, 99)), draw(IDS), response,
        tuple(draw(logprobs) for _ in response), draw(TEXT), draw(st.booleans()),
        draw(st.integers(0, 10**6)), draw(st.integers(-(2**63), 2**63 - 1)),
    )
    reward, answer = draw(st.floats(allow_nan=False)), draw(st.none() | TEXT)
    parts = draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2))
    return ScoredRollout(rollout, reward, answer, draw(st.booleans()), draw(TEXT), parts, draw(st.floats(-2, 2)))


def key(one: ScoredRollout) -> tuple[str, int]:
    return one.rollout.problem_id, one.rollout.sample_index


def write_shard(store, rollouts, rank: int, world_size: int) -> None:
    """As earlier versions wrote iteration 3."""
    path = store.write(3, rollouts)
    path.rename(path.with_name(f"rank_{rank}_of_{world_size}.parquet"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(st.lists(scored_rollouts(), max_size=6, unique_by=key), st.integers(1, 3))
def test_rollouts_read_back_exactly_and_in_order_also_from_the_shards_of_several_ranks(tmp_path, rollouts, world_size):
    shutil.rmtree(tmp_path / "iter_00003", ignore_errors=True)
    store = RolloutStore(tmp_path)
    for rank in range(world_size):
        write_shard(store, rollouts[rank::world_size], rank, world_size)
    assert store.read(3) == sorted(rollouts, key=key)


@pytest.mark.parametrize(("shards", "message"), [
    ([], "iter_00003: has no rollouts"),
    ([(0, 3), (2, 3)], r"iter_00003: has rank_0_of_3.parquet, rank_2_of_3.parquet"),
    ([(0, 2), (0, 1)], r"iter_00003: has rank_0_of_1.parquet, rank_0_of_2.parquet")])
def test_shards_that_do_not_make_one_iteration_are_an_error(tmp_path, shards, message: str):
    """Each is (rank, world size)."""
    store = RolloutStore(tmp_path)
    for iteration in range(3):
        store.write(iteration, [scored()])
    for shard in shards:
        write_shard(store, [scored()], *shard)
    for read in (lambda: store.read_table(3, ["reward"]), lambda: store.read(3)):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize(("code", "told"), [
    (errno.ENOSPC, UserError), (errno.EDQUOT, UserError), (errno.EACCES, PermissionError)])
def test_a_failed_write_keeps_the_old_shard_and_a_full_disk_names_the_folder(tmp_path, monkeypatch, code, told):
    store = RolloutStore(tmp_path)
    for text in ("older", "old"):
        path = store.write(0, [scored(text=text)])

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(told, match=str(path.parent) if told is UserError else None) as error:
        store.write(0, [scored(text="new")])
    assert (error.value.__cause__ or error.value).errno == code
    assert [one.rollout.text for one in store.read(0)] == ["old"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("rollouts", "prompt", "response"), [(0, 0, 0), (1, 5, 5), (300, 40, 200), (200, 0, 1)])
def test_estimate_bounds_the_size_of_incompressible_rollouts(tmp_path, rollouts, prompt, response):
    rng = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 2**31, count).tolist())

    batch = [scored(f"train-{index}", ids=ids(response), prompt_ids=ids(prompt), seed=int(rng.integers(2**62)),
                    response_logprobs=tuple(rng.normal(size=response).tolist()),
                    text="".join(map(chr, rng.integers(32, 127, 5 * response)))) for index in range(rollouts)]
    size = RolloutStore(tmp_path).write(0, batch).stat().st_size
    assert size <= estimate_bytes(rollouts, prompt, response)
    assert rollouts < 300 or estimate_bytes(rollouts, prompt, response) < 2 * size


UNSORTED = [scored("train-2", 1), scored("train-2", 0), scored("train-1", 5), scored("train-10", 2)]


def test_parts_are_read_in_their_order_up_to_the_first_that_is_missing_until_the_shard_takes_their_place(tmp_path):
    store = RolloutStore(tmp_path)
    assert store.stored(4) == []
    paths = [store.write_part(4, [one]) for one in UNSORTED]
    assert store.stored(4) == UNSORTED
    paths[2].unlink()
    assert store.stored(4) == UNSORTED[:2]
    with pytest.raises(ValueError, match="iter_00004: has no rollouts"):
        store.read(4)
    shard = store.write(4, UNSORTED)
    assert list(shard.parent.iterdir()) == [shard]
    assert store.stored(4) == UNSORTED  # as they were generated, not sorted as read returns them
    store.write_part(4, UNSORTED[:1])  # as a kill may leave it behind
    assert store.stored(4) == UNSORTED


def test_rollouts_of_another_tokenizer_are_refused_with_both_names(tmp_path):
    RolloutStore(tmp_path, tokenizer="abc (128 tokens)").write(0, [scored()])
    other = RolloutStore(tmp_path, tokenizer="def (256 tokens)")
    for read in (other.read, other.stored, lambda iteration: other.read_table(iteration, ["reward"])):
        with pytest.raises(UserError, match=r"another tokenizer: abc \(128 tokens\); .* def \(256 tokens\)"):
            read(0)
    assert RolloutStore(tmp_path, tokenizer="abc (128 tokens)").read(0) == RolloutStore(tmp_path).read(0) == [scored()]


def test_a_tokenizers_identity_is_that_of_its_vocabulary():
    class Tokenizer(dict):
        get_vocab = dict.copy

    def identity(**vocabulary: int) -> str:
        return module.tokenizer_identity(Tokenizer(vocabulary))

    assert identity(a=0, b=1) == identity(b=1, a=0)
    assert identity(a=0, b=1).endswith("(2 tokens)")
    assert len({identity(a=0, b=1), identity(a=1, b=0), identity(a=0, c=1), identity(a=0)}) == 4


SCORES = {("test-1", 0): StepScores((0.5, -1.25)), ("test-1", 1): StepScores((2.0,)), ("test-2", 0): StepScores((0.1,))}
OF = {"rollouts": "abc", "made_by": "models/prm"}


def test_scoring_resumes_after_its_parts_of_the_same_responses_and_model_and_the_whole_reads_back_exactly(tmp_path):
    store, keys = ScoreStore(tmp_path), list(SCORES)
    for key in keys[:2]:
        store.write_part("sampled", {key: SCORES[key]}, **OF)
    assert store.scored("sampled", **OF) == {key: SCORES[key] for key in keys[:2]}
    assert store.scored("sampled", rollouts="anew", made_by="models/prm") == {}
    with pytest.raises(UserError, match="has scores of models/prm, not of models/other"):
        store.scored("sampled", rollouts="abc", made_by="models/other")
    with pytest.raises(UserError, match="not finished"):
        store.read("sampled")
    assert store.write("sampled", SCORES, **OF) == tmp_path / "sampled.parquet"
    assert store.scored("sampled", **OF) == SCORES and store.read("sampled") == (SCORES, "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["sampled.parquet"]


def test_the_checksum_is_of_problems_samples_and_tokens_in_any_order():
    one, two = scored("test-1", 0, (5, 6)), scored("test-1", 1, (7,))
    checksum = module.rollouts_checksum([one, two])
    for same in ([two, one], [scored("test-1", 0, (5, 6), reward=0.0), two]):  # scored again: the same text
        assert module.rollouts_checksum(same) == checksum
    others = [
        [one], [one, scored("test-1", 1, (8,))], [one, scored("test-1", 2, (7,))], [one, scored("test-2", 1, (7,))],
        [scored("test-1", 0, (5,)), scored("test-1", 1, (6, 7))]]
    assert len({checksum, *map(module.rollouts_checksum, others)}) == 1 + len(others)
