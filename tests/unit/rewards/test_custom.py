"""Custom rewards: what a function may take and return, and what becomes of one that fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.responses import scored

from nemo_edo.config import RewardsConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.config.data import Columns, RewardFunctionConfig
from nemo_edo.data.answers import HASHES_TEXT
from nemo_edo.data.problems import LoadedProblems, named_problem
from nemo_edo.data.rows import Row
from nemo_edo.errors import PartlyScored, UserError
from nemo_edo.rewards.custom import CustomScorer
from nemo_edo.rewards.scorers import build_scorer
from nemo_edo.types import Problem

CODE = """
import asyncio, os, time
import numpy as np

def right(*, final_answer, answer): return float(final_answer == answer)
def everything(*, question, response, answer, metadata, **rest):
    assert sorted(rest) == ["final_answer", "finished", "problem_id", "solution"]
    return {"score": np.float32(len(question) + len(answer) + metadata["weight"]), "length": len(response)}
def parts(*, finished): return {"style": 0.25, "finished": finished}
def batch(responses, *, metadata): return np.array([len(r) * m["weight"] for r, m in zip(responses, metadata)])
def constant(response): return True
def letters(response): return {"score": 1, "vote": "".join(sorted(response)) if response.isalpha() else None}

def on(what):
    def call(*, response):
        if response != "bad": return 0.5
        return what()
    return call
text, bad_part = on(lambda: "1"), on(lambda: {"score": 1, "style": None})
bad_vote = on(lambda: {"score": 1, "vote": 2})
raises, leaves, dies, slow = on(lambda: {}["key"]), on(exit), on(lambda: os._exit(7)), on(lambda: time.sleep(60))
def too_few(*, responses): return [1.0]
huge = on(lambda: 1e200)
def one_bad(*, responses): return [float("nan") if r == "bad" else 1.0 for r in responses]

async def at_once(*, response, answer):
    started.append(time.monotonic())
    await asyncio.sleep(0.3)
    if response == "bad" and answer == "3": raise KeyError("late")
    return max(started) - min(started) < 0.2
lock = asyncio.Semaphore(1)
async def limited(*, response):
    async with lock: await asyncio.sleep(0.01)
    return 1.0
async def all_at_once(*, responses): return [len(responses)] * len(responses)
started = []
def trl(completions, **kwargs):
    assert sorted(kwargs) == ["answer", "completion_ids", "prompts", "question", "solution", "target", "weight"]
    return [w if c.endswith(t) else None for c, t, w in zip(completions, kwargs["target"], kwargs["weight"])]
def trl_columns(prompts, completions, weight, missing=None): return [w + len(p) for p, w in zip(prompts, weight)]
def trl_without(completions, color): return [0.0] * len(completions)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.endswith(ground_truth)), "weight": extra_info["weight"], "pred": solution_str}
def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s.endswith(g)) for s, g in zip(solution_strs, ground_truths, strict=True)]
def best(responses): return [float(len(r) == max(map(len, responses))) for r in responses]

def misspelled(*, respons): return 1.0
"""
PROBLEMS = [Problem("p-1", "1 + 1", "", "2", "file.jsonl:1", metadata={"weight": 10}),
            Problem("p-2", "2 + 1", "", "3", "file.jsonl:2", metadata={"weight": 100})]
TEXTS = ["#### 2", "#### 5", "bad", "#### 2\n3"]


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch):
    """Makes a scorer of functions of ``my_rewards.py``, a module of the working directory."""
    (tmp_path / "my_rewards.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)

    def make(*paths: str, time_limit_s: float = 30.0, success_at: float = 1.0, weights=(1.0, 1.0)) -> CustomScorer:
        functions = {path: RewardFunctionConfig(f"my_rewards:{path}", weight)
                     for path, weight in zip(paths, weights, strict=False)}
        rewards = RewardsConfig(functions=functions, function_time_limit_s=time_limit_s, success_at=success_at)
        return CustomScorer(HASHES_TEXT, rewards, failures=tmp_path / "failures", columns={"target": "answer"})

    return make


def rollouts(texts=TEXTS, **fields):
    return [scored(PROBLEMS[index // 2].id, index, text=text, **fields).rollout for index, text in enumerate(texts)]


@pytest.mark.parametrize(("paths", "weights", "rewards", "parts"), [
    (["right"], [1], [1, 0, 0, 0], {}),
    (["everything"], [5], [80, 80, 530, 530], {"length": 6}),  # 5 x (5 + 1 + 10)
    (["parts"], [2], [2.5] * 4, {"style": 0.25, "finished": 1}),  # their sum
    (["batch"], [1], [60, 60, 300, 800], {}), (["all_at_once"], [1], [4] * 4, {}), (["trl"], [1], [10, 0, 0, 100], {}),
    (["right", "everything"], [2, 0.5], [10, 8, 53, 53], {"right": 1, "everything": 16, "everything.length": 6}),
    (["trl_columns"], [1], [15, 15, 105, 105], {}),
    (["compute_score"], [1], [1, 0, 0, 1], {"weight": 10}), (["compute_scores"], [1], [1, 0, 0, 1], {}),
])  # fmt: skip
def test_the_reward_is_the_weighted_sum_of_scores_and_parts_are_kept(scorer, paths, weights, rewards, parts):
    found = scorer(*paths, weights=weights).score(rollouts(), PROBLEMS)
    assert [one.reward for one in found] == rewards
    assert found[0].parts == parts


def test_a_success_is_a_finished_response_at_or_above_the_threshold_and_answers_are_what_responses_state(scorer):
    texts = ["#### 2", "#### 1,5", "#### 3", "#### a\nb"]
    found = scorer("everything", success_at=106).score(rollouts(texts), PROBLEMS)
    assert [(one.success, one.answer) for one in found] == [(False, "2"), (False, "1,5"), (True, "3"), (True, "a\nb")]
    found = scorer("constant", "letters").score(rollouts(["ba", "#### 2", "ab"]), PROBLEMS)
    assert [(one.reward, one.answer, one.parts) for one in found] == [
        (2.0, answer, {"constant": 1, "letters": 1}) for answer in ("ab", None, "ab")]  # fmt: skip
    cut = scorer("letters").score(rollouts(["#### 2", "ab"], finished=False), PROBLEMS)
    assert [(one.reward, one.success, one.answer) for one in cut] == [(1.0, False, None)] * 2


@pytest.mark.parametrize(("path", "before", "message"), [
    ("text", 2, "returned '1' (str)"), ("huge", 2, "returned 1e+200 (float)"),
    ("bad_vote", 2, "returned 2 (int) as 'vote'; expected the answer as a text, or None"),
    ("bad_part", 2, "returned None (NoneType) as 'style'"), ("raises", 2, "raised KeyError: 'key' (/"),
    ("leaves", 2, "raised SystemExit"), ("dies", 2, "ended its process (exit status 7)"),
    ("slow", 2, "took longer than rewards.function_time_limit_s = 0.5"),
    ("one_bad", 0, "returned nan (float)"), ("too_few", 0, "returned 1 results for 4 responses"),
    ("at_once", 0, "raised KeyError: 'late' (/"), ("trl_without", 0, "takes the column color, which the data has not"),
])  # fmt: skip
def test_a_failure_names_problem_and_sample_saves_the_response_and_keeps_what_was_scored(
        scorer, tmp_path, path, before, message):
    own = scorer(path, time_limit_s=0.5 if path == "slow" else 30.0)
    with pytest.raises(PartlyScored) as failed:
        own.score(rollouts(), PROBLEMS)
    said, sample = str(failed.value), 0 if path in ("too_few", "trl_without") else 2
    problem = PROBLEMS[sample // 2]
    saved = tmp_path / "failures" / f"reward_{problem.id}_sample_{sample}.json"
    place = f"response {sample} to problem {problem.id} ({problem.source})"
    assert said.startswith(f"rewards.functions.{path}.path (my_rewards:{path}), {place}: {message}")
    assert said.endswith(str(saved))
    record = json.loads(saved.read_text())
    assert (record["response"], record["metadata"]) == (TEXTS[sample], problem.metadata)
    assert [one.reward for one in failed.value.responses] == [0.5] * before
    rest = own.score(rollouts(["good"]), PROBLEMS) if before else []
    assert [one.reward for one in rest] == [0.5] * len(rest)  # it continues in a new process


def test_an_async_function_scores_responses_at_the_same_time(scorer):
    assert [one.reward for one in scorer("at_once").score(rollouts(["a", "b", "c"]), PROBLEMS)] == [1, 1, 1]
    limited = scorer("limited")  # its semaphore is bound to the loop of the first call
    for _ in range(2):
        assert [one.reward for one in limited.score(rollouts(["a", "b", "c"]), PROBLEMS)] == [1, 1, 1]


def test_a_verl_function_without_a_ground_truth_names_the_setting_unless_it_has_a_default(scorer, tmp_path):
    blank = [replace(one, answer="") for one in PROBLEMS]
    with pytest.raises(PartlyScored, match=r"takes the answer \(data\.columns\.answer\), which the data has not"):
        scorer("compute_score").score(rollouts(), blank)
    (tmp_path / "my_rewards.py").write_text("def optional(solution_str, ground_truth='2'): return float(ground_truth)")
    assert [one.reward for one in scorer("optional").score(rollouts(), blank)] == [2] * 4


def test_trl_functions_get_messages_where_the_data_are_chats(scorer, tmp_path):
    code = "def chat(prompts, completions): return [len(c[0]['content']) + len(prompts[0]) for c in completions]"
    (tmp_path / "my_rewards.py").write_text(code)
    chats = [replace(one, messages=({"role": "user", "content": one.question},)) for one in PROBLEMS]
    assert [one.reward for one in scorer("chat").score(rollouts(["four", "5"]), chats)] == [5, 2]


def test_columns_are_what_the_data_has_in_them_numbers_and_lists_too(scorer, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def trl(completions, target, solution): return [int(c) + t + len(s) for c, t, s in "
        "zip(completions, target, solution)]\n"
        "def verl(solution_str, ground_truth): return int(solution_str) == ground_truth\n")
    row = {"question": "1 + 1", "target": 2, "solution": ["a", "b", "c"]}
    made = named_problem(Columns(answer="target"), Row(1, "t:1", row), "t")
    assert (made.answer, made.solution) == ("2", "")
    told = [scored("t-1", 0, text="2").rollout]
    assert [one.reward for one in scorer("trl").score(told, [made])] == [7]
    assert [one.reward for one in scorer("verl").score(told, [made])] == [1]


def test_what_is_kept_of_a_failed_call_never_splits_a_group_of_a_function_that_compares_responses(scorer):
    with pytest.raises(PartlyScored) as failed:
        scorer("best", "raises").score(rollouts(["a", "b", "bb", "bad"]), PROBLEMS)
    assert [one.rollout.problem_id for one in failed.value.responses] == ["p-1", "p-1"]
    assert scorer("best").by_group and not scorer("right").by_group


@pytest.mark.parametrize(("path", "message"), [
    ("my_rewards:rigth", "rewards.function is 'my_rewards:rigth', but my_rewards has no rigth; did you mean right?"),
    ("my_reward:right", "there is no module my_reward: expected one in the working directory"),
    ("my_rewards:misspelled", "takes 'respons'; did you mean response?"),
    ("broken:fn", "broken cannot be imported: ZeroDivisionError: division by zero ("),
])  # fmt: skip
def test_an_import_path_is_checked_before_any_response(scorer, tmp_path, path, message):
    (tmp_path / "broken.py").write_text("1 / 0")
    functions = CustomScorer(HASHES_TEXT, RewardsConfig(function=path), failures=tmp_path)
    with pytest.raises(UserError) as refused:
        functions.check()
    assert "rewards.function" in str(refused.value) and message in str(refused.value)


def test_a_function_is_tried_on_the_first_problems_own_answers_before_any_time_is_spent(
        one_rank, tmp_path, monkeypatch):
    """The second file's problems have another column, which only its evaluation would have met."""
    (tmp_path / "my_rewards.py").write_text("def early(*, metadata): return metadata['tests']\n")
    monkeypatch.chdir(tmp_path)
    train = Problem("train-1", "1 + 1", "It is 2.\n#### 2", "2", "train.jsonl:1", metadata={"tests": 1.0})
    test = Problem("test-1", "2 + 1", "#### 3", "3", "test.jsonl:1")
    loaded = {Path("train"): LoadedProblems([train], []), Path("test"): LoadedProblems([test], [])}
    cfg = compose_run("quickstart", ["rewards.function=my_rewards:early", f"output_dir={tmp_path}/runs"])
    with pytest.raises(UserError) as refused:
        build_scorer(cfg.rewards, cfg.data, tmp_path / "runs/run", loaded, lambda text: ())
    tried = "tried on problem test-1 (test.jsonl:1) with the response '#### 3' (str): raised KeyError: 'tests' ("
    assert str(refused.value).startswith(f"rewards.function (my_rewards:early), {tried}")
    assert not (tmp_path / "runs").exists()
