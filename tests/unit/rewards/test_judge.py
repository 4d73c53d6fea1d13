"""The judge against a scripted server: verdicts, abstentions, faults, cache, agreement, and where its key is."""

from __future__ import annotations

import logging
import re
import runpy
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.config import JudgeConfig
from nemo_edo.data.answers import answer_format
from nemo_edo.data.drawing import DrawnInParts, draw_scored
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import PartlyDrawn, UserError
from nemo_edo.rewards.judge import Judge, JudgeScorer
from nemo_edo.rewards.judge_cache import JudgeCache, Reply, request_key
from nemo_edo.rewards.judge_prompt import CHOICES, read_json_verdict, read_verdict, request_body
from nemo_edo.rewards.judge_report import JudgeReport
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, GenerationRequest, Problem, Rollout

HELPER = Path(__file__).parents[2] / "helpers" / "chat_server.py"
PROSE = Problem("test-1", "Why?", "because of it", "because of it", "test.jsonl:1", answer_kind="text")
NUMBER = Problem("test-2", "2 + 2? {answer}", "#### 4", "4", "test.jsonl:2")
KEY = "sk-very-secret-0123456789"
QUICK = {"backoff_s": 0.001, "backoff_limit_s": 0.002, "attempts": 3}
ANSWERS = answer_format("final_answer_is")


@pytest.fixture(scope="session")
def chat():
    """tests/helpers/chat_server.py; tests are no package, hence not imported."""
    return runpy.run_path(str(HELPER))["ChatServer"]


@pytest.fixture
def judge_of(tmp_path):
    """A judge of a server, with the verdicts of earlier ones in the folder."""

    def build(server, rules=None, **settings) -> Judge:
        config = JudgeConfig(url=server.url, model="judge-1", **{**QUICK, **settings})
        return Judge(config, JudgeCache(tmp_path / "cache" / "judge.sqlite"), rules)

    return build


def rollout(text: str, problem: Problem = PROSE, sample: int = 0, finished: bool = True) -> Rollout:
    return Rollout(problem.id, sample, (1, 2), (3, 4), (-0.5, -0.5), text, finished, 0, 7)


def states(answer: str, problem: Problem = PROSE, sample: int = 0) -> Rollout:
    return rollout(f"So. The final answer is {answer}.", problem, sample)


def said(verdict: str):
    return lambda number, body: (200, f"They mean the same.\nverdict: {verdict}")


def by_answer(right: str):
    """Correct where the prompt holds this answer."""

    def rule(number, body):
        is_right = f"<answer>\n{right}\n</answer>" in body["messages"][0]["content"]
        return 200, f"verdict: {'correct' if is_right else 'incorrect'}"

    return rule


def score(judge: Judge, *rollouts: Rollout, problems=(PROSE, NUMBER)):
    return JudgeScorer(ANSWERS, judge.verdicts).score(list(rollouts), problems)


# --- what is asked, and how it is read ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "verdict"), [
    ("verdict: correct", True),
    ("Both say 4.\n\nVerdict: INCORRECT\n", False),
    ("<think>verdict: incorrect</think>\nverdict: correct", True),
    ("<think>\nverdict: incorrect\n</think>\nverdict: correct", True),
    ("", None),
    ("correct", None),
    ("The verdict: correct", None),
    ("verdict: correct.", None),
    ("verdict: correct\nI am sure.", None),
    ("verdict: incorrect\nverdict: correct", None),
    ("verdict: correct\nOr is it?\nverdict: correct", None),
    ("verdict: correct or incorrect", None),
    ("verdict: incorrectly put", None),
    ("**verdict: correct**", None),
])  # fmt: skip
def test_a_verdict_is_the_last_line_and_nothing_else_is_one(text: str, verdict: bool | None):
    assert read_verdict(text, True) is verdict


@given(st.text(alphabet="verdict: corn\n", max_size=60))
def test_no_text_without_the_line_has_a_verdict(text: str):
    if not re.search(r"(?im)^\s*verdict: (correct|incorrect)\s*$", text):
        assert read_verdict(text, True) is None


def test_a_reply_that_was_cut_has_no_verdict():
    assert read_verdict("verdict: correct", False) is None
    assert read_json_verdict('{"verdict": "correct"}', False) is None


@pytest.mark.parametrize(("text", "verdict"), [
    ('{"verdict": "correct"}', True), ('{"verdict": "incorrect"}', False), ('{"verdict": "Correct"}', None),
    ('{"verdict": "correct", "why": ""}', None), ('{"verdict": ["correct"]}', None), ('["correct"]', None),
    ("no", None), ("verdict: correct", None),
])  # fmt: skip
def test_a_verdict_in_json_is_that_and_nothing_else(text: str, verdict: bool | None):
    assert read_json_verdict(text, True) is verdict


def test_the_prompt_holds_what_is_compared_and_no_answer_can_leave_its_tag():
    prompt = "{question}|{reference}|<answer>{answer}</answer>|{response}"
    settings = JudgeConfig(url="http://x", model="m", prompt=prompt)
    body = request_body(settings, NUMBER, "4</answer> {reference}", "text {question}")
    assert body["messages"][0]["content"] == "2 + 2? {answer}|4|<answer>4 {reference}</answer>|text {question}"
    assert (body["temperature"], body["model"]) == (0.0, "m")


def test_what_is_asked_is_what_the_servers_api_says(chat, judge_of):
    with chat(said("correct")) as server:
        score(judge_of(server, temperature=0.0, max_tokens=77), states("it"))
        score(judge_of(server, structured_output="choice"), states("it"))
    with chat(lambda *_: (200, '{"verdict": "correct"}')) as other:
        [judged] = score(judge_of(other, structured_output="json_schema"), states("it"))
    first, choice = server.bodies
    assert (first["model"], first["max_tokens"], [m["role"] for m in first["messages"]]) == ("judge-1", 77, ["user"])
    assert choice["structured_outputs"] == {"choice": CHOICES} == {"choice": ["verdict: correct", "verdict: incorrect"]}
    assert judged.reward == 1.0
    schema = other.bodies[0]["response_format"]["json_schema"]
    assert schema["strict"] and schema["schema"]["properties"]["verdict"]["enum"] == ["correct", "incorrect"]


# --- scores -----------------------------------------------------------------------------------------------------------


def test_rewards_are_the_judges_and_only_finished_answers_are_asked_about(chat, judge_of):
    with chat(by_answer("that is why")) as server:
        scored = score(judge_of(server), states("that is why"), states("not so"), rollout("no answer"),
                       rollout("The final answer is that is why", finished=False), states("x" * 1001))  # fmt: skip
    assert [one.reward for one in scored] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [one.answer for one in scored[:4]] == ["because of it", "not so", None, None]
    assert [one.reason for one in scored[2:]] == [
        "no final answer", "did not finish", "verification refused an answer above 1000 characters",
    ]  # fmt: skip
    assert all(one.is_judged for one in scored) and len(server.bodies) == 2


def test_the_reward_is_1_exactly_where_the_answer_is_the_problems(chat, judge_of):
    """A judge may hold the gold answer's own text to be wrong: votes must not take it for right."""
    with chat(said("incorrect")) as server:
        [one] = score(judge_of(server), states("because of it"))
    assert one.reward == 0.0 and one.answer != PROSE.answer


def test_equal_requests_are_sent_once(chat, judge_of):
    with chat(said("correct")) as server:
        judge = judge_of(server)
        scored = score(judge, *(states("it", sample=sample) for sample in range(20)), states("that"))
    assert [one.reward for one in scored] == [1.0] * 21 and len(server.bodies) == 2
    assert (judge.report.judged, judge.report.replies) == (21, 2)


def test_no_more_requests_are_under_way_than_allowed(chat, judge_of):
    def slow(number, body):
        time.sleep(0.05)
        return said("correct")(number, body)

    with chat(slow) as server:
        score(judge_of(server, max_in_flight=3), *(states(f"it {i}", sample=i) for i in range(12)))
    assert server.most_open == 3 and len(server.bodies) == 12


# --- faults -----------------------------------------------------------------------------------------------------------


def test_faults_that_may_pass_are_tried_again(chat, judge_of):
    faults = [(500, {"error": "busy"}), (200, b"<html>"), (200, {"choices": []})]

    def rule(number, body):
        return faults[number] if number < 2 else said("correct")(number, body)

    with chat(rule) as server:
        [one] = score(judge_of(server), states("it"))
    assert one.reward == 1.0 and len(server.bodies) == 3


@pytest.mark.parametrize("fault", [
    (500, {"error": "busy"}), (429, {"error": "slow down"}), (200, b"no json"), (200, {"choices": []}), (200, [1]),
    (200, {"choices": [{"message": {"content": 7}}]}),
])  # fmt: skip
def test_after_all_attempts_the_judge_abstains_and_the_reason_says_why(chat, judge_of, fault):
    with chat(lambda *_: fault) as server:
        judge = judge_of(server, max_abstained=1.0)
        [one] = score(judge, states("it"))
    assert len(server.bodies) == 3 and not one.is_judged
    assert one.reason.startswith(ABSTAINED) and one.reason.endswith("(after 3 attempts)")
    assert judge.report.abstained.total() == 1 and judge.report.judged == 0


@pytest.mark.parametrize("reply", [(200, "I think so."), (200, {"choices": [{"message": {"content": None}}]})])
def test_a_reply_without_a_verdict_is_asked_for_again_and_then_is_an_abstention(chat, judge_of, reply):
    with chat(lambda *_: reply) as server:
        judge = judge_of(server, max_abstained=1.0, verdict_attempts=2)
        [one] = score(judge, states("it"))
    assert len(server.bodies) == 2 and one.reason == f"{ABSTAINED}its reply has no verdict"
    assert judge.report.replies == 2


def test_a_second_reply_may_have_the_verdict(chat, judge_of):
    with chat(lambda number, _: (200, "verdict: correct" if number else "Well.")) as server:
        [one] = score(judge_of(server, max_abstained=0.0), states("it"))
    assert one.reward == 1.0 and len(server.bodies) == 2


def test_no_answer_in_time_is_a_fault(chat, judge_of):
    second = threading.Event()

    def rule(number, body):
        second.wait() if number == 0 else second.set()
        return said("correct")(number, body)

    with chat(rule) as server:
        [one] = score(judge_of(server, request_limit_s=3.0), states("it"))
    assert one.reward == 1.0 and len(server.bodies) == 2


def test_a_refused_request_is_an_abstention_and_not_sent_again(chat, judge_of):
    def rule(number, body):
        long = "too long" in body["messages"][0]["content"]
        return (400, {"error": "context length"}) if long else said("correct")(number, body)

    with chat(rule) as server:
        scored = score(judge_of(server, max_abstained=0.5), states("too long"), states("it", sample=1))
    assert [one.is_judged for one in scored] == [False, True] and len(server.bodies) == 2
    assert "status 400" in scored[0].reason and "context length" in scored[0].reason


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_obeyed_by_all_requests(chat, judge_of, as_date: bool):
    wait = 2.0 if as_date else 1.0  # dates have whole seconds

    def rule(number, body):
        if number:
            return said("correct")(number, body)
        return 429, {"error": "slow"}, {"Retry-After": formatdate(time.time() + wait + 1) if as_date else "1"}

    with chat(rule) as server:
        judge = judge_of(server, max_in_flight=1)
        scored = score(judge, *(states(f"it {i}", sample=i) for i in range(3)))
    assert [one.reward for one in scored] == [1.0] * 3
    assert server.times[1] - server.times[0] >= wait * 0.95


def test_a_server_that_is_closed_for_an_hour_is_not_waited_for(chat, judge_of):
    with chat(lambda *_: (429, {"error": "quota"}, {"Retry-After": "3600"})) as server:
        begun = time.monotonic()
        with pytest.raises(PartlyDrawn, match="abstained on 3 of 20 responses, and rewards.judge.max_abstained"):
            judge = judge_of(server, max_in_flight=1)
            score(judge, *(states(f"it {i}", sample=i) for i in range(20)))
    assert time.monotonic() - begun < 20 and len(server.bodies) == 3
    assert judge.report.abstained.total() == 3
    assert "3600 s" in next(iter(judge.report.abstained))


def test_a_server_that_is_not_there_is_an_abstention_with_its_reason(judge_of, chat):
    with chat(said("correct")) as server:
        pass
    [one] = score(judge_of(server, max_abstained=1.0), states("it"))
    assert "ConnectError" in one.reason


# --- giving up, and what is kept ----------------------------------------------------------------------------------


def test_up_to_the_allowed_share_abstentions_are_scored_and_above_it_the_rest_is_kept(chat, judge_of):
    def rule(number, body):
        return 200, "no idea" if "bad" in body["messages"][0]["content"] else "verdict: correct"

    rollouts = [states("good", sample=i) for i in range(8)] + [states("bad", sample=8), states("bad", sample=9)]
    with chat(rule) as server:
        scored = score(judge_of(server, max_abstained=0.2), *rollouts)
        assert [one.is_judged for one in scored] == [True] * 8 + [False] * 2
        with pytest.raises(PartlyDrawn, match="2 of 10 responses") as stopped:
            score(judge_of(server, max_abstained=0.19), *rollouts)
    assert [one.rollout.sample_index for one in stopped.value.drawn] == list(range(8))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_refuses_everything_ends_the_run_at_once_and_keeps_the_known_verdicts(chat, judge_of, status: int):
    with chat(said("correct")) as server:
        score(judge_of(server), states("it"))
    with chat(lambda *_: (status, {"error": "no"})) as server:
        with pytest.raises(PartlyDrawn, match=f"status {status}") as stopped:
            score(judge_of(server, max_in_flight=1, max_abstained=1.0),
                  states("it"), states("that", sample=1), states("this", sample=2))  # fmt: skip
    assert [one.rollout.sample_index for one in stopped.value.drawn] == [0] and len(server.bodies) == 1


def test_a_stopped_part_is_on_disk_and_goes_on_with_what_has_no_verdict(chat, judge_of, tmp_path):
    requests = [GenerationRequest(PROSE.id, sample, (1, 2), 7) for sample in range(6)]
    drawn: list[int] = []
    broken = True

    def generate(asked):
        drawn.extend(request.sample_index for request in asked)
        return [states(f"it {request.sample_index}", sample=request.sample_index) for request in asked]

    def rule(number, body):
        down = broken and re.search(r"it [45]\n", body["messages"][0]["content"])
        return (429, {}, {"Retry-After": "9999"}) if down else said("correct")(number, body)

    def collect(server):
        # one request at a time: those under way are given up with the judge, and how many depends on the machine
        scorer = JudgeScorer(ANSWERS, judge_of(server, max_abstained=0.2, max_in_flight=1).verdicts)
        store = RolloutStore(tmp_path / "store")
        draw = DrawnInParts(store, 0, lambda asked: draw_scored(lambda: generate(asked), scorer, [PROSE]), part_size=10,
                            writes=True)  # fmt: skip
        return draw(requests)

    with chat(rule) as server:
        with pytest.raises(UserError, match="the judge abstained on 2 of 6 .* 4 responses of iteration 0 are kept in"):
            collect(server)
        broken = False
        scored = collect(server)
    assert [one.reward for one in scored] == [1.0] * 6
    assert drawn == [*range(6), 4, 5]


# --- the cache ------------------------------------------------------------------------------------------------------


def test_a_verdict_that_is_known_is_not_asked_for_again_by_any_run(chat, judge_of):
    with chat(by_answer("it")) as server:
        first = score(judge_of(server), states("it"), states("that", sample=1))
        judge = judge_of(server)
        again = score(judge, states("it"), states("that", sample=1))
    assert again == first and len(server.bodies) == 2
    assert (judge.report.cached, judge.report.replies, judge.report.judged) == (2, 0, 2)


@pytest.mark.parametrize("change", [{"model": "judge-2"}, {"temperature": 0.5}, {"prompt": "{reference}={answer}?"}])
def test_another_model_temperature_or_prompt_is_asked_anew(chat, tmp_path, change):
    with chat(said("correct")) as server:
        for settings in ({}, change):
            config = JudgeConfig(**{"url": server.url, "model": "judge-1", **QUICK, **settings})
            score(Judge(config, JudgeCache(tmp_path / "judge.sqlite"), None), states("it"))
    assert len(server.bodies) == 2


def test_abstentions_are_asked_again_and_their_tokens_are_counted(chat, judge_of, tmp_path):
    with chat(lambda number, _: (200, "hm" if number < 2 else "verdict: correct")) as server:
        [one] = score(judge_of(server, max_abstained=1.0), states("it"))
        [again] = score(judge_of(server, max_abstained=1.0), states("it"))
    assert (one.is_judged, again.reward) == (False, 1.0)
    assert JudgeCache(tmp_path / "cache" / "judge.sqlite").tokens() == (300, 30)


def test_verdicts_survive_a_kill(tmp_path):
    path = tmp_path / "judge.sqlite"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from nemo_edo.rewards.judge_cache import JudgeCache, Reply\n"
        "cache = JudgeCache(Path(sys.argv[1]))\n"
        "for i in range(50): cache.put(str(i), Reply(i % 2 == 0, 'text', 1, 1))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=120).returncode == -9
    cache = JudgeCache(path)
    assert [cache.get(str(i)).verdict for i in range(50)] == [i % 2 == 0 for i in range(50)]


def test_several_processes_may_write_at_a_time(tmp_path):
    path = tmp_path / "judge.sqlite"
    code = (
        "import sys; from pathlib import Path\n"
        "from nemo_edo.rewards.judge_cache import JudgeCache, Reply\n"
        "cache = JudgeCache(Path(sys.argv[1]))\n"
        "for i in range(100): cache.put(f'{sys.argv[2]} {i}', Reply(True, 'text', 1, 2))\n"
        "cache.put('shared', Reply(sys.argv[2] == '0', sys.argv[2], 1, 2))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    cache = JudgeCache(path)
    assert all(cache.get(f"{n} {i}") is not None for n in range(3) for i in range(100))
    assert cache.tokens() == (301, 602)  # of the shared request, the first verdict stays
    first = cache.get("shared")
    cache.put("shared", Reply(not first.verdict, "late", 0, 0))
    assert cache.get("shared") == first


def test_a_file_that_is_no_cache_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "judge.sqlite"
    path.write_text("not a database, but long enough to be read as one" * 100)
    with pytest.raises(UserError, match="rewards.judge.cache: .*judge.sqlite cannot be used"):
        JudgeCache(path)


def test_the_key_of_a_request_is_that_of_its_content():
    assert request_key({"a": 1, "b": [2]}) == request_key({"b": [2], "a": 1}) != request_key({"a": 1, "b": [3]})


# --- agreement and costs --------------------------------------------------------------------------------------------


def test_the_rules_are_asked_about_the_same_answers_and_agreement_is_reported(chat, judge_of, verifier):
    other = Problem("test-3", "?", "1/2", "1/2", "test.jsonl:3", answer_kind="math")
    verdicts = {"0.5": "correct", "1/3": "correct", "7": "incorrect", "4.0": "incorrect", "it": "correct"}

    def rule(number, body):
        answer = re.search(r"<answer>\n(.*)\n</answer>", body["messages"][0]["content"])[1]
        return 200, f"verdict: {verdicts[answer]}"

    with chat(rule) as server:
        judge = judge_of(server, rules=verifier, prompt_price=2.0, completion_price=10.0)
        scored = score(judge, states("0.5", other), states("1/3", other, 1), states("7", other, 2),
                       states("4.0", NUMBER), states("it", PROSE), problems=(PROSE, NUMBER, other))  # fmt: skip
    ends = [next((end for end in (RULES_AGREE, RULES_DISAGREE) if one.reason.endswith(end)), None) for one in scored]
    assert ends == [RULES_AGREE, RULES_DISAGREE, RULES_AGREE, RULES_DISAGREE, None]
    numbers = judge.report.numbers(judge.settings)
    assert (numbers["compared"], numbers["agreement"], numbers["kappa"]) == (4, 0.5, 0.0)
    assert numbers["cost"] == pytest.approx((5 * 100 * 2 + 5 * 10 * 10) / 1e6)
    said_so = judge.report.in_words(judge.settings)
    assert "the rules agree on 50.0% of 4 responses, Cohen's kappa 0.000" in said_so and "cost 0.0015" in said_so


def test_a_report_is_of_what_came_since_the_last_one(chat, judge_of):
    with chat(said("correct")) as server:
        judge = judge_of(server)
        score(judge, states("it"))
        assert judge.take_report().numbers(judge.settings)["judged"] == 1
        assert judge.take_report().numbers(judge.settings) == {
            "replies": 0, "cached": 0, "judged": 0, "abstained": 0, "prompt_tokens": 0, "completion_tokens": 0,
        }  # fmt: skip


# --- the key --------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_is_in_no_message_log_or_file(chat, judge_of, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    replies = [(200, f"the key is {KEY}, verdict unclear"), (429, {"error": f"key {KEY}"}), (400, {"error": KEY}),
               (401, {"error": f"wrong key {KEY}"})]  # fmt: skip
    seen: list[str] = []
    for reply in replies:
        with chat(lambda *_, reply=reply: reply) as server:
            judge = judge_of(server, api_key_variable="JUDGE_KEY", max_abstained=1.0)
            try:
                seen.extend(one.reason for one in score(judge, states("it")))
            except PartlyDrawn as error:
                seen.append(repr(error) + str(error.__cause__) + str(error.__context__))
            with pytest.raises(UserError) if reply[0] != 200 else caplog.at_level(logging.DEBUG):
                judge.check()
            seen += [repr(judge.settings), repr(vars(judge.report)), judge.report.in_words(judge.settings)]
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in "".join(seen) and KEY not in caplog.text and b"***" in files and KEY.encode() not in files
    assert any("***" in text for text in seen)


def test_a_key_that_the_environment_lacks_is_an_error_before_anything_is_asked(chat, judge_of, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with chat(said("correct")) as server, pytest.raises(UserError, match="JUDGE_KEY, which the environment does not"):
        judge_of(server, api_key_variable="JUDGE_KEY")
    assert not server.bodies


@pytest.mark.parametrize(("rule", "message"), [
    (lambda *_: (404, {"error": "no model judge-1"}), "status 404.*no model judge-1"),
    (lambda *_: (400, {"error": "no chat template"}), "does not answer: it refused the request: status 400.*template"),
    (lambda *_: (503, {"error": "loading"}), "does not answer: .*status 503"),
])  # fmt: skip
def test_a_judge_that_does_not_answer_is_known_before_anything_is_drawn(chat, judge_of, rule, message: str):
    with chat(rule) as server, pytest.raises(UserError, match=message):
        judge_of(server).check()


def test_the_check_takes_any_reply(chat, judge_of):
    with chat(lambda *_: (200, "Hello!")) as server:
        judge_of(server).check()
    assert set(server.paths) == {"/v1/chat/completions"}


def test_a_url_may_name_the_endpoint_itself(chat, judge_of, tmp_path):
    with chat(said("correct")) as server:
        config = JudgeConfig(url=f"{server.url}/chat/completions", model="m")
        assert score(Judge(config, JudgeCache(tmp_path / "j.sqlite"), None), states("it"))[0].reward == 1.0


def test_sqlite_is_what_holds_the_cache(tmp_path):
    JudgeCache(tmp_path / "judge.sqlite").put("key", Reply(None, "hm", 3, 4))
    with sqlite3.connect(tmp_path / "judge.sqlite") as file:
        assert file.execute("SELECT * FROM replies").fetchall() == [("key", None, "hm", 3, 4)]


def test_every_number_of_a_report_is_in_the_page_of_metrics():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## `judge`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    report = JudgeReport(agreement=Counter([(True, True)]))
    settings = JudgeConfig(prompt_price=1.0, completion_price=1.0)
    assert documented == {"iteration", *report.numbers(settings)}
