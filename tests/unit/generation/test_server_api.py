"""What a completion request says, and which answers are used."""

import base64
import copy
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from nemo_edo.config import ServersConfig
from nemo_edo.generation.server_api import TRTLLM, VLLM, completion_body, read_answer, read_experts
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

REQUEST = GenerationRequest("p-0", 3, (5, 6), seed=2**62)
BODY = {"model": "policy", "choices": [{"token_ids": [7, 8, 1], "logprobs": {"token_logprobs": [-0.1, 0, -2.5]},
                                        "finish_reason": "stop"}]}


def changed(**fields) -> dict:
    body = copy.deepcopy(BODY)
    body["choices"][0] |= fields
    return body


def test_another_models_answer_is_no_fault_but_one_that_names_none_passes():
    with pytest.raises(ServerError, match="'another', expected 'policy'"):
        read_answer({**BODY, "model": "another"}, "policy", 50)
    assert read_answer({"choices": BODY["choices"]}, "policy", 50) == ((7, 8, 1), (-0.1, 0, -2.5), "stop")


@pytest.mark.parametrize("body", [
    None, [], {}, {"choices": []}, {"choices": [BODY["choices"][0]] * 2}, {"error": "out of memory"},
    changed(token_ids=None), changed(token_ids=[], logprobs={"token_logprobs": []}),
    changed(text="", token_ids=[], logprobs={"token_logprobs": []}, finish_reason="abort"),
    changed(token_ids=[7, 50, 1]),
    *(changed(logprobs={"token_logprobs": [-0.1, number, -0.2]}) for number in (math.nan, -math.inf)),
    changed(finish_reason="abort"), changed(finish_reason=None),
])  # fmt: skip
def test_an_answer_of_another_kind_of_server_or_of_an_aborted_request_is_a_fault(body: object):
    with pytest.raises(Fault):
        read_answer(body, "policy", 50)


def encoded(experts: np.ndarray) -> dict:
    """As vLLM 0.32 and 0.33 return them."""
    buffer = io.BytesIO()
    np.save(buffer, experts)
    return changed(routed_experts=base64.b64encode(buffer.getvalue()).decode())


def test_experts_of_an_answer_are_those_of_every_token_but_the_last_of_what_is_kept_of_it():
    experts = np.random.default_rng(0).integers(0, 200, (4, 3, 2), np.uint8)  # prompt 5 6, response 7 8 1
    for kept in (5, 4):  # with a stop string the last token is cut off
        found = np.frombuffer(read_experts(encoded(experts), kept), np.int16).reshape(-1, 3, 2)
        assert (found == experts[: kept - 1]).all()
    for wrong, error in ((BODY, ServerError), (changed(routed_experts=None), ServerError),
                         (changed(routed_experts="AAAA"), Fault), (encoded(experts[:3]), Fault)):  # fmt: skip
        with pytest.raises(error, match="experts"):
            read_experts(wrong, 5)
    api = VLLM(ServersConfig(), "bfloat16", Path("log"), gpus=(0,), max_length=64, returns_experts=True)
    assert "--enable-return-routed-experts" in api.command(Path("/model"), 8000)
    assert api.environment("key")["VLLM_USE_V2_MODEL_RUNNER"] == "1"


@pytest.mark.parametrize("api", [VLLM, TRTLLM], ids=lambda api: api.backend)
def test_a_request_has_its_prompt_seed_sampling_limit_and_its_only_ends(api):
    body = completion_body(api, "policy", REQUEST, SamplingParams(0.7, 0.9, 4, stop=("x", "y")), (1, 2))
    assert (body["prompt"], body["seed"], body["max_tokens"]) == ([5, 6], 2**62, 4)
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [1, 2])
    assert (body["stop"], body["include_stop_str_in_output"]) == (["x", "y"], True)
    own_limit = GenerationRequest("p-0", 3, (5, 6), seed=1, max_new_tokens=2)
    greedy = completion_body(api, "policy", own_limit, SamplingParams(0.0, 0.9, 4), (1, 2))
    assert "stop" not in greedy and (greedy["top_p"], greedy["max_tokens"]) == (1.0, 2)


def test_trtllm_gets_options_and_fields_that_the_pinned_release_has_and_its_answers_have_what_is_read():
    """TensorRT-LLM cannot run here: the file has what its sources have. An upgrade of the pin needs another look."""
    root = Path(__file__).parents[3]
    has = json.loads((root / "tests" / "data" / "tensorrt_llm.json").read_text())
    assert f"ARG TRTLLM_VERSION={has['version']}\n" in (root / "Dockerfile").read_text()
    assert f"tensorrt_llm=={has['version']} " in TRTLLM.install
    api = TRTLLM(ServersConfig(), "bfloat16", Path("log"), gpus=(0,), max_length=64)
    options = [part[2:] for part in api.command(Path("/model"), 8000) if part.startswith("--")]
    assert set(options) == set(has["options"])
    request, sampling = GenerationRequest("1", 0, (5, 6), seed=7), SamplingParams(1.0, 1.0, 8, stop=("x",))
    assert completion_body(TRTLLM, "model", request, sampling, [2]).keys() == set(has["request_fields"])
    [choice] = BODY["choices"]  # which the engine reads
    assert choice.keys() <= {*has["choice_fields"]} and choice["logprobs"].keys() <= {*has["logprobs_fields"]}
