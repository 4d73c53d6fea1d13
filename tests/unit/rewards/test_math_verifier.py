import os
import re
import signal
import time
from pathlib import Path

import pytest

from nemo_edo.data.answers import LONGEST_ANSWER, answer_format
from nemo_edo.data.problems import LoadedProblems, ProblemFileError
from nemo_edo.metrics import expected_vote_score
from nemo_edo.rewards.math_verifier import TOO_LONG, MathScorer, MathVerifier, Verdict, require_verifiable
from nemo_edo.rewards.workers import Ended, Limits, WorkerPool
from nemo_edo.test_time import majority_vote
from nemo_edo.types import UNVERIFIED, Problem, Rollout

ROOT = Path(__file__).parents[3]
PAIRS = [tuple(line.split("\t")) for line in (ROOT / "tests/data/answer_pairs.tsv").read_text().splitlines()[1:]]
KNOWN_ERRORS = {  # docs/benchmarks.md lists them
    (r"5\text{ cm}", r"5\text{ km}"),
    (r"2 \text{ hours}", r"120 \text{ minutes}"),
    ("1<x<3", r"x>1 \text{ and } x<3"),
    (r"e^{i\pi}", "-1"),
    (r"\frac{1}{i}", "-i"),
    ("5a", "5A"),
}


def problem(answer: str, *, kind: str = "math", name: str = "p-1") -> Problem:
    return Problem(name, "Question?", "", answer, f"p.jsonl:{name[2:]}", kind)


def rollout(text: str, *, name: str = "p-1", finished: bool = True) -> Rollout:
    return Rollout(name, 0, (1,), (2,), (-0.5,), text, finished, policy_version=0, seed=0)


def score(verifier: MathVerifier, answer: str, *texts: str):
    scorer = MathScorer(answer_format("boxed"), verifier.verify)
    return scorer.score([rollout(text) for text in texts], [problem(answer)])


def test_verdicts_on_the_answer_pairs_are_right_but_for_the_known_errors(verifier):
    verdicts = verifier.verify([(gold, answer) for _, gold, answer, _ in PAIRS])
    wrong = {
        (gold, answer)
        for (_, gold, answer, right), verdict in zip(PAIRS, verdicts, strict=True)
        if verdict.right != (right == "1")
    }
    assert wrong == KNOWN_ERRORS
    assert len(PAIRS) >= 300 and 0.3 < sum(right == "1" for *_, right in PAIRS) / len(PAIRS) < 0.8
    stated = f"{len(PAIRS) - len(wrong)} of {len(PAIRS)}"
    assert stated in (ROOT / "docs/benchmarks.md").read_text(), f"docs/benchmarks.md should say {stated}"


def test_answer_is_the_problems_exactly_where_the_reward_is_one(verifier):
    verdicts = verifier.verify([(gold, answer) for _, gold, answer, _ in PAIRS])
    for (_, gold, *_), verdict in zip(PAIRS, verdicts, strict=True):
        assert verdict.right == (verdict.answer == gold)


@pytest.mark.parametrize(("text", "reward", "answer", "well_formed", "reason"), [
    (r"It is \boxed{0.5}.", 1.0, r"\frac{1}{2}", True, "correct"),
    (r"\boxed{3} or \boxed{2/4}", 1.0, r"\frac{1}{2}", False, "correct"),
    (r"It is \boxed{\sqrt{2}}", 0.0, "sqrt(2)", True, r"final answer sqrt(2), expected \frac{1}{2}"),
    ("It is 1/2.", 0.0, None, False, "no final answer"),
    (r"\boxed{ }", 0.0, None, False, "no final answer"),
])
def test_reward_answer_and_reason_of_a_response(verifier, text, reward, answer, well_formed, reason):
    [scored] = score(verifier, r"\frac{1}{2}", text)
    assert (scored.reward, scored.answer, scored.well_formed, scored.reason) == (reward, answer, well_formed, reason)


def test_response_that_did_not_finish_has_no_answer(verifier):
    scorer = MathScorer(answer_format("boxed"), verifier.verify)
    [scored] = scorer.score([rollout(r"\boxed{5}", finished=False)], [problem("5")])
    assert (scored.reward, scored.answer, scored.reason) == (0.0, None, "did not finish")


def test_equal_answers_share_their_votes_right_or_wrong(verifier):
    given = ["7", "7.0", r"\frac{1}{2}", "0.5", r"\frac{2}{4}", "x=7"]
    texts = [rf"\boxed{{{answer}}}" for answer in given]
    answers = [scored.answer for scored in score(verifier, "7", *texts)]
    assert answers == ["7", "7", "1/2", "1/2", "1/2", "7"]
    assert expected_vote_score(answers, "7") == 0.5
    assert majority_vote([scored.answer for scored in score(verifier, "7", *texts[:5])]) == "1/2"
    wrong = score(verifier, "0", r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}", r"\boxed{\{2,1\}}", r"\boxed{1, 2}")
    assert len({scored.answer for scored in wrong}) == 2


def test_canonical_form_does_not_depend_on_the_other_answers(verifier):
    texts = [r"\boxed{2x+1}", r"\boxed{1+2x}", r"\boxed{\sqrt{8}}"]
    together = [scored.answer for scored in score(verifier, "0", *texts)]
    assert together == [score(verifier, "0", text)[0].answer for text in texts]


class CountingPool:
    def __init__(self):
        self.asked = []

    def run(self, task, arguments):
        self.asked += arguments
        return [Ended.TIMED_OUT if "hang" in answer else (answer == "same", "form") for _, answer in arguments]


def test_each_different_pair_is_verified_once_and_troubles_are_counted_each_time():
    pool = CountingPool()
    counting = MathVerifier(pool)
    with pytest.warns(UserWarning, match="verification timed out: 3"):
        verdicts = counting.verify([("x", "hang"), ("x", "same"), ("x", "hang"), ("y", "same"), ("x", "hang")])
    assert verdicts[0] == Verdict(False, "hang", UNVERIFIED + "timed out")
    assert verdicts[1] == Verdict(True, "x")
    with pytest.warns(UserWarning):
        counting.verify([("x", "hang")])
    assert pool.asked == [("x", "hang"), ("x", "same"), ("y", "same")]
    assert counting.troubles == {UNVERIFIED + "timed out": 4}


def test_numbers_equal_texts_and_texts_of_a_megabyte_need_no_worker():
    pool = CountingPool()
    with pytest.warns(UserWarning, match=re.escape(TOO_LONG)):
        verdicts = MathVerifier(pool).verify(
            [("5", "6"), ("5", "5.0"), (r"\frac{1}{2}", "2/4"), ("x^y", "$x^y$"), ("5", "9" * 1_000_000)]
        )
    assert [verdict.right for verdict in verdicts] == [False, True, True, True, False]
    assert len(verdicts[-1].answer) <= LONGEST_ANSWER + 3
    assert pool.asked == []


def test_answer_that_hangs_costs_its_limit_and_its_worker_is_replaced():
    pool = WorkerPool(Limits(seconds=3, memory_mb=1024, workers=2))
    try:
        pool.run("parses", [("x",)])  # it has started
        begun = time.monotonic()
        results = pool.run("compare", [("5", "10^{10^{10}}"), ("5", "9!!!!!!")] + [("x+1", "1+x")] * 3)
        assert 3 <= time.monotonic() - begun < 12
    finally:
        pool.close()
    assert all(isinstance(result, Ended) for result in results[:2])
    assert [result[0] for result in results[2:]] == [True] * 3


def test_exhausted_memory_and_errors_are_outcomes_of_a_task(monkeypatch):
    from nemo_edo.rewards import worker_server

    for error, outcome in ((MemoryError(), Ended.OUT_OF_MEMORY), (RecursionError(), Ended.CRASHED)):
        def fails(answer, error=error):
            raise error

        monkeypatch.setitem(worker_server._FUNCTIONS, "parses", fails)
        assert worker_server._result("parses", ("x",)) is outcome


def test_worker_that_dies_is_replaced_and_the_server_ends_with_the_pool():
    pool = WorkerPool(Limits(seconds=5, memory_mb=1024, workers=1))
    pool.run("parses", [("x",)])
    server = pool._server.pid
    [worker] = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    first, second = pool.run("parses", [("x+1",), ("x+2",)])
    assert (first, second) in [(Ended.CRASHED, True), (True, True)]
    pool.close()
    assert pool._server.returncode == 0
    assert not Path(f"/proc/{server}").exists()


def test_unreadable_gold_answers_are_named_with_their_place(verifier):
    problems = [
        problem("12"),
        problem(r"\frac{1}{", name="p-2"),
        problem(r"\text{Evelyn}", name="p-3"),
        problem("We see that it holds.", kind="text", name="p-4"),
        problem(r"33\frac{1}{3}\%", name="p-5"),
    ]
    bad = verifier.unreadable(problems)
    assert [row.source for row in bad] == ["p.jsonl:4", "p.jsonl:2"]
    assert "prose" in bad[0].reason and "cannot be parsed" in bad[1].reason
    loaded = LoadedProblems(problems, [])
    with pytest.raises(ProblemFileError, match=r"p\.jsonl: bad rows: 2 of 5.*"):
        require_verifiable(Path("p.jsonl"), loaded, bad, on_bad_rows="error")
    kept = require_verifiable(Path("p.jsonl"), loaded, bad, on_bad_rows="skip")
    assert [p.id for p in kept.problems] == ["p-1", "p-3", "p-5"]
    assert kept.skipped == bad
