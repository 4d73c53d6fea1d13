"""The scripted engine keeps the contract of GenerationEngine, and its refit changes the version alone."""

import pytest
from helpers.scripted_engine import ScriptedEngine

from nemo_edo.generation.in_process import InProcessSync
from nemo_edo.types import GenerationRequest, SamplingParams

STOP = 1
REQUESTS = [GenerationRequest(f"p-{i}", i, (5, 6), seed=100 + i) for i in range(3)]


def engine(script) -> ScriptedEngine:
    return ScriptedEngine(script, encode=lambda text: [ord(c) for c in text],
                          decode=lambda ids: "".join(map(chr, ids)), stop_id=STOP, log_prob=-0.5)


def sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(1.0, 1.0, max_new_tokens)


def test_rollouts_are_the_requests_in_order_with_the_scripts_texts_and_the_policy_version():
    scripted = engine(lambda request, _: f"{request.seed}")
    scripted.policy_version = 7
    rollouts = scripted.generate(REQUESTS, sampling(10))
    assert [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts] == [
        (r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in REQUESTS]
    assert [(r.text, r.policy_version) for r in rollouts] == [("100", 7), ("101", 7), ("102", 7)]


@pytest.mark.parametrize(("limit", "ids", "finished"), [(3, (97, 98, STOP), True), (2, (97, 98), False),
                                                        (1, (97,), False)])
def test_a_response_finishes_with_room_for_its_stop_token_which_its_text_leaves_out(limit, ids, finished):
    [rollout] = engine(lambda *_: "ab").generate(REQUESTS[:1], sampling(limit))
    assert (rollout.response_ids, rollout.text, rollout.finished) == (ids, "ab"[:limit], finished)
    assert rollout.response_logprobs == (-0.5,) * limit


def test_a_stop_string_and_a_requests_own_limit_end_a_response():
    stopped = SamplingParams(1.0, 1.0, 10, stop=("bc",))
    [rollout] = engine(lambda *_: "abcd").generate(REQUESTS[:1], stopped)
    assert (rollout.text, rollout.stop, rollout.finished, len(rollout.response_ids)) == ("abc", "bc", False, 3)
    [whole] = engine(lambda *_: "acbd").generate(REQUESTS[:1], stopped)
    assert (whole.text, whole.stop, whole.finished) == ("acbd", None, True)
    own = GenerationRequest("p", 0, (5,), seed=0, max_new_tokens=2)
    found = engine(lambda *_: "abcd").generate([own, *REQUESTS[:1]], sampling(3))
    assert [rollout.text for rollout in found] == ["ab", "abc"]


def test_rollouts_after_a_push_carry_its_version():
    scripted = engine(lambda *_: "a")
    sync = InProcessSync(scripted)
    for version in (1, 2, 9):
        sync.push(version)
        assert {rollout.policy_version for rollout in scripted.generate(REQUESTS, sampling(5))} == {version}
