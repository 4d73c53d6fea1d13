"""What we rely on of TensorRT-LLM, which cannot run here, as its sources have it (tests/data): an upgrade of the pin
needs another look at them."""

import json
from pathlib import Path

from nemo_edo.config import ServersConfig
from nemo_edo.generation.server_api import TRTLLM, completion_body, read_answer
from nemo_edo.types import GenerationRequest, SamplingParams

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()

HAS = json.loads((ROOT / "tests" / "data" / "tensorrt_llm.json").read_text())


def test_trtllm_gets_options_and_fields_that_the_pinned_release_has():
    assert f"ARG TRTLLM_VERSION={HAS['version']}\n" in DOCKERFILE
    assert f"tensorrt_llm=={HAS['version']} " in TRTLLM.install
    api = TRTLLM(ServersConfig(), "bfloat16", Path("log"), gpus=(0,), max_length=64)
    options = [part[2:] for part in api.command(Path("/model"), 8000) if part.startswith("--")]
    assert set(options) == set(HAS["options"])
    request, sampling = GenerationRequest("1", 0, (5, 6), seed=7), SamplingParams(1.0, 1.0, 8, stop=("x",))
    assert completion_body(TRTLLM, "model", request, sampling, [2]).keys() == set(HAS["request_fields"])


def test_an_answer_with_the_fields_that_trtllm_has_is_read():
    logprobs = dict.fromkeys(HAS["logprobs_fields"], []) | {"token_logprobs": [-0.5, -1.0]}
    said = {"index": 0, "text": "", "token_ids": [7, 2], "logprobs": logprobs, "finish_reason": "stop"}
    choice = dict.fromkeys(HAS["choice_fields"]) | said
    assert choice.keys() == set(HAS["choice_fields"]) and logprobs.keys() == set(HAS["logprobs_fields"])
    assert read_answer({"model": "policy", "choices": [choice]}, "policy", 10) == ((7, 2), (-0.5, -1.0), "stop")
