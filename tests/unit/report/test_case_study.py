"""The case study: which problem, groups by answer, and what responses share."""

from dataclasses import replace

import pytest
from helpers.run_folder import write_run_folder
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.errors import UserError
from nemo_edo.report.case_study import SHOWN, case_study, grouped, most_telling, shared_beginnings
from nemo_edo.report.page import write_report
from nemo_edo.report.run_record import read_run
from nemo_edo.report.run_set import one_run
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, ScoredRollout

TEXTS = st.lists(st.text(alphabet="ab \n", max_size=12), min_size=1, max_size=6)


def rollout(problem: str, sample: int, text: str, answer: str | None, reward: float) -> ScoredRollout:
    return ScoredRollout(Rollout(problem, sample, (1,), (2,), (-1.0,), text, True, 0, sample), reward, answer, True, "")


def stored(folder, arm: str, iteration: int, scored: list[ScoredRollout]) -> None:
    RolloutStore(folder / "evaluations" / arm / "sampled").write(iteration, scored, rank=0, world_size=1)


@pytest.fixture
def folder(tmp_path):
    """One arm of four iterations, with responses of its final evaluation, of an earlier one, and of the start."""
    path = write_run_folder(tmp_path / "run", arms=("grpo",), iterations=4, problems=5)
    stored(path, "warmup", 0, [rollout(f"test-{problem}", 0, "no idea", None, 0.0) for problem in range(5)])
    everything = [rollout(f"test-{p}", s, f"p{p} s{s} words", str(s % 2), float(s % 2)) for p in range(5) for s in
                  range(8)]
    stored(path, "grpo", 4, everything)
    stored(path, "grpo", 2, [replace(one, reward=0.0) for one in everything])
    return path


def test_a_problem_is_shown_with_the_final_responses_of_every_policy(folder):
    record = read_run(folder)
    place = most_telling(record)
    study = case_study(record)
    assert study.question == record.samples[place]["question"]
    assert list(study.policies) == ["warmup", "grpo"]
    groups = study.policies["grpo"]
    assert {(group.answer, group.reward, group.size) for group in groups} == {("0", 0.0, 4), ("1", 1.0, 4)}
    assert (study.size("grpo"), study.right("grpo"), study.right("warmup")) == (8, 4, 0)
    assert all(s.shared + s.own == f"p{place} s{s.sample} words" for group in groups for s in group.solutions)
    assert len(groups[0].solutions) == SHOWN


def test_the_problem_is_the_one_on_which_policies_differ_most(folder):
    record = read_run(folder)
    values = {"warmup": [0.0, 0.9, 0.0, 1.0, 0.0], "grpo": [0.1, 0.8, 0.7, 1.0, 0.9]}
    for arm, shares in values.items():
        sums, counts = record.evaluations[arm].metrics["accuracy"]
        sums[:] = [share * count for share, count in zip(shares, counts, strict=True)]
    assert most_telling(record) == 2  # the fifth differs more, but the run keeps three questions
    assert most_telling(replace(record, evaluations={"grpo": record.evaluations["grpo"]})) == 0


def test_a_run_without_stored_responses_or_questions_has_none_and_a_damaged_file_is_an_error(tmp_path, folder):
    assert case_study(read_run(write_run_folder(tmp_path / "other", iterations=2, problems=5))) is None
    assert case_study(replace(read_run(folder), samples=[])) is None
    [file] = (folder / "evaluations" / "grpo" / "sampled" / "iter_00004").glob("*.parquet")
    file.write_bytes(b"no parquet")
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        case_study(read_run(folder))


def test_the_report_escapes_the_responses(folder):
    attack = "<img src=x onerror=alert(1)>"
    stored(folder, "grpo", 4, [rollout(f"test-{p}", s, f"so {attack}", attack, 0.0) for p in range(5) for s in (0, 1)])
    page = write_report(one_run(folder)).path.read_text()
    assert attack not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") == 3


def test_groups_are_by_answer_and_reward_the_largest_first():
    rows = [{"text": text, "reward": reward, "answer": answer, "sample_index": place} for place, (text, reward, answer)
            in enumerate([("a", 1.0, "7"), ("b", 0.0, "7"), ("c", 0.0, "7"), ("d", 0.0, None)])]
    assert [(g.answer, g.reward, g.size, [s.sample for s in g.solutions]) for g in grouped(rows)] == [
        ("7", 0.0, 2, [1, 2]), ("7", 1.0, 1, [0]), (None, 0.0, 1, [3])]


def boundary(text: str, end: int) -> bool:
    return end in (0, len(text)) or text[end - 1].isspace() or text[end].isspace()


@given(TEXTS)
def test_shared_beginnings_are_the_longest_whole_ones(texts: list[str]):
    """Against every pair of texts."""
    found = shared_beginnings(texts)
    for place, text in enumerate(texts):
        ends = [end for other_place, other in enumerate(texts) if other_place != place for end in range(len(text) + 1)
                if other.startswith(text[:end]) and boundary(text, end) and boundary(other, end)]
        assert found[place] == max(ends, default=0)
