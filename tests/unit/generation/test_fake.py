"""The scripted engine keeps the contract of GenerationEngine."""

from __future__ import annotations

import pytest

from nemo_edo.generation.fake import ScriptedEngine
from nemo_edo.types import GenerationRequest, SamplingParams

STOP = 1
REQUESTS = [GenerationRequest(f"p-{i}", i, (5, 6), seed=100 + i) for i in range(3)]


def engine(script) -> ScriptedEngine:
    return ScriptedEngine(script, encode=lambda text: [ord(c) for c in text],
                          decode=lambda ids: "".join(map(chr, ids)), stop_id=STOP, log_prob=-0.5)


def sampling(max_new_tokens: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, 1.0, max_new_tokens)


def test_rollouts_are_the_requests_in_order_with_the_scripts_texts():
    rollouts = engine(lambda request, _: f"{request.seed}").generate(REQUESTS, sampling(10))
    assert [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts] == [
        (r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in REQUESTS]
    assert [r.text for r in rollouts] == ["100", "101", "102"]


def test_a_response_ends_with_the_stop_token_which_its_text_leaves_out():
    [rollout] = engine(lambda *_: "ab").generate(REQUESTS[:1], sampling(3))
    assert (rollout.response_ids, rollout.text, rollout.finished) == ((97, 98, STOP), "ab", True)
    assert rollout.response_logprobs == (-0.5,) * 3


@pytest.mark.parametrize(("limit", "text"), [(2, "ab"), (1, "a")])
def test_a_response_without_room_for_its_stop_token_did_not_finish(limit: int, text: str):
    [rollout] = engine(lambda *_: "ab").generate(REQUESTS[:1], sampling(limit))
    assert (rollout.text, rollout.finished, len(rollout.response_ids)) == (text, False, limit)


def test_the_script_sees_how_it_is_sampled():
    greedy, sampled = (engine(lambda _, s: f"{s.temperature:g}").generate(REQUESTS[:1], sampling(9, temperature))
                       for temperature in (0.0, 1.0))
    assert (greedy[0].text, sampled[0].text) == ("0", "1")


def test_rollouts_carry_the_engines_policy_version():
    scripted = engine(lambda *_: "a")
    scripted.policy_version = 7
    assert {r.policy_version for r in scripted.generate(REQUESTS, sampling(5))} == {7}


def test_a_stop_string_ends_a_response_and_is_named():
    stopped = SamplingParams(1.0, 1.0, 10, stop=("bc",))
    [rollout] = engine(lambda *_: "abcd").generate(REQUESTS[:1], stopped)
    assert (rollout.text, rollout.stop, rollout.finished, len(rollout.response_ids)) == ("abc", "bc", False, 3)
    [whole] = engine(lambda *_: "acbd").generate(REQUESTS[:1], stopped)
    assert (whole.text, whole.stop, whole.finished) == ("acbd", None, True)


def test_a_request_may_have_a_limit_of_its_own():
    own = GenerationRequest("p", 0, (5,), seed=0, max_new_tokens=2)
    found = engine(lambda *_: "abcd").generate([own, *REQUESTS[:1]], sampling(3))
    assert [rollout.text for rollout in found] == ["ab", "abc"]
