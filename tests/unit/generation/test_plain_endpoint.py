"""Endpoints that return text alone generate for what needs no log-probabilities, and say at once what does."""

import pytest
from helpers.chat_server import ChatServer

from nemo_edo.config import ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.generation.replica import PlainReplica, Replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.generation.server_engine import PlainEngine, ServerEngine
from nemo_edo.types import GenerationRequest, SamplingParams

END = 0
REQUESTS = [GenerationRequest("p-0", sample, tuple(b"6 + 1"), seed=2**40 + sample) for sample in range(3)]
CHATS = {"p-0": [{"role": "user", "content": "6 + 1?"}]}
SETTINGS = {"stop_ids": [END], "vocab_size": 256}


def decode(ids) -> str:
    return bytes(ids).decode()


def plain(url: str, *, chat: bool, **settings) -> PlainEngine:
    replica = PlainReplica("endpoint 0", url, None, ready_limit_s=5.0, model=None)
    replica.wait_until_ready()
    own = {"encode": str.encode, "prompt_text": decode, "chats": CHATS if chat else None}
    return PlainEngine([replica], VLLM, ServersConfig(backoff_s=0.01, **settings), decode=decode, **SETTINGS, **own)


@pytest.mark.parametrize("chat", [False, True])
def test_text_becomes_tokens_without_log_probabilities_and_ends_as_the_endpoint_says_or_at_a_stop_string(chat: bool):
    replies = iter([(None, "stop"), ("7", "length"), ("7\nno more", "stop"), ("7.", "stop"), ("5", "abort"),
                    ("4", "content_filter")])  # fmt: skip

    def rule(number: int, body: dict) -> tuple:
        if not body:
            assert server.paths[-1] == "/v1/models"
            return 200, {"data": [{"id": "gpt"}]}
        text, reason = next(replies)
        choice = {"message": {"content": text}} if chat else {"text": text}
        return 200, {"model": "gpt-2026-01-01", "choices": [{**choice, "finish_reason": reason, "logprobs": None}]}

    with ChatServer(rule) as server:
        limit = "max_completion_tokens" if chat else "max_tokens"
        engine, found = plain(server.url, chat=chat, token_limit=limit), []
        for stop in ((), (), ("\n",), (), ()):
            found += engine.generate(REQUESTS[:1], SamplingParams(0.7, 0.9, 8, stop=stop))
    assert [(bytes([*one.response_ids]), one.text, one.finished, one.stop) for one in found] == [
        (b"\0", "", True, None), (b"7", "7", False, None), (b"7\n", "7\n", False, "\n"), (b"7.\0", "7.", True, None),
        (b"4", "4", False, None)]  # fmt: skip
    assert not any(len(one.response_logprobs) for one in found)
    asked = {"messages": CHATS["p-0"]} if chat else {"prompt": "6 + 1"}
    sampling = {"temperature": 0.7, "top_p": 0.9, limit: 8}
    assert server.bodies[-1] == {"model": "gpt", **asked, **sampling, "seed": REQUESTS[0].seed % 2**31}
    assert server.paths[-1] == ("/v1/chat/completions" if chat else "/v1/completions")


def test_an_endpoint_that_lists_no_models_asks_for_the_models_name():
    with ChatServer(lambda *_: (404, {"error": "no such path"})) as server:
        with pytest.raises(UserError, match=r"status 404: .*generation\.servers\.model"):
            plain(server.url, chat=False)
        named = PlainReplica("endpoint 0", server.url, None, ready_limit_s=5.0, model="mine")
        named.wait_until_ready()
    assert named.model_name == "mine" and named.served == "mine (mine)"


@pytest.mark.parametrize(("choice", "lacking"), [
    ({"text": "7", "logprobs": None}, "token ids"), ({"text": "7", "token_ids": [55], "logprobs": None}, "log-prob"),
    ({"text": "7", "token_ids": None, "logprobs": {"token_logprobs": [-0.1]}}, "token ids"),
])  # fmt: skip
def test_where_log_probabilities_are_needed_the_first_answer_without_ends_the_generation(choice: dict, lacking: str):
    with ChatServer(lambda *_: (200, {"choices": [{**choice, "finish_reason": "stop"}]})) as server:
        engine = ServerEngine([Replica("server 0", server.url.removesuffix("/v1"))], VLLM, ServersConfig(),
                              decode=decode, **SETTINGS)  # fmt: skip
        with pytest.raises(UserError, match=f"without {lacking}.*generation=openai"):
            engine.generate(REQUESTS[:1], SamplingParams(1.0, 1.0, 8))
    assert len(server.bodies) == 1
