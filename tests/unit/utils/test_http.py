"""Every answer that is not usable ends in one message without the key, whichever client asked."""

import logging
import time
import traceback
from pathlib import Path

import pytest
from helpers.chat_server import ChatServer
from helpers.completions_server import STOP_ID, completion

from nemo_edo.config import JudgeConfig, ServersConfig
from nemo_edo.data.answers import HASHES
from nemo_edo.errors import UserError
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.rewards.judge import Judge, JudgeCache
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import ApiKey, ServerError, key_of_environment, proxy_for

SECRET = "sentinel0123456789"
KEY = f"sk-{SECRET}/+="
REQUEST = GenerationRequest("p-0", 0, (5, 6), seed=7)


def generate(url: str, folder: Path, **settings) -> None:
    replica = Replica("server 0", url.removesuffix("/v1"), KEY)
    replica.model_name = "policy"
    quick = {"attempts": 2, "restarts": 1, "backoff_s": 0.01, "health_limit_s": 5.0, **settings}
    engine = ServerEngine([replica], VLLM, ServersConfig(**quick), stop_ids=[STOP_ID], vocab_size=100, decode=str)
    [rollout] = engine.generate([REQUEST], SamplingParams(1.0, 1.0, 8))
    assert [*rollout.response_ids] == [9, 2, 2, STOP_ID]


def refit(url: str, folder: Path) -> None:
    Replica("server 0", url.removesuffix("/v1"), KEY).request("POST", "/update_weights", json={})["done"]


def judge(url: str, folder: Path) -> None:
    settings = JudgeConfig(url=url, model="judge-1", api_key_variable="SENTINEL", attempts=2, backoff_s=0.01)
    Judge(settings, JudgeCache(folder / "judge.sqlite"), HASHES).check()


@pytest.mark.parametrize("client", [generate, refit, judge])
@pytest.mark.parametrize(("answer", "said"), [
    ((401, {"error": f"wrong key {KEY}"}), r"status 401: .*wrong key \*\*\*"),
    ((500, KEY.replace("/", r"\/").encode()), r"status 500: \*\*\*"),
    ((200, f"<html>{KEY}".encode()), r"not JSON: <html>\*\*\*"),
    ((200, b"{}", {f"bad name {KEY}": "1"}), "")])
def test_an_answer_without_a_value_ends_in_a_message_without_the_key(
    client, answer, said, tmp_path, monkeypatch, caplog, capfd
):
    monkeypatch.setenv("SENTINEL", KEY)
    caplog.set_level(logging.INFO)
    with ChatServer(lambda *_: answer if server.paths[-1] != "/health" else (200, b"")) as server:
        with pytest.raises(UserError, match=f"(?s){said}") as error:
            client(server.url, tmp_path)
    seen = "".join([*traceback.format_exception(error.value), caplog.text, capfd.readouterr().out])
    assert SECRET not in seen
    assert any(header.get("Authorization") == f"Bearer {KEY}" for header in server.headers)


def test_a_request_ends_in_time():
    with ChatServer(lambda *_: time.sleep(5) or (200, b"")) as server:
        with pytest.raises(ServerError, match=r"GET /health: no answer within 0\.3 s"):
            Replica("server 0", server.url.removesuffix("/v1")).request("GET", "/health", timeout_s=0.3)


@pytest.mark.parametrize(("asked_s", "limit_s", "waited_s"), [("1", 60.0, 0.95), ("3600", 0.2, 0.2)])
def test_a_server_is_left_alone_for_its_retry_after_up_to_the_limit(asked_s, limit_s, waited_s, tmp_path):
    asked = []

    def rule(number: int, body: dict) -> tuple:
        if not body:
            return 200, b""
        asked.append(number)
        return (200, completion(body)) if len(asked) > 1 else (429, b"slow down", {"Retry-After": asked_s})

    with ChatServer(rule) as server:
        generate(server.url, tmp_path, retry_after_limit_s=limit_s)
    first, second = (server.times[number] for number in asked)
    assert second - first >= waited_s


@pytest.mark.parametrize(("value", "named"), [
    (None, "not set"), ("", "0 characters"), (f"{SECRET}\n", "19 characters"), (f"a {SECRET}", "20 characters"),
    (f"{SECRET}é", "printable ASCII")])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch, value: str | None, named: str):
    if value is not None:
        monkeypatch.setenv("SENTINEL", value)
    with pytest.raises(UserError, match=f"some.setting is SENTINEL, .*{named}") as error:
        key_of_environment("some.setting", "SENTINEL")
    assert SECRET[:7] not in str(error.value)
    assert key_of_environment("some.setting", None).headers == {}


@pytest.mark.parametrize("quoted", [SECRET, f"{SECRET[:5]}\n{SECRET[5:]}", f"{SECRET[:3]}\\n {SECRET[3:]}"])
def test_a_quoted_key_is_hidden_also_where_a_line_breaks_it(quoted: str):
    assert ApiKey(SECRET).hide(f"you sent {quoted}.") == "you sent ***."


@pytest.mark.parametrize(("http_proxy", "url", "found"), [
    ("http://p:3128", "http://node7:8000/x", ("http_proxy", "http://p:3128")),
    ("p:3128", "http://node7:8000/x", ("http_proxy", "http://p:3128")),
    ("http://p:3128", "https://node7/x", None), ("", "http://node7:8000/x", None),
    *(("http://p:3128", f"http://{host}:8000/x", None) for host in ("spared", "[fe80::2]", "10.1.2.3", "[fd00::1]")),
    ("http://p:3128", "http://10.2.2.3:8000/x", ("http_proxy", "http://p:3128")),
    *(("socks5://p:1", f"http://{host}:8000/x", None) for host in
      ("127.0.0.1", "127.8.9.1", "localhost", "[::1]", "0.0.0.0")),
    *((wrong, "http://node7:8000/x", ServerError) for wrong in
      ("socks5://user:sesame@p:1", "http://user:sesame@:1", "http://sesame@p:port", "http://p:99999", "http://[::1"))])
def test_a_proxy_leads_to_no_loopback_address_and_one_that_cannot_be_used_is_named(monkeypatch, http_proxy, url, found):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "spared,[fe80::2], 10.1.0.0/16,fd00::/8")
    monkeypatch.setenv("http_proxy", http_proxy)
    if found is not ServerError:
        assert proxy_for(url) == found
        return
    with pytest.raises(ServerError, match="http_proxy is ") as error:
        proxy_for(url)
    assert "sesame" not in str(error.value)


def test_a_message_names_the_proxy_that_a_request_went_through(monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    with ChatServer(lambda *_: (403, b"not from here")) as server:
        monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
        with pytest.raises(ServerError, match=r"through http_proxy=http://127\.0\.0\.1:\d+: status 403: not from here"):
            Replica("server 0", "http://node7.example:8000").request("GET", "/v1/models")
