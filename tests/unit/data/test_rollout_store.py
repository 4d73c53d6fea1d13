import errno
import os
import shutil

import numpy as np
import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_edo.data.disk_space import DiskSpaceError, check_disk_space, estimate_bytes
from nemo_edo.data.rollout_store import RolloutStore, tokenizer_identity
from nemo_edo.errors import UserError
from nemo_edo.types import Rollout, ScoredRollout

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
TEXT = st.text(max_size=12)
COLUMNS = ["problem_id", "sample_index", "prompt_ids", "response_ids", "text", "response_logprobs", "reward", "reason",
           "answer", "well_formed", "finished", "policy_version", "seed"]


def scored(problem_id: str = "train-1", sample_index: int = 0, **changes: object) -> ScoredRollout:
    fields = {"prompt_ids": (3, 4), "response_ids": (5, 1), "response_logprobs": (-0.5, -1.25), "text": "#### 2",
              "finished": True, "policy_version": 0, "seed": 7}
    rollout = Rollout(problem_id=problem_id, sample_index=sample_index, **fields | changes)
    return ScoredRollout(rollout, reward=1.0, answer="2", well_formed=True, reason="correct")


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
    return ScoredRollout(rollout, reward, answer, draw(st.booleans()), draw(TEXT))


def key(one: ScoredRollout) -> tuple[str, int]:
    return one.rollout.problem_id, one.rollout.sample_index


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(scored_rollouts(), max_size=6, unique_by=key), st.integers(1, 3))
def test_shards_of_all_ranks_read_back_exactly_and_in_order(tmp_path, rollouts, world_size):
    shutil.rmtree(tmp_path / "iter_00003", ignore_errors=True)
    store = RolloutStore(tmp_path)
    for rank in range(world_size):
        path = store.write(3, rollouts[rank::world_size], rank=rank, world_size=world_size)
        assert path == tmp_path / "iter_00003" / f"rank_{rank}_of_{world_size}.parquet"
    assert store.read(3) == sorted(rollouts, key=key)


def test_pandas_reads_the_columns_with_float32_logprobs(tmp_path):
    path = RolloutStore(tmp_path).write(0, [scored()], rank=0, world_size=1)
    frame = pandas.read_parquet(path)
    assert list(frame.columns) == COLUMNS
    assert frame["response_logprobs"][0].dtype == np.float32
    assert frame["response_logprobs"][0].tolist() == [-0.5, -1.25]
    assert frame["answer"][0] == "2"


def test_missing_shard_is_an_error_that_names_its_rank(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(1, [scored()], rank=0, world_size=3)
    store.write(1, [scored(sample_index=1)], rank=2, world_size=3)
    with pytest.raises(ValueError, match=r"iter_00001: the shards of ranks \[1\] of 3 are missing"):
        store.read(1)


def test_iteration_without_rollouts_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="iter_00002: has no rollouts"):
        RolloutStore(tmp_path).read(2)


def test_shards_of_two_world_sizes_are_an_error(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(0, [scored()], rank=0, world_size=1)
    store.write(0, [scored()], rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"iter_00000: has shards of runs with \[1, 2\] ranks"):
        store.read(0)


def test_rollout_that_two_shards_hold_is_an_error(tmp_path):
    store = RolloutStore(tmp_path)
    for rank in range(2):
        store.write(0, [scored(sample_index=4)], rank=rank, world_size=2)
    with pytest.raises(ValueError, match=r"\('train-1', 4\) occur twice"):
        store.read(0)


def test_rank_outside_the_world_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        RolloutStore(tmp_path).write(0, [scored()], rank=2, world_size=2)


def test_damaged_shard_is_an_error_that_names_the_file(tmp_path):
    path = RolloutStore(tmp_path).write(0, [scored()], rank=0, world_size=1)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"rank_0_of_1.parquet: is not a readable Parquet file"):
        RolloutStore(tmp_path).read(0)


def test_writing_again_replaces_the_shard(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(0, [scored(text="old")], rank=0, world_size=1)
    store.write(0, [scored(text="new")], rank=0, world_size=1)
    assert [one.rollout.text for one in store.read(0)] == ["new"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_names_the_folder_keeps_the_old_shard_and_leaves_no_temporary_file(tmp_path, monkeypatch, code):
    store = RolloutStore(tmp_path)
    path = store.write(0, [scored(text="old")], rank=0, world_size=1)

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskSpaceError, match="no space left for 1 rollouts of iteration 0") as error:
        store.write(0, [scored(text="new")], rank=0, world_size=1)
    assert str(path.parent) in str(error.value)
    assert error.value.__cause__.errno == code
    assert [one.rollout.text for one in store.read(0)] == ["old"]
    assert list(path.parent.iterdir()) == [path]


def test_other_os_errors_stay_what_they_are(tmp_path):
    (tmp_path / "iter_00000").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        RolloutStore(tmp_path).write(0, [scored()], rank=0, world_size=1)


@pytest.mark.parametrize(("rollouts", "prompt", "response"), [(0, 0, 0), (1, 5, 5), (300, 40, 200), (200, 0, 1)])
def test_estimate_bounds_the_size_of_incompressible_rollouts(tmp_path, rollouts, prompt, response):
    rng = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 2**31, count).tolist())

    batch = [
        scored(f"train-{index}", prompt_ids=ids(prompt), response_ids=ids(response), seed=int(rng.integers(2**62)),
               response_logprobs=tuple(rng.normal(size=response).tolist()),
               text="".join(map(chr, rng.integers(32, 127, 5 * response))))
        for index in range(rollouts)
    ]
    size = RolloutStore(tmp_path).write(0, batch, rank=0, world_size=1).stat().st_size
    assert size <= estimate_bytes(rollouts, prompt, response)
    assert rollouts < 300 or estimate_bytes(rollouts, prompt, response) < 2 * size


def test_disk_check_names_needed_free_and_folder_and_passes_at_equality(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage)
    folder = tmp_path / "not" / "yet"
    check_disk_space(folder, 2**30)
    with pytest.raises(DiskSpaceError, match=r"needs 3.00 GiB for rollouts but has 1.00 GiB free") as error:
        check_disk_space(folder, 3 * 2**30)
    assert str(folder) in str(error.value)
    assert asked == [tmp_path, tmp_path]


# --- an iteration that is still being drawn -----------------------------------------------------------------------

UNSORTED = [scored("train-2", 1), scored("train-2", 0), scored("train-1", 5), scored("train-10", 2)]


def test_nothing_is_drawn_where_nothing_is(tmp_path):
    assert RolloutStore(tmp_path).drawn(0) == []


def test_parts_are_given_back_in_their_order_up_to_the_first_that_is_missing(tmp_path):
    store = RolloutStore(tmp_path)
    for part, one in enumerate(UNSORTED):
        if part != 2:
            store.write_part(4, part, [one])
    assert store.drawn(4) == UNSORTED[:2]
    store.write_part(4, 2, [UNSORTED[2]])
    assert store.drawn(4) == UNSORTED


def test_parts_are_no_shards_until_the_shard_takes_their_place(tmp_path):
    store = RolloutStore(tmp_path)
    part = store.write_part(0, 0, UNSORTED)
    with pytest.raises(ValueError, match="iter_00000: has no rollouts"):
        store.read(0)
    shard = store.write(0, UNSORTED, rank=0, world_size=1)
    assert not part.exists()
    assert list(shard.parent.iterdir()) == [shard]
    assert store.drawn(0) == UNSORTED  # as they were drawn, not sorted as read gives them


def test_a_shard_counts_where_a_kill_left_its_parts_behind(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(0, UNSORTED, rank=0, world_size=1)
    store.write_part(0, 0, UNSORTED[:1])
    assert store.drawn(0) == UNSORTED


@pytest.mark.parametrize("damage", [
    lambda content: content[:-10], lambda content: content[: len(content) // 2], lambda content: b"",
    lambda content: content[:4] + bytes(len(content) - 200) + content[-196:],
], ids=["end cut off", "half", "empty", "zeros in the middle"])
@pytest.mark.parametrize("kind", ["shard", "part"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage, kind: str):
    store = RolloutStore(tmp_path)
    rows = [scored(sample_index=index, text="some text " * 20) for index in range(50)]
    path = store.write(0, rows, rank=0, world_size=1) if kind == "shard" else store.write_part(0, 0, rows)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{path.name}: is not a readable Parquet file"):
        store.drawn(0)


def test_a_parquet_file_of_something_else_is_an_error_that_names_what_it_lacks(tmp_path):
    path = RolloutStore(tmp_path).write(0, [scored()], rank=0, world_size=1)
    pandas.read_parquet(path).drop(columns="reward").to_parquet(path)
    with pytest.raises(UserError, match="rank_0_of_1.parquet: has no column reward; its columns: problem_id, sample"):
        RolloutStore(tmp_path).drawn(0)


def test_rollouts_of_another_tokenizer_are_refused_with_both_names(tmp_path):
    RolloutStore(tmp_path, tokenizer="abc (128 tokens)").write(0, [scored()], rank=0, world_size=1)
    other = RolloutStore(tmp_path, tokenizer="def (256 tokens)")
    for read in (other.read, other.drawn, lambda iteration: other.require(iteration + 1)):
        with pytest.raises(UserError, match=r"another tokenizer: abc \(128 tokens\) there, def \(256 tokens\) here"):
            read(0)
    assert RolloutStore(tmp_path, tokenizer="abc (128 tokens)").read(0) == RolloutStore(tmp_path).read(0) == [scored()]


def test_all_iterations_that_are_required_have_to_be_there(tmp_path):
    store = RolloutStore(tmp_path)
    for iteration in range(2):
        store.write(iteration, [scored()], rank=0, world_size=1)
    store.require(2)
    with pytest.raises(UserError, match="iter_00002: has no rollouts"):
        store.require(3)


class Tokenizer(dict):
    """A vocabulary, as far as its identity goes."""

    def get_vocab(self) -> dict[str, int]:
        return dict(self)


def test_a_tokenizers_identity_is_that_of_its_vocabulary():
    identity = tokenizer_identity(Tokenizer(a=0, b=1))
    assert identity == tokenizer_identity(Tokenizer(b=1, a=0))
    assert identity.endswith("(2 tokens)")
    assert len({identity, *map(tokenizer_identity, (Tokenizer(a=1, b=0), Tokenizer(a=0, c=1), Tokenizer(a=0)))}) == 4
