"""An answer of a server is taken for one only where it can be one."""

from __future__ import annotations

import copy
import math

import pytest

from nemo_edo.generation.server_api import completion_body, read_answer
from nemo_edo.generation.trtllm_server import TRTLLM
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.http_client import Fault
from nemo_edo.types import GenerationRequest, SamplingParams

STOP, VOCABULARY = 1, 50
REQUEST = GenerationRequest("p-0", 3, (5, 6), seed=2**62)
SAMPLING = SamplingParams(0.7, 1.0, 4)
BODY = {"choices": [{"token_ids": [7, 8, STOP], "logprobs": {"token_logprobs": [-0.1, 0, -2.5]},
                     "finish_reason": "stop", "prompt_token_ids": [5, 6]}]}


def read(body: object):
    return read_answer(body, REQUEST, SAMPLING, STOP, VOCABULARY)


def changed(**fields) -> dict:
    body = copy.deepcopy(BODY)
    for name, value in fields.items():
        if name == "token_logprobs":
            body["choices"][0]["logprobs"][name] = value
        else:
            body["choices"][0][name] = value
    return body


def test_an_answer_ends_by_its_stop_token_or_by_its_length():
    ended = read(BODY)
    assert (ended.ids, ended.logprobs, ended.finished) == ((7, 8, STOP), (-0.1, 0, -2.5), True)
    cut = read(changed(token_ids=[7, 8, 9, 7], token_logprobs=[-0.1] * 4, finish_reason="length"))
    assert (cut.ids, cut.finished) == ((7, 8, 9, 7), False)


def test_a_stop_token_in_the_last_place_ends_an_answer():
    assert read(changed(token_ids=[7, 8, 9, STOP], token_logprobs=[-0.1] * 4)).finished


@pytest.mark.parametrize("body", [
    None, [], "text", {}, {"choices": []}, {"choices": [BODY["choices"][0]] * 2}, {"error": "out of memory"},
    changed(token_ids=None), changed(token_ids=[]), changed(token_ids="78"), changed(token_ids=[7, 8.0, STOP]),
    changed(token_ids=[7, True, STOP]), changed(token_ids=[7, VOCABULARY, STOP]), changed(token_ids=[7, -1, STOP]),
    changed(token_ids=[7, 8, 9, 7, STOP], token_logprobs=[-0.1] * 5),
    changed(token_ids=[7, STOP, 8, STOP], token_logprobs=[-0.1] * 4),
    changed(token_logprobs=[-0.1, -0.2]), changed(token_logprobs=[-0.1, None, -0.2]), changed(logprobs=None),
    changed(token_logprobs=[-0.1, math.nan, -0.2]), changed(token_logprobs=[-0.1, -math.inf, -0.2]),
    changed(token_logprobs=[-0.1, 0.5, -0.2]), changed(token_logprobs=[-0.1, "-0.2", -0.2]),
    changed(finish_reason="length"), changed(finish_reason="abort"), changed(finish_reason=None),
    changed(token_ids=[7, 8, 9]), changed(token_ids=[7, 8, 9], finish_reason="length"),
    changed(prompt_token_ids=[5, 7]), changed(prompt_token_ids=7),
])  # fmt: skip
def test_what_is_no_answer_is_a_fault(body: object):
    with pytest.raises(Fault):
        read(body)


@pytest.mark.parametrize("api", [VLLM(), TRTLLM()], ids=lambda api: api.backend)
def test_a_request_names_its_prompt_seed_and_its_only_end(api):
    body = completion_body(api, "policy", REQUEST, SamplingParams(0.7, 0.9, 4), STOP)
    assert (body["prompt"], body["seed"], body["max_tokens"]) == ([5, 6], 2**62, 4)
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [STOP])


def test_greedy_decoding_cuts_nothing_from_the_distribution():
    assert completion_body(VLLM(), "policy", REQUEST, SamplingParams(0.0, 0.9, 4), STOP)["top_p"] == 1.0


# --- stop strings ---------------------------------------------------------------------------------------------------

STOPPED = SamplingParams(0.7, 1.0, 4, stop=("x", "y"))


def test_an_answer_may_end_at_a_stop_string_where_one_was_asked_for():
    body = changed(token_ids=[7, 8], token_logprobs=[-0.1, -0.2])
    ended = read_answer(body, REQUEST, STOPPED, STOP, VOCABULARY)
    assert (ended.ids, ended.finished, ended.at_string) == ((7, 8), False, True)
    with pytest.raises(Fault):
        read(body)


def test_an_answer_to_stop_strings_may_end_otherwise():
    assert not read_answer(BODY, REQUEST, STOPPED, STOP, VOCABULARY).at_string
    cut = changed(token_ids=[7, 8, 9, 7], token_logprobs=[-0.1] * 4, finish_reason="length")
    assert not read_answer(cut, REQUEST, STOPPED, STOP, VOCABULARY).at_string
    with pytest.raises(Fault):
        read_answer(changed(token_ids=[7, 8], token_logprobs=[-0.1] * 2, finish_reason="length"), REQUEST, STOPPED,
                    STOP, VOCABULARY)


@pytest.mark.parametrize("api", [VLLM(), TRTLLM()], ids=lambda api: api.backend)
def test_stop_strings_are_asked_for_with_themselves_in_the_output(api):
    body = completion_body(api, "policy", REQUEST, STOPPED, STOP)
    assert (body["stop"], body["include_stop_str_in_output"]) == (["x", "y"], True)
    assert "stop" not in completion_body(api, "policy", REQUEST, SAMPLING, STOP)


def test_a_requests_own_limit_is_asked_for_and_checked():
    own = GenerationRequest("p-0", 3, (5, 6), seed=1, max_new_tokens=2)
    assert completion_body(VLLM(), "policy", own, SAMPLING, STOP)["max_tokens"] == 2
    cut = changed(token_ids=[7, 8], token_logprobs=[-0.1] * 2, finish_reason="length")
    assert read_answer(cut, own, SAMPLING, STOP, VOCABULARY).ids == (7, 8)
    with pytest.raises(Fault):
        read_answer(BODY, own, SAMPLING, STOP, VOCABULARY)
