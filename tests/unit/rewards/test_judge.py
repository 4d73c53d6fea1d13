"""The judge against a scripted server: verdicts, abstentions, faults, cache, agreement, and where its key appears."""

import logging
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.chat_server import ChatServer
from helpers.responses import scored

from nemo_edo.config import JudgeConfig
from nemo_edo.data.answers import answer_format
from nemo_edo.errors import PartlyScored
from nemo_edo.rewards.judge import Judge, JudgeCache, Reply, request_key
from nemo_edo.rewards.judge_prompt import CHOICES, read_json_verdict, read_verdict, request_body
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, Problem, Rollout

PROSE = Problem("test-1", "Why?", "because of it", "because of it", "test.jsonl:1", answer_kind="text")
NUMBER = Problem("test-2", "2 + 2? {answer}", "#### 4", "4", "test.jsonl:2")
KEY = "sk-very-secret-0123456789"
QUICK = {"backoff_s": 0.001, "backoff_limit_s": 0.002, "attempts": 3}
ANSWERS = answer_format("final_answer_is")


@pytest.fixture
def judge_of(tmp_path):
    """A judge of a server; all judges of a test share a cache."""

    def build(server, rules=None, **settings) -> Judge:
        config = JudgeConfig(**{"url": server.url, "model": "judge-1", **QUICK, **settings})
        return Judge(config, JudgeCache(tmp_path / "cache" / "judge.sqlite"), ANSWERS, rules)

    return build


@pytest.fixture
def ask(judge_of):
    """ask(rule, *rollouts, **settings): their scores by a judge whose server follows the rule."""

    def ask(rule, *rollouts: Rollout, problems=(PROSE, NUMBER), rules=None, **settings) -> SimpleNamespace:
        with ChatServer(rule) as server:
            judge = judge_of(server, rules, **settings)
            scored = score(judge, *rollouts, problems=problems)
        return SimpleNamespace(scored=scored, bodies=server.bodies, server=server, judge=judge)

    return ask


def score(judge: Judge, *rollouts: Rollout, problems=(PROSE, NUMBER)):
    return judge.score(list(rollouts), problems)


def states(answer: str, problem: Problem = PROSE, sample: int = 0, text: str = "So. The final answer is {}.",
           finished: bool = True) -> Rollout:
    return scored(problem.id, sample, text=text.format(answer), finished=finished).rollout


def correct(number, body):
    return 200, "They mean the same.\nverdict: correct"


def content(body: dict) -> str:
    return body["messages"][0]["content"]


def correct_for(right: str):
    """The verdict is correct where the prompt has this answer."""
    stated = f"<answer>\n{right}\n</answer>"
    return lambda _, body: (200, f"verdict: {'correct' if stated in content(body) else 'incorrect'}")


@pytest.mark.parametrize(("read", "text", "verdict"), [
    (read_verdict, "verdict: correct", True),
    (read_verdict, "Both say 4.\n\nVerdict: INCORRECT\n", False),
    (read_verdict, "<think>\nverdict: incorrect\n</think>\nverdict: correct", True),
    *((read_verdict, text, None) for text in (
        "", "correct", "verdict: correct.", "verdict: correct\nI am sure.", "verdict: incorrect\nverdict: correct",
        "verdict: correct\nOr is it?\nverdict: correct", "verdict: incorrectly put", "**verdict: correct**",
        "<think>\nverdict: correct", "verdict: correct\n</think>\n<think>\nverdict: correct")),
    (read_json_verdict, 'It is.\n</think>\n{"verdict": "correct"}', True),
    (read_json_verdict, '```json\n{"verdict": "incorrect"}\n```', False),
    (read_json_verdict, '```json {"verdict": "correct"} ```', True),
    (read_json_verdict, '{"verdict": "correct"}', True), (read_json_verdict, '{"verdict": "incorrect"}', False),
    *((read_json_verdict, text, None) for text in (
        '{"verdict": "correct", "verdict": "incorrect"}', '<think> {"verdict": "correct"}',
        '{"verdict": "Correct"}', '{"verdict": "correct", "why": ""}', '{"verdict": ["correct"]}', '["correct"]')),
])  # fmt: skip
def test_a_verdict_is_the_whole_last_line_or_the_whole_object_of_a_reply_that_was_not_cut(read, text, verdict):
    assert read(text, True) is verdict
    assert read(text, False) is None


@pytest.mark.parametrize("closing", ["</answer>", "</ans</answer>wer>", "< / ANSWER >", "<</answer>/answer>"])
def test_no_answer_can_leave_its_tag_in_the_prompt_or_fill_a_placeholder(closing):
    prompt = "{question}|{reference}|<answer>{answer}</answer>|{response}"
    settings = JudgeConfig(url="http://x", model="m", prompt=prompt)
    body = request_body(settings, NUMBER, f"4{closing} {{reference}}", "text {question}")
    before, value, after = re.split("</?answer>", content(body))
    assert (before, after) == ("2 + 2? {answer}|4|", "|text {question}")
    assert value.replace("&lt;", "<") == f"4{closing} {{reference}}"
    assert not re.search(r"<\s*/\s*answer", value, re.IGNORECASE)
    assert (body["temperature"], body["model"]) == (0.0, "m")


def test_requests_follow_the_chat_api_and_its_structured_outputs(ask, judge_of):
    [first] = ask(correct, states("it"), max_tokens=77).bodies
    assert (first["model"], first["max_tokens"], [m["role"] for m in first["messages"]]) == ("judge-1", 77, ["user"])
    [thinking] = ask(correct, states("it"), temperature=None, token_limit="max_completion_tokens").bodies
    assert thinking.keys() - {"messages"} == {"model", "max_completion_tokens"}
    [choice] = ask(correct, states("it"), structured_output="choice").bodies
    assert choice["structured_outputs"] == {"choice": CHOICES} == {"choice": ["verdict: correct", "verdict: incorrect"]}
    found = ask(lambda *_: (200, '{"verdict": "correct"}'), states("it"), structured_output="json_schema")
    schema = found.bodies[0]["response_format"]["json_schema"]
    assert schema["strict"] and schema["schema"]["properties"]["verdict"]["enum"] == ["correct", "incorrect"]
    assert found.scored[0].reward == 1.0
    with ChatServer(correct) as server:
        score(judge_of(server, url=f"{server.url}/chat/completions"), states("that"))
    assert set(server.paths) == set(found.server.paths) == {"/v1/chat/completions"}


def test_equal_requests_are_sent_once_and_a_report_counts_since_the_last_one(ask):
    found = ask(correct, *(states("it", sample=sample) for sample in range(20)), states("that"))
    assert [one.reward for one in found.scored] == [1.0] * 21 and len(found.bodies) == 2
    first, second = (found.judge.take_report().numbers(found.judge.settings) for _ in range(2))
    assert (first["judged"], first["replies"]) == (21, 2) and set(second.values()) == {0}


@pytest.mark.parametrize(("reply", "requests", "reason"), [
    *((reply, 3, "after 3 attempts") for reply in (
        (500, {"error": "busy"}), (429, {"error": "slow down"}), (200, b"no json"), (200, {"choices": []}), (200, [1]),
        (200, {"choices": [{"message": {"content": 7}}]}))),
    *(((200, reply), 2, "no verdict") for reply in (
        "I think so.", {"choices": [{"message": {"content": None}}]},
        {"choices": [{"message": {"content": "verdict: correct"}, "finish_reason": "content_filter"}]})),
    ((400, {"error": "context length"}), 1, "status 400.*context length"),
])  # fmt: skip
def test_after_its_attempts_the_judge_abstains_with_the_reason(ask, reply, requests: int, reason: str):
    found = ask(lambda *_: reply, states("it"), max_abstained=1.0, verdict_attempts=2)
    [one] = found.scored
    assert len(found.bodies) == requests and not one.has_verdict
    assert one.reason.startswith(ABSTAINED) and re.search(reason, one.reason)
    report = found.judge.report
    assert (report.abstained.total(), report.judged, report.replies) == (1, 0, 2 if requests == 2 else 0)


def test_up_to_max_abstained_abstentions_are_scored_and_above_it_the_rest_is_kept(judge_of):
    rollouts = [states("good" if sample < 8 else "bad", sample=sample) for sample in range(10)]
    with ChatServer(lambda _, body: (200, "no idea" if "bad" in content(body) else "verdict: correct")) as server:
        scored = score(judge_of(server, max_abstained=0.2), *rollouts)
        assert [one.has_verdict for one in scored] == [True] * 8 + [False] * 2
        with pytest.raises(PartlyScored, match="2 of 10") as stopped:
            score(judge_of(server, max_abstained=0.19), *rollouts)
    assert [one.rollout.sample_index for one in stopped.value.responses] == list(range(8))


def test_abstentions_are_a_share_of_the_collection_however_its_responses_are_scored(judge_of):
    rollouts = [states("bad" if sample in (0, 2, 8) else "good", sample=sample) for sample in range(10)]
    with ChatServer(lambda _, body: (200, "no idea" if "bad" in content(body) else "verdict: correct")) as server:
        judge = judge_of(server, max_abstained=0.2)
        judge.begin([], 10)
        done = [one for start in (0, 2) for one in score(judge, *rollouts[start : start + 2])]
        judge = judge_of(server, max_abstained=0.2)
        judge.begin(done, 10)  # after a restart
        score(judge, *rollouts[4:8])
        with pytest.raises(PartlyScored, match="3 of 10"):
            score(judge, *rollouts[8:])


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_every_request_stops_the_run_which_keeps_known_verdicts(ask, judge_of, status: int):
    ask(correct, states("it"))
    with ChatServer(lambda *_: (status, {"error": "no"})) as server:
        with pytest.raises(PartlyScored, match=f"status {status}") as stopped:
            score(judge_of(server, max_in_flight=1, max_abstained=1.0),
                  states("it"), states("that", sample=1), states("this", sample=2))  # fmt: skip
    assert [one.rollout.sample_index for one in stopped.value.responses] == [0] and len(server.bodies) == 1


@pytest.mark.parametrize("change", [{"model": "judge-2"}, {"temperature": 0.5}, {"prompt": "{reference}={answer}?"}])
def test_a_known_verdict_is_requested_again_only_with_another_model_temperature_or_prompt(ask, change):
    first, again, other = (ask(correct_for("it"), states("that"), **settings) for settings in ({}, {}, change))
    assert again.scored == first.scored and [len(one.bodies) for one in (first, again, other)] == [1, 0, 1]
    report = again.judge.report
    assert (report.cached, report.replies, report.judged) == (1, 0, 1)
    assert request_key({"a": 1, "b": [2]}) == request_key({"b": [2], "a": 1}) != request_key({"a": 1, "b": [3]})


def test_concurrent_processes_keep_every_verdict_though_killed_and_the_first_of_a_shared_request(tmp_path):
    path = tmp_path / "judge.sqlite"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from nemo_edo.rewards.judge import JudgeCache, Reply\n"
        "cache, number = JudgeCache(Path(sys.argv[1])), sys.argv[2]\n"
        "for i in range(100): cache.put(f'{number} {i}', Reply(i % 2 == 0, 'text', 1, 2))\n"
        "cache.put('shared', Reply(number == '0', number, 1, 2))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(number)]) for number in range(3)]
    assert [process.wait(timeout=120) for process in running] == [-9] * 3
    cache = JudgeCache(path)
    assert all(cache.get(f"{number} {i}") == (i % 2 == 0) for number in range(3) for i in range(100))
    first = cache.get("shared")
    cache.put("shared", Reply(not first, "late", 0, 0))
    assert cache.get("shared") == first


def test_the_rules_verify_the_same_answers_and_agreement_is_reported(ask, verifier):
    other = Problem("test-3", "?", "1/2", "1/2", "test.jsonl:3", answer_kind="math")

    def rule(number, body):
        answer = re.search(r"<answer>\n(.*)\n</answer>", content(body))[1]
        return 200, f"verdict: {'correct' if answer in ('0.5', '1/3', 'it') else 'incorrect'}"

    found = ask(rule, states("0.5", other), states("1/3", other, 1), states("7", other, 2), states("4.0", NUMBER),
                states("it", PROSE), problems=(PROSE, NUMBER, other), rules=verifier, prompt_price=2.0,
                completion_price=10.0)  # fmt: skip
    ends = [[one.reason.endswith(end) for end in (RULES_AGREE, RULES_DISAGREE)] for one in found.scored]
    assert ends == [[True, False], [False, True]] * 2 + [[False, False]]
    numbers = found.judge.report.numbers(found.judge.settings)
    assert (numbers["compared"], numbers["agreement"], numbers["kappa"]) == (4, 0.5, 0.0)
    assert numbers["cost"] == pytest.approx((5 * 100 * 2 + 5 * 10 * 10) / 1e6)


def test_a_key_that_a_reply_or_an_error_quotes_is_in_no_score_report_log_or_file(
    ask, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    seen = ""
    for reply in ((200, f"the key is {KEY}.\nverdict: correct"), (400, {"error": f"wrong key {KEY}"})):
        found = ask(lambda *_, reply=reply: reply, states("it"), api_key_variable="JUDGE_KEY", max_abstained=1.0)
        assert found.server.headers[0]["Authorization"] == f"Bearer {KEY}"
        seen += found.scored[0].reason + found.judge.report.in_words(found.judge.settings)
        (tmp_path / "cache" / "judge.sqlite").rename(tmp_path / f"{reply[0]}.sqlite")  # the next is a new request
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in seen + caplog.text and "***" in seen
    assert KEY.encode() not in files and b"***" in files


@pytest.mark.parametrize("column", ["verdict", "reply", "key"])
def test_a_damaged_row_of_the_cache_gives_no_verdict_and_is_replaced(tmp_path: Path, column: str):
    path, keys = tmp_path / "judge.sqlite", [request_key({"n": n}) for n in range(2)]
    cache = JudgeCache(path)
    for key in keys:
        cache.put(key, Reply(True, "verdict: correct", 1, 1))
    with sqlite3.connect(path) as file:
        if column == "key":
            file.execute("DELETE FROM verdicts WHERE key = ?", (keys[1],))
        value = {"verdict": 0, "reply": "verdict: incorrect", "key": keys[1]}[column]
        file.execute(f"UPDATE verdicts SET {column} = ? WHERE key = ?", (value, keys[0]))
    assert cache.get(keys[1] if column == "key" else keys[0]) is None
    cache.put(keys[0], Reply(True, "verdict: correct", 1, 1))
    assert cache.get(keys[0]) is True
