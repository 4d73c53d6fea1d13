"""A server's answer is used only where it fits its request."""

import copy
import math

import pytest

from nemo_edo.generation.server_api import completion_body, read_answer
from nemo_edo.generation.trtllm_server import TRTLLM
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

STOP, OTHER_STOP, VOCABULARY = 1, 2, 50
STOPS = (STOP, OTHER_STOP)
REQUEST = GenerationRequest("p-0", 3, (5, 6), seed=2**62)
SAMPLING = SamplingParams(0.7, 1.0, 4)
MODEL = "policy"
BODY = {"model": MODEL, "choices": [{"token_ids": [7, 8, STOP], "logprobs": {"token_logprobs": [-0.1, 0, -2.5]},
                     "finish_reason": "stop", "prompt_token_ids": [5, 6]}]}


def read(body: object):
    return read_answer(body, MODEL, REQUEST, SAMPLING, STOPS, VOCABULARY)


def changed(**fields) -> dict:
    body = copy.deepcopy(BODY)
    for name, value in fields.items():
        if name == "token_logprobs":
            body["choices"][0]["logprobs"][name] = value
        else:
            body["choices"][0][name] = value
    return body


def test_another_models_answer_is_no_fault_but_one_that_names_none_passes():
    with pytest.raises(ServerError, match="as the model 'another', expected 'policy'"):
        read({**BODY, "model": "another"})
    assert read({name: value for name, value in BODY.items() if name != "model"}).ids == (7, 8, STOP)


def test_an_answer_ends_by_its_stop_token_or_by_its_length():
    ended = read(BODY)
    assert (ended.ids, ended.logprobs, ended.finished) == ((7, 8, STOP), (-0.1, 0, -2.5), True)
    cut = read(changed(token_ids=[7, 8, 9, 7], token_logprobs=[-0.1] * 4, finish_reason="length"))
    assert (cut.ids, cut.finished) == ((7, 8, 9, 7), False)
    assert read(changed(token_ids=[7, 8, 9, STOP], token_logprobs=[-0.1] * 4)).finished  # at the limit
    assert read(changed(token_ids=[7, 8, OTHER_STOP])).finished


@pytest.mark.parametrize("body", [
    None, {}, {"choices": []}, {"choices": [BODY["choices"][0]] * 2}, {"error": "out of memory"},
    changed(token_ids=None), changed(token_ids=[]), changed(token_ids=[7, VOCABULARY, STOP]),
    changed(token_ids=[7, 8, 9, 7, STOP], token_logprobs=[-0.1] * 5),
    changed(token_ids=[7, STOP, 8, STOP], token_logprobs=[-0.1] * 4), changed(token_ids=[OTHER_STOP, 8, STOP]),
    changed(token_logprobs=[-0.1, -0.2]), changed(token_logprobs=[-0.1, None, -0.2]), changed(logprobs=None),
    changed(token_logprobs=[-0.1, math.nan, -0.2]), changed(token_logprobs=[-0.1, -math.inf, -0.2]),
    changed(token_logprobs=[-0.1, 0.5, -0.2]),
    changed(finish_reason="length"), changed(finish_reason="abort"), changed(finish_reason=None),
    changed(token_ids=[7, 8, 9]), changed(token_ids=[7, 8], token_logprobs=[-0.1, -0.2]),
    changed(prompt_token_ids=[5, 7]),
])  # fmt: skip
def test_any_other_answer_is_a_fault(body: object):
    with pytest.raises(Fault):
        read(body)


@pytest.mark.parametrize("api", [VLLM(), TRTLLM()], ids=lambda api: api.backend)
def test_a_request_has_its_prompt_seed_sampling_and_its_only_ends(api):
    body = completion_body(api, "policy", REQUEST, SamplingParams(0.7, 0.9, 4, stop=("x", "y")), STOPS)
    assert (body["prompt"], body["seed"], body["max_tokens"]) == ([5, 6], 2**62, 4)
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, list(STOPS))
    assert (body["stop"], body["include_stop_str_in_output"]) == (["x", "y"], True)
    greedy = completion_body(api, "policy", REQUEST, SamplingParams(0.0, 0.9, 4), STOPS)
    assert "stop" not in greedy and greedy["top_p"] == 1.0


STOPPED = SamplingParams(0.7, 1.0, 4, stop=("x", "y"))


def test_an_answer_may_end_at_a_stop_string_only_where_one_was_requested_or_otherwise():
    body = changed(token_ids=[7, 8], token_logprobs=[-0.1, -0.2])
    ended = read_answer(body, MODEL, REQUEST, STOPPED, STOPS, VOCABULARY)
    assert (ended.ids, ended.finished, ended.at_string) == ((7, 8), False, True)
    cut = changed(token_ids=[7, 8, 9, 7], token_logprobs=[-0.1] * 4, finish_reason="length")
    for other in (BODY, cut):
        assert not read_answer(other, MODEL, REQUEST, STOPPED, STOPS, VOCABULARY).at_string
    body["choices"][0]["finish_reason"] = "length"
    with pytest.raises(Fault):
        read_answer(body, MODEL, REQUEST, STOPPED, STOPS, VOCABULARY)


def test_a_requests_own_limit_is_sent_and_checked():
    own = GenerationRequest("p-0", 3, (5, 6), seed=1, max_new_tokens=2)
    assert completion_body(VLLM(), "policy", own, SAMPLING, STOPS)["max_tokens"] == 2
    cut = changed(token_ids=[7, 8], token_logprobs=[-0.1] * 2, finish_reason="length")
    assert read_answer(cut, MODEL, own, SAMPLING, STOPS, VOCABULARY).ids == (7, 8)
    with pytest.raises(Fault):
        read_answer(BODY, MODEL, own, SAMPLING, STOPS, VOCABULARY)
